"""Ranks of a framework that gathers whole tensors with a generator on one side, and loads what arrives on the other.

The framework makes one object on each rank, carries what each says about itself to the others, and decides when an update begins.
Trainer ranks have a :class:`StreamSender`, rollout ranks a :class:`weightsync.Receiver` from :func:`join`.

The coordinator's URL reaches all ranks as metadata of the framework. Its token never does: Ray would store it. It comes from the
environment of the ranks, or from a file of the user on this host.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import torch

from weightsync.closing import OnFailure
from weightsync.config import Address, ClientSettings, variable
from weightsync.deadline import Deadline
from weightsync.engine.receiver import Receiver
from weightsync.engines.hf_checkpoint import checkpoint_of
from weightsync.errors import ConfigurationError, MembershipError, few
from weightsync.integrations.engine_calls import EngineCalls
from weightsync.integrations.stream_options import Options, cast, server_settings
from weightsync.integrations.updates import GRACE, check_reached, in_thread, overdue_walk, walk_on
from weightsync.model import Manifest
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import tell
from weightsync.protocol.tokens import is_loopback
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import DTypes, ShardedState, shards_of, torch_dtype
from weightsync.trainer.requests import end_call
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer
from weightsync.transports.hostinfo import this_host

_MOST_WINDOW_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Three such windows stay allocated on each trainer rank. A host has a trainer rank for each GPU, and much else in its memory."""
_numbers = itertools.count(1)
_log = logging.getLogger(__name__)


class Meeting(msgspec.Struct, frozen=True):
    """What every rank of an update knows: addresses and names only."""

    coordinator: str
    seconds: float
    receivers: tuple[str, ...] = ()
    """Replicas of this update: one for each rollout rank."""


class ShardSource(NamedTuple):
    """Shards that a trainer rank publishes in the place of a stream, or the stream."""

    state: torch.nn.Module | Mapping[str, torch.Tensor] | ShardedState | Stream
    dtype: DTypes
    """In which they travel."""
    transports: tuple[str, ...] | None

    @classmethod
    def of_checkpoint(
        cls, state: torch.nn.Module | ShardedState, checkpoint: Manifest, transports: tuple[str, ...] | None
    ) -> tuple[ShardSource, Manifest]:
        """Return ``state`` in the dtypes of the checkpoint that the engines have, and its manifest.

        Raises:
            ManifestMismatch: They are not the checkpoint's tensors.
        """
        buffers = isinstance(state, torch.nn.Module)
        wanted = {name: torch_dtype(spec.dtype) for spec in checkpoint for name in spec.names}
        own = shards_of(state, include_buffers=buffers)[0]
        dtypes = {spec.name: wanted.get(spec.name, torch_dtype(spec.dtype)) for spec in own}
        manifest = shards_of(state, dtype=dtypes, include_buffers=buffers)[0]
        checkpoint.check_same(manifest, "the training engine")
        return cls(state, dtypes, transports), manifest


def served_checkpoint(model: str, revision: str | None, config: Any, dtype: torch.dtype | None) -> Manifest:  # noqa: ANN401 - Transformers'
    """Return the tensors of a checkpoint that a vLLM serves in ``dtype``: shards are published in the dtypes of its files.

    Raises:
        ConfigurationError: ``dtype`` holds numbers that the files' dtypes do not. Shards would be rounded twice.
    """
    checkpoint = checkpoint_of(model, revision, config).manifest
    floats = {own for spec in checkpoint if (own := torch_dtype(spec.dtype)).is_floating_point}
    if dtype is not None and any(torch.promote_types(own, dtype) != own for own in floats):
        raise ConfigurationError(f"the checkpoint's dtype does not hold all numbers of vLLM's ({dtype})")
    return checkpoint


def why_streamed(trainers: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]) -> str:
    """Why vLLM's workers cannot read the trainer ranks' shards, by what each rank says about itself; empty if they can.

    A rank says ``streams``, which is a reason, or ``checkpoint``, the fingerprint of its manifest. A rollout rank says ``replica``,
    and ``checkpoint`` where it knows it.
    """
    ranks = (*trainers, *rollouts)
    for about in ranks:
        if "streams" in about:
            return f"{about['name']}: {about['streams']}"
    if not (all("checkpoint" in about for about in trainers) and all("replica" in about for about in rollouts)):
        return "a rank is of another release of weightsync"
    if len({about["checkpoint"] for about in ranks if "checkpoint" in about}) > 1:
        return "the checkpoint at the model's path is not the same on all nodes"
    return ""


@cache
def say_why(what: str, reason: str) -> None:
    """Log once why weights do not travel directly."""
    _log.warning("weightsync: %s, because of %s", what, reason)


