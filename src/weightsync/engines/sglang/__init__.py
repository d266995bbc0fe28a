"""SGLang as a weightsync engine: a plugin that makes each of its scheduler processes a rank of a replica.

With ``WEIGHTSYNC_COORDINATOR`` set, SGLang's plugin loader calls :func:`~weightsync.engines.sglang.plugin.register`, which hooks
the scheduler's event loop. A rank's parameters are written directly, or the rank stages whole checkpoint tensors for the loader of
SGLang's model. Whatever calls SGLang's code runs on the scheduler's thread between two of its passes. Rank 0 adds requests to pause
and to continue to those that SGLang broadcasts, so all ranks stop at the same pass.
"""
