"""verl's checkpoint engine ``weightsync``: actor ranks stream whole tensors, and each rollout rank receives all of them.

verl decides when replicas pause, which of them take part, and when they resume. For every update it makes a new list of rollout
ranks. So a rollout rank joins the coordinator when it begins to receive, and leaves after the update: nothing that failed, was
removed or died is left for the next one. Actor ranks stay joined, so that version numbers go on.

The coordinator's URL reaches all ranks as metadata of verl. Its token never does: Ray would store it. It comes from the
environment of the ranks, or from a file of the user on this host.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Self

import msgspec
import ray
import torch
import verl
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import weightsync
from weightsync.config import Address, ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, MembershipError, RoundFailed, WeightSyncError
from weightsync.integrations.verl.options import Options, cast, server_settings
from weightsync.integrations.verl.releases import TRIED, is_tried
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import tell
from weightsync.protocol.tokens import is_loopback
from weightsync.server.server import BackgroundServer
from weightsync.transports.hostinfo import this_host

__all__ = ["BACKEND", "StreamCheckpointEngine"]

BACKEND = "weightsync"

_log = logging.getLogger(__name__)
_GRACE = 5.0
"""Seconds that a wait may exceed the update's own timeout, so that a more specific error can arrive first."""
_MOST_WINDOW_BYTES = 256 << 20
_SHOWN = 5


class Rendezvous(msgspec.Struct, frozen=True):
    """What actor rank 0 tells all ranks of an update: addresses and names only."""

    coordinator: str
    seconds: float
    receivers: tuple[str, ...] = ()
    """Replicas of this update: one for each rollout rank."""


@CheckpointEngineRegistry.register(BACKEND)
class StreamCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine of one actor rank or one rollout rank; which of them, verl tells it by ``init_process_group``."""

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
        self._options = Options.of(options)
        self._window_bytes = min(bucket_size, _MOST_WINDOW_BYTES)
        self._is_master = is_master
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._owned = ExitStack()
        self._closing = weakref.finalize(self, self._owned.close)  # verl has no call for it: at the latest when the process exits
        self._coordinator = ""
        self._meeting = Rendezvous("", 0.0)
        self._trainer: weightsync.Trainer | None = None
        self._receiver: weightsync.Receiver | None = None
        self._role: tuple[object, ...] = ()
        self._stuck: Future[dict[str, float]] | None = None

    def prepare(self) -> dict[str, object]:
        """Return what the other ranks must know of this one. Actor rank 0 starts a coordinator, unless there is one."""
        about: dict[str, object] = {"name": self._name, "host": this_host().name}
        if self._is_master:
            settings = ClientSettings.load()
            about |= {"coordinator": self._find_coordinator(), "seconds": self._options.timeout or settings.timeouts.publish}
        return about

    def _find_coordinator(self) -> str:
        if not self._coordinator:
            given = self._options.coordinator or os.environ.get("WEIGHTSYNC_COORDINATOR")
            if given:
                self._coordinator = Address.parse(given).url
            else:
                server = BackgroundServer(server_settings(ray.util.get_node_ip_address().strip("[]")))
                self._coordinator = self._owned.enter_context(server).url
                tell(_log, f"actor rank 0 runs the coordinator of this run, at {self._coordinator}")
        return self._coordinator

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
        url = Address.parse(str(actors[0]["coordinator"]))
        elsewhere = sorted({str(about["host"]) for about in metadata} - {str(actors[0]["host"])})
        if elsewhere and is_loopback(url.host):
            raise ConfigurationError(
                f"the coordinator of actor rank 0 listens on {url.host} of {actors[0]['host']}, because that process has no token, "
                f"and {', '.join(elsewhere[:_SHOWN])} cannot reach it. Set WEIGHTSYNC_TOKEN_FILE (or WEIGHTSYNC_TOKEN) in the "
                "environment of Ray on every node before `ray start`; rank 0 then listens on its node's address"
            )
        names = tuple(str(about["name"]) for about in rollouts)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise MembershipError(f"two rollout ranks have one name: {', '.join(twice[:_SHOWN])}; each needs a process of its own")
        meeting = msgspec.to_builtins(Rendezvous(url.url, float(actors[0]["seconds"]), names))

        def ranks(size: int) -> dict[str, list[Any]]:
            return {"rank": list(range(size)), "world_size": [size] * size, "meeting": [meeting] * size}

        return {**ranks(actor_wg_world_size), "sends": [True] * actor_wg_world_size}, ranks(rollout_world_size)

    def init_process_group(self, rank: int, world_size: int, meeting: dict[str, Any], sends: bool = False) -> None:
        """Learn where to meet. An actor rank joins, or stays joined. Called before every update.

        Raises:
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        self.finalize()
        self._meeting = msgspec.convert(meeting, Rendezvous)
        if not sends:
            return
        self._check_walked()
        role = (self._meeting.coordinator, rank, world_size)
        if self._trainer is not None and self._role == role:
            return
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        self._trainer = self._owned.enter_context(
            weightsync.Trainer(
                weightsync.Stream(window_bytes=self._window_bytes, device=self._options.staging()),
                self._meeting.coordinator,
                rank=rank,
                world_size=world_size,
                dtype=self._options.whole_dtype(),
                transports=self._options.transports,
            )
        )
        self._role = role

    def finalize(self) -> None:
        """Leave the coordinator, as a rollout rank. Actor ranks stay joined for the next update."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    # An actor rank

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict[str, float]:
        """Stream ``weights`` to all rollout ranks of this update, and walk them to their end in any case.

        Every step of the walk is a collective of the actor ranks. It runs on a thread of its own, so that this rank reports an
        error at the deadline even if another rank does not take part in that collective.

        Raises:
            RoundFailed: A rollout rank of this update did not take the weights.
            DeadlineExceeded: The update took longer than its timeout.
            WeightSyncError: What :meth:`weightsync.Trainer.publish_stream` raises.
        """
        self._check_walked()
        trainer = self._trainer
        if trainer is None:
            raise ConfigurationError("this rank lacks its coordinator: verl did not call init_process_group()")
        seconds = self._meeting.seconds
        walk = _in_thread(_publish, trainer, self._meeting, cast(weights, self._options), global_steps)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(walk)), seconds + _GRACE)
        except TimeoutError:
            if walk.done():
                raise
            self._stuck = walk
            raise DeadlineExceeded(
                f"actor rank {trainer.rank} did not walk its weights within {seconds:g} s. Their walk is a collective: another "
                "actor rank does not take part in it, or the model's own gather hangs"
            ) from None

    def _check_walked(self) -> None:
        if self._stuck is not None and not self._stuck.done():
            raise ConfigurationError(
                "this actor rank is still in the walk of an update that failed, in a collective that another rank never joined: "
                "restart the actor ranks"
            )

    # A rollout rank

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one update. Each is lent until the next is asked for.

        Raises:
            RoundFailed: The update failed, for this rank or on the actor's side.
            DeadlineExceeded: It did not come or go on in time.
            WeightSyncError: The coordinator cannot be reached, or refuses this rank.
        """
        deadline = Deadline(self._meeting.seconds)
        receiver = await asyncio.to_thread(self._join, self._options.staging())
        consumer = asyncio.current_task()
        if consumer is not None:  # verl's adapter may fail without closing this generator
            consumer.add_done_callback(lambda task: _leave_if_failed(task, receiver))
        received = False
        try:
            async for batch in receiver.receive_async(timeout=deadline.remaining("joining the coordinator") + _GRACE):
                for name, tensor in batch:
                    yield name, tensor
                _finish_copies()  # of this batch, whose memory is used again
            received = True
        finally:
            if not received:
                await asyncio.to_thread(receiver.close)
        # For the coordinator the round ends a moment later. verl calls finalize() when all ranks are done, unless one failed.
        self._receiver = receiver
        asyncio.get_running_loop().call_later(_GRACE, receiver.close)

    def _join(self, device: torch.device | None) -> weightsync.Receiver:
        seconds, timeouts = self._meeting.seconds, ClientSettings.load().timeouts
        limits = msgspec.structs.replace(timeouts, connect=min(timeouts.connect, seconds), version=seconds + _GRACE)
        return weightsync.Receiver(
            self._name, self._meeting.coordinator, device=device, transports=self._options.transports, timeouts=limits
        )


