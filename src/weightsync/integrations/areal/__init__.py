"""AReaL: its FSDP actors publish their own shards, instead of gathering whole tensors for an NCCL group or a file.

Call :func:`enable` before a ``PPOTrainer`` is made. See ``docs/integrations/areal.md``.
"""

__all__ = ["enable"]


def enable() -> None:
    """Make AReaL's trainers use :class:`~weightsync.integrations.areal.actor.PublishingFSDPActor` for the backend ``fsdp``.

    Idempotent. Call it in the program that makes the trainer: AReaL's controllers name the class to their workers by its path.

    Raises:
        ImportError: AReaL is not installed, or has no FSDP engine under the name that is replaced.
        ConfigurationError: The engine lacks what is replaced or called. The message names it.
    """
    import areal.engine

    from weightsync.integrations.areal.actor import PublishingFSDPActor
    from weightsync.releases import check_interface

    check_interface("areal")
    areal.engine.FSDPPPOActor = PublishingFSDPActor
