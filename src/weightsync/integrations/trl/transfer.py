"""The object that TRL's asynchronous trainers take, and what both ways share: how a trainer joins and publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.config import ClientSettings, Secret
from weightsync.errors import Aborted
from weightsync.integrations.releases import warn_if_untried
from weightsync.protocol.messages import RoundResult
from weightsync.server.client import Client
from weightsync.tensors.shards import DTypes
from weightsync.trainer.agent import Trainer
from weightsync.trainer.stream import Stream
from weightsync.transports.base import Transport

__all__ = ["JoinOptions", "WeightTransfer"]


@dataclass(frozen=True)
class JoinOptions:
    """How TRL's trainer joins its coordinator. The fields are the arguments of :class:`WeightTransfer`."""

    coordinator: str | None
    token: str | None
    dtype: DTypes
    replicas: int
    timeout: float
    transports: Sequence[Transport | str] | None

    def check(self) -> None:
        """Ask the coordinator for its status, so that a wrong address or token fails before any weight is gathered.

        Raises:
            CoordinatorUnreachable: No coordinator answers.
            AuthenticationError: The token is wrong.
        """
        with Client(self._settings()) as client:
            client.status()

    def _settings(self) -> ClientSettings:
        return ClientSettings.load(coordinator=self.coordinator, token=Secret(self.token) if self.token else None)

    def join(self, state: Mapping[str, torch.Tensor] | torch.nn.Module | Stream) -> Trainer:
        """Join with this rank's ``state``, or alone with a stream, and wait for replicas."""
        alone = isinstance(state, Stream)
        trainer = Trainer(
            state,
            self._settings().coordinator.url,  # without one, Trainer would start a coordinator that no server knows
            token=self.token,
            rank=0 if alone else None,
            world_size=1 if alone else None,
            dtype=self.dtype,
            transports=self.transports,
        )
        try:
            trainer.wait_for_replicas(self.replicas, self.timeout)
        except BaseException:
            trainer.close()
            raise
        return trainer

    def number(self, trainer: Trainer) -> int | None:
        """Number of the next version: 1 in a new run, as TRL counts, and the one after the last in a run that goes on."""
        return 1 if trainer.last_version is None else None


class WeightTransfer:
    """Publishes the weights of ``AsyncGRPOTrainer`` or ``AsyncDistillationTrainer``: ``weight_transfer=WeightTransfer()``.

    TRL calls it on rank 0 alone, with a generator of whole tensors that all ranks drain. Pausing and resuming vLLM is part of a
    round of weightsync, so TRL's own calls for it do nothing.

    Args:
        coordinator: URL of the coordinator that vLLM's server has joined. Default: ``WEIGHTSYNC_COORDINATOR``, else port 7400 of
            this machine.
        token: Default: ``WEIGHTSYNC_TOKEN`` or ``WEIGHTSYNC_TOKEN_FILE``; on one machine it is found automatically.
        dtype: Dtype of the served checkpoint, into which weights are converted: one for all, or one for each name. ``None``
            converts nothing.
        replicas: Servers that must have joined before the first weights are sent.
        timeout: Seconds for these to join, and for each update.
        transports: As for :class:`weightsync.Trainer`.
    """

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        token: str | None = None,
        dtype: DTypes = torch.bfloat16,
        replicas: int = 1,
        timeout: float = 600.0,
        transports: Sequence[Transport | str] | None = None,
    ) -> None:
        self._options = JoinOptions(coordinator, token, dtype, replicas, timeout, transports)
        self._trainer: Trainer | None = None
        self.result: RoundResult | None = None
        """Result of the last update."""

    def init_weight_transfer(self) -> None:
        """Join the coordinator, and wait for replicas. Raises what :class:`weightsync.Trainer` and its wait for replicas raise."""
        warn_if_untried("trl")
        self.destroy()
        self._options.check()
        self._trainer = self._options.join(Stream())

    def pause(self) -> None:
        """Do nothing: the round pauses each replica for as short as it can."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what ``iterator`` yields, and return when the replicas serve it. Drains it also after an error.

        Raises what :meth:`weightsync.Trainer.publish_stream` raises.
        """
        trainer = self._trainer
        if trainer is None:
            for _ in iterator:  # the other ranks gather
                pass
            raise Aborted("init_weight_transfer() comes before send_weights(), and destroy() after it")
        self.result = trainer.publish_stream(iterator, self._options.number(trainer), timeout=self._options.timeout)

    def resume(self) -> None:
        """Do nothing: the round resumed each replica when its weights were verified."""

    def destroy(self) -> None:
        """Leave the coordinator. Replicas keep their weights. Safe twice."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