def _publish(
    trainer: weightsync.Trainer, meeting: Rendezvous, weights: Iterable[tuple[str, torch.Tensor]], step: int | None
) -> dict[str, float]:
    """Wait for all receivers, publish, and look whether all of them have it. If the wait fails, the walk is still done."""
    deadline = Deadline(meeting.seconds)
    try:
        _wait_for(trainer, meeting.receivers, deadline)
        seconds = deadline.remaining("waiting for the rollout ranks")
    except WeightSyncError:
        for _ in weights:
            pass
        raise
    result = trainer.publish_stream(weights, step=step, timeout=seconds)
    _check(result, meeting.receivers)
    if trainer.rank:
        return {}
    return {
        "checkpoint_engine/version": float(result.version.number),
        "checkpoint_engine/seconds": result.seconds,
        "checkpoint_engine/payload_mbytes": result.nbytes / (1 << 20),
        "checkpoint_engine/rollout_ranks": float(len(meeting.receivers)),
    }


def _wait_for(trainer: weightsync.Trainer, receivers: Iterable[str], deadline: Deadline) -> None:
    missing = set(receivers)
    count = len(missing)
    while missing:
        present = trainer.wait_for_replicas(count, deadline.remaining(f"waiting for {', '.join(sorted(missing)[:_SHOWN])}"))
        missing -= set(present)
        count = len(present) + 1  # others are there as well


def _check(result: RoundResult, receivers: Iterable[str]) -> None:
    """Raise if one of this update's ranks does not have the version, whatever the coordinator requires."""
    taken = {replica.name: replica for replica in result.replicas}
    failures = [
        f"{name}: {taken[name].error if name in taken else 'it has left'}"
        for name in receivers
        if name not in taken or taken[name].error is not None
    ]
    if failures:
        raise RoundFailed(f"version {result.version} did not reach {len(failures)} rollout ranks: {'; '.join(failures[:_SHOWN])}")


def _in_thread(function: Any, *arguments: object) -> Future[dict[str, float]]:  # noqa: ANN401
    """Run in a daemon thread, on this thread's device and without gradients. The process can end while it hangs in a collective."""
    done: Future[dict[str, float]] = Future()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            with torch.no_grad():
                done.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="weightsync-verl-walk", daemon=True).start()
    return done


def _leave_if_failed(consumer: asyncio.Task[Any], receiver: weightsync.Receiver) -> None:
    """Leave the coordinator, so that the update fails for this rank now and not at its deadline."""
    if consumer.cancelled() or consumer.exception() is not None:
        threading.Thread(target=receiver.close, name="weightsync-verl-leave", daemon=True).start()


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
