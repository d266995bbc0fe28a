"""vLLM's trainer interface on top of weightsync. A script written for it only changes the name of the backend.

::

    engine = WeightTransferTrainerFactory.trainer_init(
        WeightsyncTrainerInitInfo(rank=rank, coordinator="http://head:7400"), client=client, source=ModuleSource(model)
    )
    engine.send_weights()

``client`` is vLLM's client of the script. It is not called if replicas have joined the coordinator automatically (see
:mod:`weightsync.engines.vllm.patches`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from weightsync.engines.vllm import BACKEND
from weightsync.engines.vllm.weight_source import StagedSource
from weightsync.errors import ConfigurationError
from weightsync.model import PauseMode
from weightsync.protocol.messages import RoundResult
from weightsync.releases import release_of, warn_if_untested
from weightsync.trainer.trainer import Trainer


@dataclass
class WeightsyncTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Settings with which a trainer rank joins. All but ``rank`` may come from the environment."""

    backend: ClassVar[str] = BACKEND

    coordinator: str | None = None
    """URL of the coordinator; by default ``WEIGHTSYNC_COORDINATOR``."""
    token: str | None = None
    """Token of the coordinator; by default ``WEIGHTSYNC_TOKEN`` or ``WEIGHTSYNC_TOKEN_FILE``."""
    world_size: int | None = None
    """Number of trainer ranks; by default that of ``torch.distributed``, else ``WORLD_SIZE``, else 1."""
    run: str = ""
    control: str | None = None
    """URL of a vLLM server to join through ``client``, as its rank 0 reaches it. Not needed if it joined automatically."""
    replica: str | None = None
    """Name of that replica."""
    timeout: float = 300.0
    """Time limit of one update in seconds."""
    pause_mode: PauseMode | None = None
    """What an update does to running requests; ``None`` is the coordinator's setting."""


class WeightsyncTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes the weights of a ``WeightSource``, as versions 1, 2, ... of a run.

    With a ``ModuleSource`` each rank publishes its shards, and nothing is gathered. Any other source is iterated on every rank,
    because the iteration may be a collective. :class:`StagedSource` describes which ranks publish it. ``result`` is the result of
    the last :meth:`send_weights`.
    """

    init_info_cls = WeightsyncTrainerInitInfo

    def __init__(self, *, client: Any, source: WeightSource, init_info: WeightsyncTrainerInitInfo) -> None:  # noqa: ANN401 - vLLM's
        warn_if_untested("vllm")
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self._timeout = init_info.timeout
        self.result: RoundResult | None = None
        module, options = self._live(source)
        state = StagedSource(source, self.rank) if module is None else module
        self._staged = state if isinstance(state, StagedSource) else None
        alone = self._staged is not None and self._staged.alone  # one rank publishes for all
        self._trainer: Trainer | None = None
        if self.is_sender or not alone:
            self._trainer = Trainer(
                state,
                init_info.coordinator,
                token=init_info.token,
                rank=0 if alone else self.rank,
                world_size=1 if alone else init_info.world_size,
                run=init_info.run,
                pause_mode=init_info.pause_mode,
                start_coordinator=init_info.control is not None,  # which is then told where it is
                **options,
            )

    @staticmethod
    def _live(source: WeightSource) -> tuple[torch.nn.Module | None, dict[str, Any]]:
        """The module whose shards each rank publishes, and its trainer's options; ``None`` for a source that has to be iterated."""
        return (source._module if isinstance(source, ModuleSource) else None), {}

    @classmethod
    def trainer_init(
        cls,
        init_info: WeightsyncTrainerInitInfo,
        *,
        client: Any,  # noqa: ANN401 - vLLM's
        source: WeightSource | None = None,
        config: object = None,
    ) -> Self:
        """Join the coordinator. Call it on every trainer rank.

        Raises:
            ConfigurationError: ``source`` is missing or not supported, or this vLLM's interface is too new.
            WeightSyncError: :class:`weightsync.Trainer` raised it.
        """
        if config is not None:
            raise ConfigurationError(
                f"vLLM {release_of('vllm')} passes trainers a config besides init_info: weightsync needs the interface of 0.27"
            )
        if source is None:
            raise ConfigurationError("weightsync needs whole checkpoints: give source=ModuleSource(model), or another WeightSource")
        made = cls(client=client, source=source, init_info=init_info)
        if made.is_sender and init_info.control is not None and made._trainer is not None:
            client.init_weight_transfer_engine(
                {
                    "control": init_info.control,
                    "replica": init_info.replica,
                    "coordinator": made._trainer.coordinator,
                    "run": init_info.run,
                }
            )
        return made

    def send_weights(self) -> None:
        """Deliver the source's weights to every replica: pause, move, verify, commit, resume. Call it on every trainer rank.

        The call may be repeated after an error.

        Raises:
            ConfigurationError: The source did not yield all tensors that it declared.
            WeightSyncError: :meth:`weightsync.Trainer.publish` raised it.
        """
        if self._staged is not None:
            self._staged.stage()
        if self._trainer is not None:
            first = 1 if self._trainer.last_version is None else None  # vLLM counts from 1; later versions follow the last
            self.result = self._trainer.publish(first, timeout=self._timeout)

    def shutdown(self) -> None:
        """Leave the coordinator. Idempotent."""
        if self._trainer is not None:
            self._trainer.close()
