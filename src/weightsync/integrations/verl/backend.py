"""verl's checkpoint engine ``weightsync``: actor ranks stream whole tensors, and each rollout rank receives all of them.

With the option ``shards`` actor ranks publish their own shards from the second update on: see
:mod:`weightsync.integrations.verl.shards`.

verl decides when replicas pause, which of them take part, and when they resume. For every update it makes a new list of rollout
ranks. So a rollout rank joins the coordinator when it begins to receive, and leaves after the update: nothing that failed, was
removed or died is left for the next one. Actor ranks stay joined, so that version numbers go on.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from typing import Any, Self

import msgspec
import torch
import verl
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import weightsync
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import (
    GRACE,
    Meeting,
    StreamSender,
    about_this_rank,
    arrange,
    join_async,
    leave_in_background,
    offer_coordinator,
)
from weightsync.integrations.verl.releases import TRIED, is_tried
from weightsync.integrations.verl.shards import ShardSource, Walk, show_engine
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.notices import tell

__all__ = ["BACKEND", "StreamCheckpointEngine"]

BACKEND = "weightsync"

_log = logging.getLogger(__name__)
_WHERE = "checkpoint_engine.engine_kwargs.weightsync"


class EngineOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may write for verl."""

    shards: bool = False
    """Whether actor ranks publish their own shards, where verl's FSDP2 engine sends its parameters as they are."""


