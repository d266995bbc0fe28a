"""Versions in a file system or in S3, which outlive the trainer: written beside training, signed, and read like any other source.

========================  =====================================================================================================
module                    what it holds
========================  =====================================================================================================
:mod:`.objects`           the store itself, over obstore: put, put if absent, read a range, list, delete
:mod:`.signing`           the run's Ed25519 key; signed manifests
:mod:`.containers`        headers of key frames and deltas, which are safetensors files
:mod:`.writer`            a thread of a trainer rank that stores what it published
:mod:`.region`            a rank's shards as a version has them: key frame and deltas, folded in one pass, or kept in memory
:mod:`.catalog`           which versions there are; garbage collection
:mod:`.restore`           whole tensors of a version, verified: for ``verify`` and ``export``
========================  =====================================================================================================

::

    RUN/versions/EPOCH.NUMBER.manifest             a signed manifest, created last and only if absent: it is the version
    RUN/objects/EPOCH.NUMBER.RANK-RANDOM.safetensors   a key frame or delta, never changed
"""
