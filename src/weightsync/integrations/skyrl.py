"""SkyRL: its trainer publishes through weightsync instead of NCCL, where its user asks for that by calling :func:`enable`.

SkyRL chooses an engine of vLLM's trainer interface by a name from a closed list. It registers its own engine under a name only if
that name is free. :func:`enable` takes the name ``skyrl_nccl`` first. See ``docs/integrations/skyrl.md``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync.config import ClientSettings
from weightsync.engines.vllm.trainer import WeightsyncTrainerEngine, WeightsyncTrainerInitInfo
from weightsync.errors import ConfigurationError
from weightsync.releases import warn_if_untested

NAME = "skyrl_nccl"
"""What SkyRL's ``weight_sync_backend: nccl`` means in its trainer, where trainer and inference do not share GPUs."""


class SkyRLTrainerEngine(WeightsyncTrainerEngine):
    """Publishes the shards of the model of SkyRL's ``FsdpWeightSource``, or what another ``WeightSource`` yields.

    The environment names the coordinator; SkyRL's NCCL address is unused.
    """

    skyrl_handles_prefix_cache_reset: ClassVar[bool] = True
    """A round drops the cache itself."""
    skyrl_force_disable_expandable_segments: ClassVar[bool] = False
    """Shards that other processes cannot map are published from a copy, which torch does not allocate."""
    skyrl_empty_cache_after_send: ClassVar[bool] = True
    skyrl_draft_source: WeightSource | None = None
    """SkyRL assigns it. See :meth:`send_weights`."""

    @staticmethod
    def _live(source: Any) -> tuple[torch.nn.Module | None, dict[str, Any]]:  # noqa: ANN401 - vLLM's or SkyRL's
        # Its subclass for sharded RDT and its FP8 wrapper yield other tensors than the model has. A prefix renames them. A source
        # that keeps more than SkyRL 0.4's may do more than convert.
        plain = type(source).__name__ == "FsdpWeightSource" and vars(source).keys() <= {"_model", "_dtype", "_prefix"}
        if plain and not source.weight_prefix:
            return source.model, {"dtype": source._dtype, "include_buffers": True}  # it yields the whole state dict
        return WeightsyncTrainerEngine._live(source)

    @classmethod
    def trainer_init(
        cls,
        init_info: Any,  # noqa: ANN401 - SkyRL's
        *,
        client: Any,  # noqa: ANN401 - SkyRL's
        source: WeightSource | None = None,
        config: object = None,
    ) -> Self:
        """Join the coordinator. SkyRL calls it on every trainer rank.

        Raises:
            ConfigurationError: ``source`` is missing or not supported, or SkyRL trains a LoRA adapter that it does not merge.
            WeightSyncError: :class:`weightsync.Trainer` raised it.
        """
        warn_if_untested("skyrl")
        if hasattr(getattr(source, "model", None), "peft_config") or hasattr(source, "set_lora_name"):
            raise ConfigurationError(
                "SkyRL gives LoRA adapters to its servers by itself, as files or by its own staging, so weightsync cannot publish "
                "them: set trainer.policy.model.lora.rank=0, or merge_lora=true in Megatron's lora_config"
            )
        # SkyRL pauses with keep before it syncs, and submits no request again.
        own = WeightsyncTrainerInitInfo(rank=init_info.rank, timeout=ClientSettings.load().timeouts.publish, pause_mode="keep")
        return super().trainer_init(own, client=client, source=source, config=config)

    def send_weights(self) -> None:
        """Publish. SkyRL calls it on every trainer rank.

        Raises:
            ConfigurationError: SkyRL wants a draft model updated, too.
            WeightSyncError: See :meth:`WeightsyncTrainerEngine.send_weights`.
        """
        if self.skyrl_draft_source is not None:
            raise ConfigurationError("weightsync does not update the draft model of SkyRL's speculative decoding")
        super().send_weights()


def enable() -> None:
    """Take the name ``skyrl_nccl`` in vLLM's factory of trainer engines.

    Call it in every trainer process, before SkyRL's first sync. Idempotent.

    Raises:
        ConfigurationError: SkyRL has registered its own engine in this process, so it is too late.
    """
    held = WeightTransferTrainerFactory._registry.get(NAME)
    if held is None:
        WeightTransferTrainerFactory.register_engine(NAME, SkyRLTrainerEngine)
    elif held() is not SkyRLTrainerEngine:
        raise ConfigurationError(
            f"{NAME} is registered already in this process: call weightsync.integrations.skyrl.enable() before SkyRL's first sync, "
            "for example as Ray's worker_process_setup_hook"
        )
