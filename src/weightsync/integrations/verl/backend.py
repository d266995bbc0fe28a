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
from functools import partial
from typing import Any, Self

import msgspec
import torch
from verl.checkpoint_engine.base import CheckpointEngine

import weightsync
from weightsync.deadline import Deadline
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    ManifestMismatch,
    MembershipError,
    RoundFailed,
    WeightSyncError,
)
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import (
    Meeting,
    StreamSender,
    about_this_rank,
    arrange,
    join_async,
    leave_in_background,
    offer_coordinator,
)
from weightsync.integrations.updates import GRACE
from weightsync.integrations.verl.shards import ShardSource, Walk, show_engine
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.notices import tell
from weightsync.releases import refuse_calls, warn_if_untested

_log = logging.getLogger(__name__)
_WHERE = "checkpoint_engine.engine_kwargs.weightsync"
_PERMANENT = (AuthenticationError, ConfigurationError, ManifestMismatch, MembershipError)
"""Errors of joining that the next update would get as well."""


class EngineOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may write for verl."""

    shards: bool = False
    """Whether actor ranks publish their own shards, where verl's FSDP2 engine sends its parameters as they are."""


class StreamCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine of one actor rank or one rollout rank; which of them, verl tells it by ``init_process_group``."""

    takes_training_engine = True
    """``send_weights`` may get verl's training engine instead of its generator (proposed to verl)."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse a verl that asks for more than this class has."""
        refuse_calls("verl", sorted(getattr(cls, "__abstractmethods__", ())))
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
        self._failure = ""
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
            tell(_log, f"weightsync: the coordinator of this run is {self._about['coordinator']}")
        return dict(self._about)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return each rank's coordinator address and member name. Runs in verl's driver.

        Raises:
            ConfigurationError: Rank 0 offers no coordinator, or one that ranks of other hosts cannot reach.
            MembershipError: Two rollout ranks have one name.
        """
        warn_if_untested("verl")
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
        """Take the coordinator's address, and the ``tensors`` if shards are published. An actor rank joins, or stays joined.

        Called before every update.

        Raises:
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        self._failure = ""  # of the last update; this one brings every tensor again
        self.finalize()
        self._meeting = msgspec.convert(meeting, Meeting)
        self._manifest = None if tensors is None else Manifest(msgspec.convert(tensors, tuple[TensorSpec, ...]))
        if sends:
            state = self._source.state if self._source is not None and tensors is not None else None
            try:
                self._sender.join(self._meeting.coordinator, rank, world_size, state)
            except MembershipError as error:
                raise MembershipError(
                    f"{error} If it belongs to another run of verl, do not end it: each run needs its own coordinator. Unset "
                    "WEIGHTSYNC_COORDINATOR and the option coordinator, and actor rank 0 starts one"
                ) from error
            if self._wants_shards:
                show_engine()

    def finalize(self) -> None:
        """Leave the coordinator, as a rollout rank. Actor ranks stay joined for the next update.

        verl calls this after an update in which no rank raised, and before it resumes the replicas.

        Raises:
            RoundFailed: This rollout rank did not receive all tensors of the update, and :meth:`receive_weights` could not say so.
        """
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._failure:
            raise RoundFailed(f"{self._about['name']} did not receive all weights, so verl must not resume it: {self._failure}")

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
        """Yield the tensors of one update, on a rollout rank. Each is lent until the next is requested.

        Tensors are on this process's accelerator, if there is one. If the update fails, the iteration ends early instead of
        raising an error: verl's adapters tell their engine's worker only of an end. After an exception the worker would wait for
        tensors forever, with the next update behind it. The update still fails: actor ranks raise, or :meth:`finalize` does, so
        verl does not resume the replica. The next update brings every tensor again.

        Raises:
            ConfigurationError, AuthenticationError, MembershipError, ManifestMismatch: The coordinator refuses this rank.
        """
        meeting, me = self._meeting, str(self._about["name"])
        deadline = Deadline(meeting.seconds)
        receiver: weightsync.Receiver | None = None
        received = False
        try:
            receiver = await join_async(me, meeting, self._options, self._options.staging(), self._manifest)
            self._receiver = receiver
            consumer = asyncio.current_task()
            if consumer is not None:  # verl's adapter may fail without closing this generator
                consumer.add_done_callback(partial(_leave_if_failed, receiver))
            async for batch in receiver.receive_async(timeout=deadline.remaining("joining the coordinator") + GRACE):
                for name, tensor in batch:
                    moved = _on_accelerator(tensor)
                    for known_as in self._names(name):
                        yield known_as, moved
                    del moved  # before the next one needs memory
                _finish_copies()  # of this batch, whose memory is used again
            received = True
            # For the coordinator the round ends a moment later. verl calls finalize() when all ranks are done, unless one failed.
            asyncio.get_running_loop().call_later(GRACE, leave_in_background, receiver)
        except Exception as error:
            if receiver is None and isinstance(error, _PERMANENT):
                raise
            failure = f"{type(error).__name__}: {error}"
            if meeting is self._meeting:  # no later update has begun
                self._failure = failure
            _log.warning(
                "%s did not receive all weights. Its engine may hold tensors of two versions, and stays paused until an update "
                "succeeds: %s", me, failure, exc_info=not isinstance(error, WeightSyncError),
            )  # fmt: skip
        finally:
            if receiver is not None and not received:
                await asyncio.to_thread(receiver.close)

    def _names(self, name: str) -> tuple[str, ...]:
        """Under which names verl's own generator yields the tensor ``name``."""
        if self._manifest is None:
            return (name,)
        return self._manifest[self._manifest.index[name]].names


def _leave_if_failed(receiver: weightsync.Receiver, consumer: asyncio.Task[Any]) -> None:
    """Leave the coordinator, so that the update fails for this rank now and not at its deadline."""
    if consumer.cancelled() or consumer.exception() is not None:
        leave_in_background(receiver)


def _on_accelerator(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` to this process's accelerator, if there is one and the tensor is elsewhere.

    verl's adapters pass device memory to the engine's process by a handle: for vLLM a tensor larger than the bucket, for
    TensorRT-LLM every tensor. Their FP8 kernels take no tensor in host memory.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return tensor
    return tensor.to(torch.device(accelerator.type, torch.accelerator.current_device_index()))


def _finish_copies() -> None:
    """Wait for what verl's adapter queued on the current stream: it copies without waiting."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()
