"""Fillers: how the bytes of one version get into an engine rank's memory, and their digests.

:func:`~weightsync.engine.engine_role.filler_for` chooses one for each plan, and it stays the same for every round of that plan. A
trainer that publishes streams gets the last one:

=================  ==========================================  ===========================================================
filler             bytes are written to                        digests are taken
=================  ==========================================  ===========================================================
``HostDirect``     the engine's parameters in host memory      by the readers, from each tile after it was copied
``HostStreamed``   two staging buckets in host memory          by the readers; the parameters are read back where possible
``DeviceDirect``   the engine's parameters on a CUDA device    in one launch after all bytes
``DeviceStreamed`` two staging buckets on a CUDA device        in one launch per bucket, or the parameters are read back
``WindowFiller``   two buckets, of windows of a stream         of each window, or the parameters are read back
=================  ==========================================  ===========================================================
"""
