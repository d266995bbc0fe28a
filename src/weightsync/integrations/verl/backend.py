"""verl's checkpoint engine ``weightsync``.

Actor ranks publish their own shards (:mod:`weightsync.integrations.verl.source`), and the vLLM workers of each replica read what
they hold of them, in a call that verl's adapter makes (:mod:`weightsync.integrations.verl.vllm_adapter`). Nothing is gathered. If
any rank cannot take part in that, all ranks stream: actor ranks gather whole tensors, and each rollout rank receives all of them.
verl's driver decides for all (:func:`choose_way`), before anything is sent.

verl decides when replicas pause, which of them take part, and when they resume. For every update it makes a new list of rollout
ranks. So a rollout rank that receives a stream joins the coordinator when it begins, and leaves after the update: nothing that
failed, was removed or died is left for the next one. vLLM's workers stay joined until verl leaves their replica out. Actor ranks
stay joined, so that version numbers go on.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import msgspec
import torch
from verl.checkpoint_engine.base import CheckpointEngine

import weightsync
from weightsync import errors
from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, MembershipError, RoundFailed, WeightSyncError
from weightsync.integrations import stream_ranks
from weightsync.integrations.engine_calls import EngineCalls
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import Meeting, ShardSource, StreamSender
from weightsync.integrations.updates import GRACE
from weightsync.integrations.verl import vllm_servers
from weightsync.integrations.verl.source import EngineShards, training_worker, whole_weights
from weightsync.launch import texts_of_ranks
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.notices import tell
from weightsync.releases import refuse_calls, warn_if_untested
from weightsync.server.client import Client

_log = logging.getLogger(__name__)
WHERE = "checkpoint_engine.engine_kwargs.weightsync"
_REASON = 400  # characters of a reason that travels
_PERMANENT = (errors.AuthenticationError, ConfigurationError, errors.ManifestMismatch, MembershipError)
"""Errors of joining that the next update would get as well."""


class EngineOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may write for verl."""

    shards: bool = False
    """Whether actor ranks publish their own shards also where rollout ranks receive whole tensors."""


Way: TypeAlias = Literal["direct", "shards", "stream", "adapter"]
"""How weights travel: shards to vLLM's workers; shards to rollout ranks, which hand whole tensors to verl; gathered tensors, of all
weights or of a LoRA adapter."""
_OFFERED: dict[Way, tuple[str, ...]] = {
    "direct": ("number", "joined"), "shards": ("number", "tensors"), "stream": (), "adapter": ("adapter",)
}  # fmt: skip
"""What all ranks must know of that, as actor rank 0 says it."""


class DirectUpdate(NamedTuple):
    """What the adapter gets in the place of tensors, if its engine takes the weights itself."""

    number: int
    seconds: float


class AdapterUpdate(NamedTuple):
    """What the adapter gets in the place of tensors, if they are those of a LoRA adapter: PEFT's configuration, and the tensors."""

    config: dict[str, Any]
    tensors: AsyncIterator[tuple[str, torch.Tensor]]


def choose_way(actors: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]) -> tuple[Way, str]:
    """Choose for all ranks, by what each says about itself, and say why not ``direct``."""
    if rollouts and all("adapter" in about for about in actors) and all(about.get("adapters") for about in rollouts):
        return "adapter", "the adapter is not merged (actor_rollout_ref.model.lora.merge=False)"
    reason = stream_ranks.why_streamed(actors, rollouts)
    if not reason:
        return "direct", ""
    return ("shards" if all("tensors" in about for about in actors) else "stream"), reason


class StreamCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine of one actor rank, which verl makes with ``is_master``, or of one rollout rank."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse a verl that asks for more than this class has."""
        refuse_calls("verl", sorted(getattr(cls, "__abstractmethods__", ())))
        return super().__new__(cls)  # type: ignore[no-any-return]

    def __init__(self, bucket_size: int, is_master: bool | None = None, **options: object) -> None:
        self._options = EngineOptions.of(options, WHERE)
        self._is_actor, self._is_master = is_master is not None, bool(is_master)
        self._about = stream_ranks.about_this_rank()
        self._owned = ExitStack()
        self._closing = weakref.finalize(self, self._owned.close)  # verl has no call for it: at the latest when the process exits
        self.meeting = Meeting("", 0.0)
        """Where the ranks of this update meet."""
        self._sender = StreamSender(self._options, bucket_size, "actor", self._owned)
        self._receiver: weightsync.Receiver | None = None
        self._failure = ""
        self._sources = EngineShards(training_worker())
        self._way: Way | None = None
        self._number: int | None = None
        """Of the version of this update, if it is not a stream; on rank 0, of the last such."""
        self._servers: dict[str, str] = {}
        self._manifest: Manifest | None = None
        self._adapter: dict[str, Any] = {}
        """PEFT's configuration, where an adapter travels."""

    def prepare(self) -> dict[str, object]:
        """Return what the other ranks must know of this one. Actor rank 0 starts a coordinator, unless there is one."""
        if not self._is_actor:
            return {**self._about, **self._about_replica()}
        if self._is_master and "coordinator" not in self._about:
            self._about |= stream_ranks.offer_coordinator(self._options, self._owned)
            tell(_log, f"weightsync: the coordinator of this run is {self._about['coordinator']}")
        return {**self._about, **self._about_source()}

    def _about_replica(self) -> dict[str, object]:
        if not self._options.direct:
            return {"streams": "the option direct is false"}
        here = vllm_servers.here()
        return {"streams": "this rollout is not a vLLM of verl 0.9"} if here is None else here.about()

    def _about_source(self) -> dict[str, object]:
        """Whether this rank can publish its shards, and as what."""
        about: dict[str, object] = {}
        if adapter := self._sources.adapter_config():
            about["adapter"] = adapter
        if self._options.shards:
            with suppress(WeightSyncError):
                about["tensors"] = msgspec.to_builtins(self._sources.source(self._options, direct=False)[1].tensors)
        try:
            if not self._options.direct:
                raise ConfigurationError("the option direct is false")
            about["checkpoint"] = self._sources.source(self._options, direct=True)[1].fingerprint
        except WeightSyncError as error:
            about["streams"] = " ".join(str(error).split())[:_REASON]
        if self._is_master and ("checkpoint" in about or "tensors" in about):
            about |= {"number": self._next_number(), "joined": list(self._servers)}
        return about

    def _next_number(self) -> int:
        """A number above all of this run. With it, a call of vLLM that was too late for a version finds it there already."""
        if self._number is None:
            with Client(ClientSettings.load(coordinator=str(self._about["coordinator"]))) as client:
                self._number = client.status().last
        return self._number + 1

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return each rank's coordinator address, and how weights travel. Runs in verl's driver.

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
        way, reason = choose_way(actors, rollouts)
        if reason:
            how = {"stream": "gather whole tensors", "adapter": "send the LoRA adapter alone"}.get(way, "publish their shards")
            stream_ranks.say_why(f"actor ranks {how}, and rollout ranks receive whole tensors", reason)
        every = cls.arguments(way, actors, rollouts)

        def ranks(size: int) -> dict[str, list[Any]]:
            return {"rank": list(range(size)), **{name: [value] * size for name, value in {**every, "world_size": size}.items()}}

        return ranks(actor_wg_world_size), ranks(rollout_world_size)

    @staticmethod
    def arguments(way: Way, actors: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What :meth:`init_process_group` gets on every rank, beside its rank.

        Raises:
            ConfigurationError: Ranks of other hosts cannot reach the coordinator of actor rank 0.
            MembershipError: Two rollout ranks have one name.
        """
        meeting = stream_ranks.arrange(actors[0], (*actors, *rollouts), rollouts)
        every: dict[str, Any] = {"way": way, **{name: actors[0][name] for name in _OFFERED[way]}}
        if way == "direct":
            every["servers"] = {about["replica"]: about["server"] for about in rollouts if "server" in about}
            meeting = msgspec.structs.replace(meeting, receivers=tuple(every["servers"]))
        return {**every, "meeting": msgspec.to_builtins(meeting)}

    def init_process_group(
        self,
        rank: int,
        world_size: int,
        meeting: dict[str, Any],
        way: Way = "stream",
        number: int | None = None,
        tensors: list[Any] | None = None,
        servers: dict[str, str] | None = None,
        joined: list[str] | None = None,
        adapter: dict[str, Any] | None = None,
    ) -> None:
        """Take the coordinator's address. An actor rank joins, or stays joined, and so do vLLM's workers. Before every update.

        Args:
            rank: As verl counts the ranks of a side.
            world_size: Their number.
            meeting: A :class:`~weightsync.integrations.stream_ranks.Meeting`.
            way: How weights travel.
            number: Number of the version, unless it is a stream.
            tensors: What rollout ranks receive as shards.
            servers: Ray's name of the server of each replica whose workers take the weights.
            joined: Replicas of the last such update.
            adapter: PEFT's configuration of the adapter that travels.

        Raises:
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        self._failure = ""  # of the last update; this one brings every tensor again
        self.finalize()
        self.meeting, self._number = msgspec.convert(meeting, Meeting), number
        self._manifest = None if tensors is None else Manifest(msgspec.convert(tensors, tuple[TensorSpec, ...]))
        before, self._way, self._adapter = self._way, way, adapter or {}
        if not self._is_actor:
            here = vllm_servers.here()
            if here is not None:
                here.join(self.meeting, self._options, joined or ()) if way == "direct" else here.leave()
            return
        if before not in (None, way):  # all ranks leave before one joins with something else
            self._sender.leave()
            texts_of_ranks("left")
        if self._is_master:
            left, self._servers = self._servers, servers or {}
            vllm_servers.dismiss([server for replica, server in left.items() if replica not in self._servers])
        try:
            self._sender.join(self.meeting.coordinator, rank, world_size, self._source())
        except MembershipError as error:
            raise MembershipError(
                f"{error} If it belongs to another run of verl, do not end it: each run needs its own coordinator. Unset "
                "WEIGHTSYNC_COORDINATOR and the option coordinator, and actor rank 0 starts one"
            ) from error

    def _source(self) -> ShardSource | None:
        return None if self._way in ("stream", "adapter") else self._sources.source(self._options, direct=self._way == "direct")[0]

    def leave(self) -> None:
        """Leave the coordinator as an actor rank, and free what it published. The next update joins again."""
        self._sender.leave()

    def finalize(self) -> None:
        """Leave the coordinator, as a rollout rank that received tensors. The others stay joined for the next update.

        verl calls this after an update in which no rank raised, and before it resumes the replicas.

        Raises:
            RoundFailed: This rollout rank did not receive all tensors of the update, and :meth:`receive_weights` could not say so.
        """
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._failure:
            raise RoundFailed(f"{self._about['name']} did not receive all weights, so verl must not resume it: {self._failure}")

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, calls: EngineCalls | None = None
    ) -> dict[str, float]:
        """Bring ``weights`` from an actor rank to all rollout ranks of this update: see :meth:`StreamSender.send`.

        Where shards or an adapter travel, ``weights`` are not iterated over: nothing of them is gathered.
        """
        whole: Iterable[tuple[str, torch.Tensor]] | None = None
        if self._way == "stream":
            whole = whole_weights(weights)
        elif self._way == "adapter":
            whole = self._sources.adapter()
        number = None if whole is not None else self._number
        try:
            result = await self._sender.send(whole, self.meeting, global_steps, number, calls)
        except WeightSyncError as error:
            if whole is None:
                await asyncio.to_thread(self._sender.leave)  # the next update may stream, if another rank cannot publish shards
                if isinstance(error, ConfigurationError):  # this rank holds other tensors now
                    self._sources.forget()
            raise
        if not self._is_master:
            return {}
        verified = {replica.name: replica.verified for replica in result.replicas}
        receivers = "replicas" if self._way == "direct" else "rollout_ranks"
        return {
            "checkpoint_engine/version": float(result.version.number),
            "checkpoint_engine/seconds": result.seconds,
            "checkpoint_engine/payload_mbytes": result.nbytes / (1 << 20),
            f"checkpoint_engine/{receivers}": float(len(self.meeting.receivers)),
            "checkpoint_engine/installed": float(all(verified.get(name) == "installed" for name in self.meeting.receivers)),
        }

    def receive_weights(self, global_steps: int | None = None) -> Any:  # noqa: ANN401 - one of two
        """Return the tensors of one update, on a rollout rank; or what weightsync's adapter takes in their place."""
        if self._way == "direct" and self._number is not None:
            return DirectUpdate(self._number, self.meeting.seconds)
        return AdapterUpdate(self._adapter, self._received()) if self._way == "adapter" else self._received()

    async def _received(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one update, on a rollout rank. Each is lent until the next is requested.

        Tensors are on this process's accelerator, if there is one. If the update fails, the iteration ends early instead of
        raising an error: verl's adapters tell their engine's worker only of an end. After an exception the worker would wait for
        tensors forever, with the next update behind it. The update still fails: actor ranks raise, or :meth:`finalize` does, so
        verl does not resume the replica. The next update brings every tensor again.

        Raises:
            ConfigurationError, AuthenticationError, MembershipError, ManifestMismatch: The coordinator refuses this rank.
        """
        meeting, me = self.meeting, str(self._about["name"])
        deadline = Deadline(meeting.seconds)
        receiver: weightsync.Receiver | None = None
        received = False
        try:
            receiver = await stream_ranks.join_async(me, meeting, self._options, self._options.staging(), self._manifest)
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
            asyncio.get_running_loop().call_later(GRACE, stream_ranks.leave_in_background, receiver)
        except Exception as error:
            if receiver is None and isinstance(error, _PERMANENT):
                raise
            failure = f"{type(error).__name__}: {error}"
            if meeting is self.meeting:  # no later update has begun
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
        stream_ranks.leave_in_background(receiver)


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
