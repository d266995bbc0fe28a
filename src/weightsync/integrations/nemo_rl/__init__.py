"""NeMo-RL: ``policy.generation.refit_transport: "weightsync.integrations.nemo_rl:Engine"``.

See ``docs/integrations/nemo_rl.md``. ``python -m weightsync.integrations nemo_rl`` checks an installation.
"""

from weightsync.integrations.nemo_rl.engine import RefitEngine as Engine

__all__ = ["Engine"]