@cache
def say_verified(trainers: str, installed: bool) -> None:
    """Say once that weights travel directly."""
    proof = "in the engines' parameters" if installed else "as received by the engines"
    tell(_log, f"weightsync: vLLM's workers read the weights from the {trainers} ranks, verified {proof}")


def token_file() -> str | None:
    """The file from which vLLM's workers read this rank's token. They find what a coordinator left on this host by themselves."""
    secret = variable("WEIGHTSYNC_TOKEN")
    return str(_written(secret).name) if secret else variable("WEIGHTSYNC_TOKEN_FILE") or None


@cache
def _written(secret: str) -> Any:  # noqa: ANN401 - a file that is kept until the process exits
    file = tempfile.NamedTemporaryFile("w", prefix="weightsync-token-", encoding="ascii")  # noqa: SIM115
    file.write(secret)
    file.flush()
    return file


def about_this_rank() -> dict[str, object]:
    """Return a rank's name and host. In a named Ray actor the name begins with the actor's, by which the framework knows it.

    The second rank in a process gets another name than the first.
    """
    number = next(_numbers)
    name = f"{_ray_actor() or socket.gethostname()}-{os.getpid()}{f'-{number}' if number > 1 else ''}"
    return {"name": name, "host": this_host().name}


def _ray_actor() -> str:
    """The name of the Ray actor that this process is; empty for a driver and for an actor without a name."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return ""
    return str(ray.get_runtime_context().get_actor_name() or "")


def offer_coordinator(options: Options, owned: ExitStack) -> dict[str, object]:
    """What the rank that offers a coordinator says beyond that. It starts one, owned by ``owned``, unless the user named one.

    Raises:
        ConfigurationError: The settings are wrong, or the address cannot be listened on.
    """
    given = options.coordinator or variable("WEIGHTSYNC_COORDINATOR")
    if given:
        url = Address.parse(given).url
    else:
        import ray

        url = owned.enter_context(BackgroundServer(server_settings(ray.util.get_node_ip_address().strip("[]")))).url
    return {"coordinator": url, "seconds": options.timeout or ClientSettings.load().timeouts.publish}


def arrange(offer: Mapping[str, Any], metadata: Iterable[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]]) -> Meeting:
    """Where all ranks of ``metadata`` meet, where ``offer`` is of the one that offers a coordinator.

    Raises:
        ConfigurationError: Ranks on other hosts cannot reach the coordinator.
        MembershipError: Two rollout ranks have one name.
    """
    url, host = Address.parse(str(offer["coordinator"])), str(offer["host"])
    elsewhere = sorted({str(about["host"]) for about in metadata} - {host})
    if elsewhere and is_loopback(url.host):
        raise ConfigurationError(
            f"the coordinator listens on {url.host} of {host}, because the process that runs it has no token, "
            f"and {few(elsewhere)} cannot reach it. Set WEIGHTSYNC_TOKEN_FILE (or WEIGHTSYNC_TOKEN) in the "
            "environment of Ray on every node before `ray start`; the coordinator then listens on its node's address"
        )
    names = tuple(str(about["name"]) for about in rollouts)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MembershipError(f"two rollout ranks have one name: {few(twice)}; each needs a separate process")
    return Meeting(url.url, float(offer["seconds"]), names)


def join(name: str, meeting: Meeting, options: Options, device: torch.device | None, manifest: Manifest | None = None) -> Receiver:
    """Join the coordinator as a rollout rank, which is a replica of its own. With a ``manifest`` it takes shards, else a stream.

    Raises:
        WeightSyncError: The coordinator cannot be reached, or refuses this rank.
    """
    seconds, timeouts = meeting.seconds, ClientSettings.load().timeouts
    limits = msgspec.structs.replace(timeouts, connect=min(timeouts.connect, seconds), version=seconds + GRACE)
    return Receiver(name, meeting.coordinator, manifest=manifest, device=device, transports=options.transports, timeouts=limits)


async def join_async(
    name: str, meeting: Meeting, options: Options, device: torch.device | None, manifest: Manifest | None = None
) -> Receiver:
    """As :func:`join`, without blocking. If the caller is cancelled meanwhile, the receiver leaves as soon as it has joined."""
    joining = in_thread(partial(join, name, meeting, options, device, manifest), "weightsync-join")
    try:
        return await asyncio.shield(asyncio.wrap_future(joining))
    except asyncio.CancelledError:
        joining.add_done_callback(lambda done: leave_in_background(done.result()) if done.exception() is None else None)
        raise


def leave_in_background(receiver: Receiver) -> None:
    """Let ``receiver`` leave the coordinator now, without waiting for it."""
    threading.Thread(target=receiver.close, name="weightsync-leave", daemon=True).start()


class StreamSender:
    """Streams the framework's generator from one trainer rank, and stays joined from one update to the next.

    Where the framework shows its model as well, :meth:`join` takes a :class:`ShardSource`, and this rank publishes its own shards.

    ``kind`` is the framework's word for its trainer ranks. What it holds is closed with ``owned``, or by :meth:`leave`.
    """

    def __init__(self, options: Options, window_bytes: int, kind: str, owned: ExitStack) -> None:
        self._options, self._kind = options, kind
        self._window_bytes = min(window_bytes, _MOST_WINDOW_BYTES[options.device])
        self._trainer: Trainer | None = None
        self._role: tuple[object, ...] = ()
        self._source: ShardSource | None = None
        self._stuck: Future[RoundResult] | None = None
        self._idle = False
        """Whether it has not sent in this update."""
        owned.callback(self.leave)

    def join(self, coordinator: str, rank: int, world_size: int, source: ShardSource | None = None) -> None:
        """Join, or stay joined: to stream, or to publish the shards of ``source``.

        Raises:
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        self._check_walked()
        role = (coordinator, rank, world_size)
        idle, self._idle = self._idle, True
        if self._trainer is not None and self._role == role and self._source is source and not idle:
            return
        self.leave()  # also if it did not send in the last update, whose error would reach it in this one
        options = self._options
        stream = Stream(window_bytes=self._window_bytes, device=options.staging())
        state, dtype, transports = source or ShardSource(stream, options.whole_dtype(), options.transports)
        self._trainer = Trainer(
            state, coordinator, rank=rank, world_size=world_size, dtype=dtype, transports=transports,
            include_buffers=isinstance(state, torch.nn.Module), seeds=source is None,
        )  # fmt: skip
        self._role, self._source = role, source

    @property
    def keeps_copy(self) -> bool:
        """Whether it stays joined on a shared GPU: it keeps a copy, and memory of the framework is not mapped by engines."""
        return self._options.keep_copy and self._trainer is not None and not self._trainer.in_place

    def leave(self, call: int = 0) -> None:
        """Leave the coordinator and free windows or shards. Ends the engines' ``call`` if no update is in it. Safe twice."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            if call:
                end_call(trainer._link, call, "nothing more is published to it")
            trainer.close()

    async def send(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | None,
        meeting: Meeting,
        step: int | None = None,
        number: int | None = None,
        calls: EngineCalls | None = None,
    ) -> RoundResult:
        """Stream ``weights`` to all receivers of ``meeting``, and walk them to their end in any case.

        Without ``weights``, publish the shards that this rank joined with, as version ``number``, and tell the engine of ``calls``
        to take them. Nothing is gathered then.

        Every step of the walk is a collective of the trainer ranks. It runs on a thread of its own, so that this rank reports an
        error at the deadline even if another rank does not take part in that collective.

        Raises:
            RoundFailed: A receiver did not take the weights.
            DeadlineExceeded: The update took longer than its timeout.
            WeightSyncError: What :meth:`weightsync.Trainer.publish_stream` raises.
        """
        self._check_walked()
        self._idle = False
        trainer = self._trainer
        if trainer is None:
            raise ConfigurationError(f"this {self._kind} rank lacks its coordinator: the framework did not initialize it")
        whole = None if weights is None else cast(weights, self._options)

        def publish(seconds: float) -> RoundResult:
            if whole is not None:
                return trainer.publish_stream(whole, step=step, timeout=seconds)
            if calls is None:
                return trainer.publish(number, step=step, timeout=seconds)
            return calls.publish(lambda: trainer.publish(number, step=step, timeout=seconds), number, timeout=seconds)

        walk = in_thread(lambda: _publish(trainer, meeting, whole, publish))
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(walk)), meeting.seconds + GRACE)
        except TimeoutError:
            self._stuck = walk  # unless it is done
            return overdue_walk(walk, f"{self._kind} rank {trainer.rank}", meeting.seconds)

    def _check_walked(self) -> None:
        if self._stuck is not None and not self._stuck.done():
            raise ConfigurationError(
                f"this {self._kind} rank is still in the walk of an update that failed, in a collective that another rank never "
                f"joined: restart the {self._kind} ranks"
            )


def _publish(
    trainer: Trainer, meeting: Meeting, weights: Iterable[tuple[str, torch.Tensor]] | None, publish: Callable[[float], RoundResult]
) -> RoundResult:
    """Wait for all receivers, publish, and look whether all of them have it. If the wait fails, the walk is still done."""
    deadline = Deadline(meeting.seconds)
    with OnFailure(walk_on, weights or ()):
        left = deadline.remaining("waiting for the rollout ranks")
        trainer.wait_for_replicas(0, left, names=meeting.receivers, refused="wait" if weights is not None else "raise")
        seconds = deadline.remaining("waiting for the rollout ranks")
    result = publish(seconds)
    check_reached(result, "rollout ranks", meeting.receivers)
    return result
