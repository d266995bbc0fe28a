"""The weight transfer engine that vLLM makes in every worker for ``{"backend": "weightsync"}``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from weightsync.adapters.vllm.adapter import VllmWorkerAdapter
from weightsync.adapters.vllm.checkpoint import checkpoint_of
from weightsync.adapters.vllm.controls import HttpControls
from weightsync.adapters.vllm.loading import install
from weightsync.adapters.vllm.releases import check_release, installed_release
from weightsync.agents.engine import Engine
from weightsync.errors import ConfigurationError, LoadError

__all__ = ["InitInfo", "UpdateInfo", "WeightsyncEngine"]


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker needs to join: ``init_info`` of vLLM's ``/init_weight_transfer_engine``."""

    control: str
    """Where rank 0 reaches vLLM's control routes."""
    replica: str | None = None
    """The replica's name; else ``WEIGHTSYNC_REPLICA``."""
    coordinator: str | None = None
    """Its URL; else ``WEIGHTSYNC_COORDINATOR``."""
    token: str | None = None
    """The coordinator's token; better in the server's environment, as ``WEIGHTSYNC_TOKEN``."""
    control_token: str = ""
    run: str = ""
    bucket_bytes: int = 64 << 20
    transports: list[str] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Says nothing: what to load was staged before."""


class WeightsyncEngine(WeightTransferEngine):  # type: ignore[misc]
    """Holds this worker's weightsync engine rank, and loads what it has staged when vLLM's ``update_weights`` comes."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        check_release(installed_release())
        super().__init__(*args, **kwargs)
        self._owned = ExitStack()
        self._adapter: VllmWorkerAdapter | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the coordinator as one rank of the replica. A second call leaves and joins anew."""
        self.shutdown()
        replica = init_info.replica or os.environ.get("WEIGHTSYNC_REPLICA")
        if not replica:
            raise ConfigurationError("a vLLM replica needs a name: give replica, or set WEIGHTSYNC_REPLICA")
        parallel, model = self.parallel_config, self.model_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        checkpoint = checkpoint_of(model.model, model.revision, model.hf_config)
        with ExitStack() as owned:
            controls = owned.enter_context(HttpControls(init_info.control, init_info.control_token)) if rank == 0 else None
            adapter = VllmWorkerAdapter(checkpoint, controls)
            owned.enter_context(
                Engine(
                    adapter,
                    replica,
                    init_info.coordinator,
                    token=init_info.token,
                    rank=rank,
                    world_size=parallel.world_size_across_dp,
                    run=init_info.run,
                    delivery="streamed",
                    bucket_bytes=init_info.bucket_bytes,
                    transports=init_info.transports,
                )
            )
            self._adapter = adapter
            self._owned = owned.pop_all()

    def start_weight_update(self) -> None:
        """Nothing: the reload must not stay open, or a failure could not be tried again."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load, and wait until the device has it; unlike the base class, also where the device is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what this rank has staged, all of it, through vLLM's own loader."""
        adapter = self._adapter
        if adapter is None:
            raise LoadError("this vLLM worker has not joined a coordinator: /init_weight_transfer_engine comes first")
        install(self.model, self.model_config, adapter.staged())
        adapter.loaded()

    def finish_weight_update(self) -> None:
        """Nothing: the model is whole since :meth:`receive_weights`."""

    def shutdown(self) -> None:
        """Leave the coordinator; the engine keeps the weights that it has. Safe twice."""
        self._adapter = None
        self._owned.close()
        self._owned = ExitStack()
