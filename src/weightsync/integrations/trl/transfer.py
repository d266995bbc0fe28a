"""The object that TRL's asynchronous trainers take, and what both ways share: how a trainer joins and publishes."""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist

from weightsync.closing import OnFailure
from weightsync.config import ClientSettings, Secret, variable
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded
from weightsync.integrations.trl.model_publisher import OWNER, ModelPublisher
from weightsync.integrations.trl.reporting import calling_trainer, report, warn_of_rounding
from weightsync.integrations.trl.rollout_server import RolloutServer
from weightsync.integrations.updates import walk_on
from weightsync.launch import from_rank_zero
from weightsync.model.lora import check_adapter_name
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import tell
from weightsync.releases import warn_if_untested
from weightsync.server.client import Client
from weightsync.tensors.shards import DTypes
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer
from weightsync.transports.base import Transport

_LOOK = (
    """A vLLM server joins by itself if it was started with --weight-transfer-config '{"backend": "weightsync"}' and """
    "WEIGHTSYNC_COORDINATOR in its environment, and has the token (WEIGHTSYNC_TOKEN_FILE on another machine or as another user): "
    "its log says whether it joined, or why not"
)
_OWN = "_weightsync"
_Times = tuple[float, float, float]
_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class JoinOptions:
    """How TRL's trainer joins its coordinator. The fields are the arguments of :class:`WeightTransfer`."""

    coordinator: str | None = None
    _: KW_ONLY
    token: str | None = None
    dtype: DTypes = torch.bfloat16
    replicas: int = 1
    timeout: float = 600.0
    transports: Sequence[Transport | str] | None = None
    server: str | None = None
    adapter: str = ""
    merge: bool = False

    def __post_init__(self) -> None:
        """Take the adapter's name from the environment if none is given. Raises ConfigurationError if it is not a name."""
        self.adapter = self.adapter or variable("WEIGHTSYNC_ADAPTER")
        if self.adapter:
            check_adapter_name(self.adapter)
            if self.adapter.startswith(OWNER):
                raise ConfigurationError(f"{self.adapter} is reserved: names of {OWNER} are retired when another run starts")

    def check(self) -> str:
        """Return the coordinator's run, so that a wrong address or token fails before any weight is gathered.

        Raises:
            CoordinatorUnreachable: No coordinator answers.
            AuthenticationError: The token is wrong.
        """
        with self.client() as client:
            return client.status().run

    def client(self) -> Client:
        """A client of the coordinator."""
        return Client(ClientSettings.load(coordinator=self.coordinator, token=Secret(self.token) if self.token else None))

    def join(self, state: Mapping[str, torch.Tensor] | torch.nn.Module | Stream) -> Trainer:
        """Join with this rank's ``state``, or alone with a stream, and wait for replicas.

        Raises:
            DeadlineExceeded: Too few replicas joined in time. The message says what to look at.
            ManifestMismatch: A server that joined holds another model.
            WeightSyncError: What :class:`weightsync.Trainer` raises.
        """
        alone = isinstance(state, Stream) or not dist.is_initialized()  # whatever a launcher's variables say of other programs
        if not isinstance(state, Stream):
            named = state.items() if isinstance(state, Mapping) else state.named_parameters()
            any(warn_of_rounding(name, tensor.dtype, self.dtype) for name, tensor in named)
        trainer = Trainer(
            state,
            self.coordinator,
            token=self.token,
            rank=0 if alone else None,
            world_size=1 if alone else None,
            dtype=self.dtype,
            transports=self.transports,
            pause_mode="keep",  # as TRL's own client pauses: it trains on whatever length an aborted request has
            start_coordinator=False,
        )
        with OnFailure(trainer.close):
            try:
                trainer.wait_for_replicas(self.replicas, self.timeout, refused="raise")
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error}. {_LOOK}") from error
        return trainer

    def number(self, trainer: Trainer) -> int | None:
        """Number of the next version: 1 in a new run, as TRL counts, and the one after the last in a run that goes on."""
        return 1 if trainer.last_version is None else None


