"""NeMo-RL: ``policy.generation.refit_transport: "weightsync.integrations.nemo_rl:Engine"``, or :func:`enable` on shared GPUs.

See ``docs/integrations/nemo_rl.md``. ``python -m weightsync.integrations nemo_rl`` checks an installation.
"""

from weightsync.integrations.nemo_rl.engine import RefitEngine as Engine

__all__ = ["Engine", "enable"]


def enable(**options: object) -> None:
    """Let NeMo-RL's workers on shared GPUs transfer shards, in the program that runs the training. Idempotent.

    Args:
        options: As under ``refit_cfg``.

    Raises:
        ImportError: NeMo-RL is not installed, or lacks what is replaced.
        ConfigurationError: An option is unknown or wrong.
    """
    from weightsync.integrations.nemo_rl.colocated import enable_colocated

    enable_colocated(options)