@CheckpointEngineRegistry.register(BACKEND)
class StreamCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine of one actor rank or one rollout rank; which of them, verl tells it by ``init_process_group``."""

    takes_training_engine = True
    """``send_weights`` may get verl's training engine instead of its generator (proposed to verl)."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse a verl that asks for more than this class has."""
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise ConfigurationError(
                f"verl {verl.__version__} asks a checkpoint engine for {', '.join(missing)}, which weightsync "
                f"{weightsync.__version__} does not have: it was tried with verl {' and '.join(TRIED)}"
            )
        return super().__new__(cls)  # type: ignore[no-any-return]

    def __init__(self, bucket_size: int, is_master: bool = False, **options: object) -> None:
        self._options = EngineOptions.of(options, _WHERE)
        self._is_master = is_master
        self._about = about_this_rank()
        self._owned = ExitStack()
        self._closing = weakref.finalize(self, self._owned.close)  # verl has no call for it: at the latest when the process exits
        self._meeting = Meeting("", 0.0)
        self._sender = StreamSender(self._options, bucket_size, "actor", self._owned)
        self._receiver: weightsync.Receiver | None = None
        self._wants_shards = self._options.shards
        self._source: ShardSource | None = None
        self._manifest: Manifest | None = None

    def prepare(self) -> dict[str, object]:
        """Return what the other ranks must know of this one. Actor rank 0 starts a coordinator, unless there is one."""
        self._sender.leave_unless(self._source and self._source.state)
        self._about["shards"] = self._source is not None
        if self._is_master:
            self._about["tensors"] = msgspec.to_builtins(self._source.manifest.tensors) if self._source else []
        if self._is_master and "coordinator" not in self._about:
            self._about |= offer_coordinator(self._options, self._owned)
            tell(_log, f"the coordinator of this run is {self._about['coordinator']}")
        return dict(self._about)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every rank where to meet, and whom. Runs in verl's driver.

        Raises:
            ConfigurationError: Rank 0 offers no coordinator, or one that ranks of other hosts cannot reach.
            MembershipError: Two rollout ranks have one name.
        """
        _say_if_not_tried()
        if len(metadata) != actor_wg_world_size + rollout_world_size:
            raise ConfigurationError(
                f"verl passed {len(metadata)} ranks, and has {actor_wg_world_size} actor and {rollout_world_size} rollout ranks"
            )
        actors, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if not actors or "coordinator" not in actors[0]:
            raise ConfigurationError("actor rank 0 offers no coordinator: verl did not make it with is_master=True")
        meeting = msgspec.to_builtins(arrange(actors[0], metadata, rollouts))
        shards = {"tensors": actors[0]["tensors"]} if all(actor.get("shards") for actor in actors) else {}

        def ranks(size: int) -> dict[str, list[Any]]:
            every = {"world_size": size, "meeting": meeting, **shards}
            return {"rank": list(range(size)), **{name: [value] * size for name, value in every.items()}}

        return {**ranks(actor_wg_world_size), "sends": [True] * actor_wg_world_size}, ranks(rollout_world_size)

    def init_process_group(
        self, rank: int, world_size: int, meeting: dict[str, Any], sends: bool = False, tensors: list[Any] | None = None
    ) -> None:
        """Learn where to meet, and which ``tensors`` there are if shards travel. An actor rank joins, or stays joined.

        Called before every update.

        Raises:
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        self.finalize()
        self._meeting = msgspec.convert(meeting, Meeting)
        self._manifest = None if tensors is None else Manifest(msgspec.convert(tensors, tuple[TensorSpec, ...]))
        if sends:
            state = self._source.state if self._source is not None and tensors is not None else None
            self._sender.join(self._meeting.coordinator, rank, world_size, state)
            if self._wants_shards:
                show_engine()

    def finalize(self) -> None:
        """Leave the coordinator, as a rollout rank. Actor ranks stay joined for the next update."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict[str, float]:
        """Bring ``weights`` from an actor rank to all rollout ranks of this update: see :meth:`StreamSender.send`.

        Where shards travel, ``weights`` are not iterated over: nothing is gathered.
        """
        if self._manifest is not None:
            try:
                result = await self._sender.send(None, self._meeting, global_steps)
            except WeightSyncError as error:
                await asyncio.to_thread(self._sender.leave)  # the next update may stream, if another rank cannot publish shards
                if isinstance(error, ConfigurationError):  # this rank holds other tensors now
                    self._source = None
                raise
        else:
            walk = Walk(weights)
            result = await self._sender.send(walk, self._meeting, global_steps)
            if self._wants_shards:
                self._source = walk.source(self._options)
                self._wants_shards = self._source is not None
        if not self._is_master:
            return {}
        return {
            "checkpoint_engine/version": float(result.version.number),
            "checkpoint_engine/seconds": result.seconds,
            "checkpoint_engine/payload_mbytes": result.nbytes / (1 << 20),
            "checkpoint_engine/rollout_ranks": float(len(self._meeting.receivers)),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one update, on a rollout rank. Each is lent until the next is asked for.

        Raises:
            RoundFailed: The update failed, for this rank or on the actor's side.
            DeadlineExceeded: It did not come or go on in time.
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        deadline = Deadline(self._meeting.seconds)
        name = str(self._about["name"])
        receiver = await join_async(name, self._meeting, self._options, self._options.staging(), self._manifest)
        consumer = asyncio.current_task()
        if consumer is not None:  # verl's adapter may fail without closing this generator
            consumer.add_done_callback(lambda task: _leave_if_failed(task, receiver))
        received = False
        try:
            async for batch in receiver.receive_async(timeout=deadline.remaining("joining the coordinator") + GRACE):
                for name, tensor in batch:
                    for known_as in self._names(name):
                        yield known_as, tensor
                _finish_copies()  # of this batch, whose memory is used again
            received = True
        finally:
            if not received:
                await asyncio.to_thread(receiver.close)
        # For the coordinator the round ends a moment later. verl calls finalize() when all ranks are done, unless one failed.
        self._receiver = receiver
        asyncio.get_running_loop().call_later(GRACE, receiver.close)

    def _names(self, name: str) -> tuple[str, ...]:
        """Under which names verl's own generator yields the tensor ``name``."""
        if self._manifest is None:
            return (name,)
        return self._manifest[self._manifest.index[name]].names


def _leave_if_failed(consumer: asyncio.Task[Any], receiver: weightsync.Receiver) -> None:
    """Leave the coordinator, so that the update fails for this rank now and not at its deadline."""
    if consumer.cancelled() or consumer.exception() is not None:
        leave_in_background(receiver)


def _finish_copies() -> None:
    """Wait for what verl's adapter queued on the current stream: it copies without waiting."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


_release_named = False


def _say_if_not_tried() -> None:
    global _release_named
    release = str(verl.__version__)
    if not is_tried(release) and not _release_named:
        _release_named = True
        known = " and ".join(TRIED)
        _log.warning("weightsync was tried with verl %s, and this is %s: its interface fits, so it is used", known, release)