class WeightTransfer(JoinOptions):
    """Publishes the weights of ``AsyncGRPOTrainer`` or ``AsyncDistillationTrainer``: ``weight_transfer=WeightTransfer()``.

    Each rank publishes its own shards, or those of the adapter alone (:meth:`publish`); where TRL calls :meth:`send_weights`, all
    ranks gather whole tensors. Pausing and resuming vLLM is part of a round of weightsync, so TRL's own calls for it do nothing.

    Args:
        coordinator: URL of the coordinator that vLLM's server has joined. Default: ``WEIGHTSYNC_COORDINATOR``, else port 7400 of
            this machine.
        token: Default: ``WEIGHTSYNC_TOKEN`` or ``WEIGHTSYNC_TOKEN_FILE``; on one machine it is found automatically.
        dtype: Dtype of the served checkpoint, into which weights are converted: one for all, or one for each name. ``None``
            converts nothing.
        replicas: Servers that must have joined before the first weights are sent.
        timeout: Seconds for these to join, and for each update.
        transports: As for :class:`weightsync.Trainer`.
        server: URL of the server that TRL samples from, which must serve each update's version. Default: the trainer's
            ``vllm_server_base_url``.
        adapter: Name, ``owner/name``, under which the adapter of a PEFT model is published, if the server takes adapters. Default:
            ``WEIGHTSYNC_ADAPTER``, or ``trl/`` and the run of the coordinator.
        merge: Whether each update merges the adapter into the base weights and moves all of them, as it does where the server
            takes no adapters.
    """

    result: RoundResult | None = None
    """Result of the last update."""
    _first = True
    _asking: object = None  # TRL's trainer
    _trainer: Trainer | None = None
    _publisher: ModelPublisher | None = None

    def __post_init__(self) -> None:
        """Let TRL's trainers ask it, on every rank, to publish what the rank holds."""
        super().__post_init__()
        _follow_trainers()

    def init_weight_transfer(self) -> None:
        """Check that the coordinator and the server can be reached. Where TRL will gather, join, and wait for replicas.

        Raises what :class:`weightsync.Trainer` and its wait for replicas raise, and
        :class:`~weightsync.errors.ConfigurationError` if the server was started with another weight-transfer backend.
        """
        warn_if_untested("trl")
        self.destroy()
        self.check()
        self._asking = calling_trainer()
        if (server := self._server()) is not None:
            server.check_backend()
        else:
            tell(
                _log,
                "it is not checked whether TRL samples from an updated server: its URL is unknown. Pass WeightTransfer(server=URL)",
            )
        if getattr(self._asking, _OWN, None) is self:
            return  # its first update joins, on every rank
        if hasattr(self._asking, "_sync_weight_merged"):
            tell(
                _log,
                "all ranks gather whole tensors, which rank 0 sends. To avoid it, make WeightTransfer() after the import of this "
                "trainer, and pass it as weight_transfer",
            )
        self._trainer = self.join(Stream())

    def publish(self, trainer: Any) -> None:  # noqa: ANN401 - TRL's
        """Publish the model of TRL's ``trainer``, on every rank alike. Nothing is gathered.

        Raises what :class:`weightsync.Trainer` and its ``publish`` raise, and :class:`~weightsync.errors.ConfigurationError` if
        the server that TRL samples from does not serve the version afterwards.
        """
        main, model = trainer.accelerator.is_main_process, trainer.accelerator.unwrap_model(trainer.model)
        self._end_stream()
        publisher = self._publisher = (self._publisher or ModelPublisher(self, self._server() if main else None)).of(model)
        self.result = publisher.publish(model, trainer)
        if main:
            report(self.result, trainer)
            trainer.model_version += 1
            if trainer.rollout_worker is not None:
                if publisher.adapter:
                    trainer.rollout_worker._loop_kwargs["model_name"] = publisher.adapter  # read when it starts, after this update
                trainer.rollout_worker.update_model_version(trainer.model_version)

    def pause(self) -> None:
        """Do nothing: the round pauses each replica only while its weights change."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what ``iterator`` yields, and return when the replicas serve it. Drains it also after an error.

        Raises what :meth:`weightsync.Trainer.publish_stream` raises, and :class:`~weightsync.errors.ConfigurationError` if the
        server that TRL samples from does not serve the version afterwards.
        """
        with OnFailure(walk_on, iterator):
            if self._trainer is None and self._asking is not None:  # it gathers after all
                self.leave()
                self._trainer = self.join(Stream())
            trainer = self._trainer
            if trainer is None:
                raise Aborted("init_weight_transfer() comes before send_weights(), and destroy() after it")
        weights = self._noting(iterator) if self._first else iterator
        self.result = trainer.publish_stream(weights, self.number(trainer), timeout=self.timeout)
        report(self.result, self._asking)
        if (server := self._server()) is not None:
            server.check_label(self.result.version)
        self._first = False

    def _server(self) -> RolloutServer | None:
        url = self.server or getattr(getattr(self._asking, "args", None), "vllm_server_base_url", None)
        return None if url is None else RolloutServer(url)

    def _noting(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        warned = False
        for name, tensor in weights:
            warned = warned or warn_of_rounding(name, tensor.dtype, self.dtype)
            yield name, tensor
            del tensor  # its memory is needed for the next one

    def resume(self) -> None:
        """Do nothing: the round resumed each replica when its weights were verified."""

    def destroy(self) -> None:
        """Leave the coordinator. Replicas keep their weights. Safe twice."""
        self._asking = None
        self._end_stream()
        self.leave()

    def _end_stream(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    def leave(self) -> None:
        """Leave the coordinator with this rank's shards: TRL calls :meth:`destroy` on rank 0 alone. Safe twice."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


def _follow_trainers() -> None:
    """Let TRL's asynchronous trainers publish what each rank holds instead of gathering it. Idempotent."""
    for package, name in (("async_grpo", "AsyncGRPOTrainer"), ("async_distillation", "AsyncDistillationTrainer")):
        trainer: Any = getattr(sys.modules.get(f"trl.experimental.{package}"), name, None)  # a script imports what it uses
        if trainer is not None:
            follow(trainer)


def follow(trainer: Any) -> None:  # noqa: ANN401 - a class of TRL's
    """Let ``trainer`` publish what each rank holds, if it is given a :class:`WeightTransfer`. Idempotent."""
    wrap_once(trainer, "__init__", _remember)
    wrap_once(trainer, "_sync_weight_merged", _synchronize)
    wrap_once(trainer, "_inner_training_loop", _leave_after)


def _remember(init: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - TRL's
    given = inspect.signature(init).bind(trainer, *args, **kwargs).arguments.get("weight_transfer")
    setattr(trainer, _OWN, given if isinstance(given, WeightTransfer) else None)  # TRL keeps it on rank 0 alone
    init(trainer, *args, **kwargs)


def _leave_after(loop: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - TRL's
    transfer: WeightTransfer | None = getattr(trainer, _OWN, None)
    try:
        return loop(trainer, *args, **kwargs)
    finally:
        if transfer is not None:
            transfer.leave()


def _synchronize(gathering: Callable[..., _Times], trainer: Any, began: float) -> _Times:  # noqa: ANN401 - TRL's
    transfer: WeightTransfer | None = getattr(trainer, _OWN, None)
    ours = transfer is not None and trainer.weight_transfer is transfer  # on rank 0
    decided = from_rank_zero("theirs" if transfer is None or not ours else "" if transfer._publisher else "joins")
    if transfer is None or decided == "theirs":
        return gathering(trainer, began)
    if decided:
        transfer.leave()  # where only rank 0 has left
    if ours:
        transfer.pause()  # a subclass may do something
    transfer.publish(trainer)
    if ours:
        transfer.resume()
    return began, began, time.time()
