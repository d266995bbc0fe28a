"""TRL: its online trainers update vLLM through weightsync instead of their own NCCL group.

``AsyncGRPOTrainer`` and ``AsyncDistillationTrainer`` take an object: ``weight_transfer=WeightTransfer()``. Trainers with
``vllm_mode="server"`` (GRPO, RLOO and others) have no such argument: call :func:`enable` before making one. See
``docs/integrations/trl.md``.
"""

from weightsync.integrations.trl.server_mode import enable
from weightsync.integrations.trl.transfer import WeightTransfer

__all__ = ["WeightTransfer", "enable"]
