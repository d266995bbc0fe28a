"""An engine rank's part of a round: pause, fetch, verify what was installed, commit; or stay quarantined."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.adapter_calls import AdapterCalls
from weightsync.engine.device_streaming import bucket_bytes_for
from weightsync.engine.filling import Clock, Filling
from weightsync.engine.links import Route, StagingSettings, writing
from weightsync.engine.read_back import ReadBack
from weightsync.errors import Aborted, DeadlineExceeded, LoadError, PlanMismatch, ProtocolError
from weightsync.gc_pause import no_collection
from weightsync.model import Layout, Manifest, Version, fold
from weightsync.planning.coverage import Cover
from weightsync.protocol.messages import (
    Body,
    CheckSources,
    Commit,
    Done,
    Host,
    Move,
    Moved,
    Pause,
    PlanSlice,
    Prepare,
    Prepared,
    Quarantine,
    Resume,
    Update,
    Updated,
)
from weightsync.tensors.device_memory import device_of
from weightsync.tensors.memory import layout_in_place
from weightsync.tensors.shards import Views
from weightsync.transports.base import Transport
from weightsync.transports.select import transports_for

__all__ = ["EngineRole", "ReceivedCall"]

_State = Literal["serving", "pausing", "paused", "moved", "committed"]
_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class ReceivedCall:
    """A call of the coordinator, from its arrival on. It runs on another thread than it arrives on, and later.

    An abort ends every call that arrived before it, also one that has not begun, and none that arrives afterwards.
    """

    role: EngineRole
    body: Body
    number: int
    """Calls are numbered as they arrive."""
    aborts: int
    """The number of the newest abort when this call arrived."""

    @property
    def patience(self) -> float:
        """Seconds that this call may wait for the call before it, which the coordinator has given up, to end."""
        return self.role.patience

    def run(self, timeout: float) -> Body:
        """Answer the call. Raises :class:`~weightsync.errors.Aborted` if it was aborted since it arrived."""
        return self.role.answer(self, timeout)

    def withdraw(self) -> str:
        """Nobody waits for the answer any more: abort the call, unless it is a quarantine. Returns what the rank is doing."""
        if not isinstance(self.body, Quarantine):
            self.role.abort()
        return self.role.occupation


class EngineRole:
    """Runs one engine rank through rounds, on behalf of the coordinator.

    It enforces on its own side what must never happen, whatever the coordinator says: :class:`Resume` is refused unless the
    last bytes written were committed, :class:`Commit` unless a move ended well, and a move before a pause. A call that was
    aborted after it arrived changes nothing more: every later step of it compares the number of the newest abort with the one
    that the call found when it arrived.

    ``member`` names this rank in errors.
    """

    patience = 5.0
    """Seconds after which a call that still waits for its turn is refused."""

    _due: ReceivedCall | None = None  # a quarantine that waits for its turn, or has given up waiting
    _device: torch.device | None = None  # the CUDA device that holds the parameters, where they are written directly

    def __init__(
        self,
        adapter: EngineAdapter,
        transports: Sequence[Transport | str] | None,
        here: Host,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        bucket_bytes: int | None = None,
        buffers: int = 2,
        encrypted: bool = False,
        rank: int = 0,
        member: str = "this engine rank",
    ) -> None:
        self.adapter = adapter
        self._calls = AdapterCalls(adapter, member, self._forget)
        self._member = member
        self._sleeps = type(adapter).wake_weights is not EngineAdapter.wake_weights
        self._rank, self._encrypted = rank, encrypted
        self.transports = transports_for(transports)
        self.here = here
        self.manifest: Manifest = adapter.manifest()
        self._views: Views | None = None
        self.layout, self._addresses = self._look()
        self.device_memory = self._device is not None and type(adapter).load is not EngineAdapter.load
        self._staging_on = self._staging_device()
        self._settings = StagingSettings(bucket_bytes or bucket_bytes_for(self._staging_on), buffers)
        self._read_back = ReadBack(self.manifest)
        self.serving: Version | None = None
        self._state: _State = "serving"
        self._route: Route | None = None
        self._opening: Route | None = None
        self._closed = False
        self._numbers, self._abort_numbers = itertools.count(1), itertools.count(1)
        self._aborts = 0
        self._call = ReceivedCall(self, Done(), 0, 0)
        self._resumed_by = 0
        self._turn = self._calls.turn
        # Held for the moment in which an abort is noted or the state changes, so that what attests says after an abort stays true.
        self._changing = threading.Lock()
        self._filling = Filling(adapter, self._calls, self._read_back, self._check_abort, self._check_memory, progress)

    def _look(self) -> tuple[Layout | None, tuple[int, ...]]:
        """The engine's parameters as they lie in memory now; ``None`` if it can only be streamed to.

        That is so too for parameters on several devices, or on a CUDA device that no allowed transport writes to.
        """
        shards = self._calls.shards()
        device = None if shards is None else device_of(shards)
        if shards is None or device is None or (device.type != "cpu" and not writing(device, self.transports)):
            return None, ()
        self._device = device if device.type == "cuda" else None
        self._views = Views([one.tensor for one in shards])
        # Rows are cut so that a processor's cache holds them until they are digested; a GPU digests all at once.
        cut = {} if self._device is None else {"block_bytes": None}
        layout, addresses = layout_in_place(self.manifest, shards, **cut)
        return layout, addresses

    def _staging_device(self) -> torch.device | None:
        """The CUDA device where buckets for the engine's loader belong, if bytes can come straight to it."""
        device = self.adapter.device()
        if device is None:
            device = device_of(self.adapter.shards() or ())
        if device is None or device.type != "cuda" or not writing(device, self.transports):
            return None
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    @property
    def bucket_bytes(self) -> int:
        """The most that a plan may ask for as one staging bucket (the largest tensor, if that is more)."""
        return self._settings.bucket_bytes

    def receive(self, body: Body) -> ReceivedCall:
        """Take note of a call when it arrives, before it waits for its turn. Never blocks. A :class:`Quarantine` aborts here."""
        if isinstance(body, Quarantine):
            self.abort()
        return ReceivedCall(self, body, next(self._numbers), self._aborts)

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator that arrives now."""
        return self.receive(body).run(timeout)

    def answer(self, call: ReceivedCall, timeout: float) -> Body:
        """Run a call that was received.

        One at a time, except :class:`Quarantine`, which may come from another thread while a move runs and ends it.
        """
        deadline = Deadline(timeout)
        failpoints.reached(f"engine.received.{type(call.body).__name__.lower()}")
        quarantining = isinstance(call.body, Quarantine)
        if quarantining:
            self._due = call
        if not self._turn.acquire(timeout=timeout):
            never = "; it is never resumed from here" if quarantining else ""
            raise DeadlineExceeded(f"{self.occupation}, so {type(call.body).__name__} did not get its turn in {timeout:g} s{never}")
        try:
            if quarantining:
                return self._quarantine(call, deadline)
            self._call = call
            self._check_abort()
            return self._answer(call.body, deadline)
        finally:
            try:
                if self._closed:  # meanwhile: whoever closed did not wait for this to end
                    self._drop_route()
                if self._due is not None:
                    self._quarantine(self._due, deadline)
            finally:
                self._turn.release()

    @property
    def occupation(self) -> str:
        """What this rank is doing now, for people: the adapter's method that it is inside of, and for how long."""
        return self._calls.running or f"{self._member} is busy with {type(self._call.body).__name__}"

    def _answer(self, body: Body, deadline: Deadline) -> Body:
        match body:
            case Prepare():
                return self._prepare(body, deadline)
            case CheckSources():
                self._check_sources(body.number, deadline)
            case Pause():
                self._pause(body, deadline)
            case Move():
                return self._move(body.number, deadline)
            case Commit():
                self._commit(body.version)
            case Update():
                return self._update(body, deadline)
            case Resume():
                self._resume(deadline)
            case _:
                raise ProtocolError(f"an engine rank does not understand {type(body).__name__}")
        return Done()

    def _prepare(self, body: Prepare, deadline: Deadline) -> Prepared:
        layout, addresses = self._look()
        if body.plan.delivery == "direct" and (layout is None or self.layout is None or layout.digest != self.layout.digest):
            raise PlanMismatch("the engine rebuilt its parameters since it joined: restart this rank's weightsync.Engine")
        self._addresses = addresses
        if self._route is None or not self._route.fits(body.plan, addresses):
            self._drop_route()
            self._route = self._new_route(body.plan, layout, addresses, deadline)
        failpoints.reached("engine.prepared")
        return Prepared(digest=self._route.digest, transports=tuple(dict.fromkeys(self._route.schemes)))

    def _new_route(self, plan: PlanSlice, layout: Layout | None, addresses: tuple[int, ...], deadline: Deadline) -> Route:
        device, settings = self._device, self._settings
        if plan.delivery == "streamed":
            device = self._staging_on
            if device is not None and not self.adapter.loads_late and self._read_back.look(self._calls.shards()):
                settings = replace(settings, reads_back=True)
                self._read_back.build()
        route = Route(self.manifest, plan, layout, addresses, device, settings, self._rank)
        self._opening = route
        try:
            if self._closed:
                raise Aborted("this engine rank was closed")
            self._check_abort()  # an abort before the route was in its place did not reach it
            route.open(self.transports, self.here, deadline, self._encrypted)
        except BaseException:
            route.close()
            raise
        finally:
            self._opening = None
        return route

    def _drop_route(self) -> None:
        route, self._route = self._route, None
        if route is not None:
            route.close()

    def _check_sources(self, number: int, deadline: Deadline) -> None:
        if self._route is None:
            raise ProtocolError("looking for a version needs a prepared plan")
        self._route.require(number, deadline)

    def _become(self, state: _State) -> None:
        """Enter ``state``, unless the call was aborted: then raise, and change nothing."""
        with self._changing:
            self._check_abort()
            self._state = state

    def _forget(self) -> None:
        """Attest nothing; without a commit this rank is not resumed. In this rank's turn, or that of who takes the engine."""
        with self._changing:
            self._state, self.serving = "paused", None

    def _pause(self, body: Pause, deadline: Deadline) -> None:
        served = self._state == "serving"
        self._become("pausing")  # from here on nothing is attested: whoever connects meanwhile must not count on this rank
        failpoints.reached("engine.pausing")
        try:
            if self._route is not None and not self._sleeps:
                self._follow_memory(self._route, deadline)  # while the engine still generates: it may take seconds
            timeout = deadline.remaining("pausing")
        except BaseException:
            if served:  # nothing was changed; but after an abort, somebody may have been told that this rank serves nothing
                with suppress(Aborted):
                    self._become("serving")
            raise
        failpoints.reached("engine.pause")
        self._calls.pause(body.mode, timeout)
        self._state = "paused"
        self._check_abort()

    def _move(self, number: int, deadline: Deadline) -> Moved:
        route = self._route
        if self._state not in ("paused", "moved") or not self._calls.paused or route is None:
            raise ProtocolError("a move needs a prepared plan and a paused engine")
        self._become("paused")
        self.serving = None  # from here to the commit this rank's bytes have no name
        failpoints.reached("engine.move")
        clock = Clock()
        try:
            self._calls.begin()
            self._calls.wake_weights()
            if self._sleeps:
                route = self._follow_memory(route, deadline)
            with no_collection():
                digests, verified = self._filling.run(route, number, clock, deadline)
            self._become("moved")
        except BaseException:
            self._drop_route()  # connections may be beyond use, or aborted: the next round makes new ones
            raise
        failpoints.reached("engine.moved")
        return Moved(
            nbytes=route.nbytes,
            digests=digests.astype("<u8").tobytes(),
            receive_seconds=clock.receive,
            load_seconds=clock.load,
            digest_seconds=clock.digest,
            verified=verified,
        )

    def _follow_memory(self, route: Route, deadline: Deadline) -> Route:
        """The route to where the parameters are now: an engine may have given them other memory since it prepared."""
        if route.plan.delivery != "direct":
            return route
        if self._views is not None:
            tensors = [one.tensor for one in self._calls.shards() or ()]
            # How memory on a device is read is looked at while the device copies: this must be quick for ten thousands of tensors.
            if self._views.are_of(tensors) if route.device is None else self._views.are_at(tensors):
                return route
        layout, addresses = self._look()
        if self._device != route.device or layout is None or layout.digest != route.layout.digest:
            raise PlanMismatch("the engine rebuilt its parameters since it prepared: restart this rank's weightsync.Engine")
        self._drop_route()
        self._route = self._new_route(route.plan, layout, addresses, deadline)
        return self._route

    def _check_memory(self) -> None:
        if self._views is not None and not self._views.are_of([one.tensor for one in self._calls.shards() or ()]):
            raise PlanMismatch("the engine rebuilt its parameters since it prepared: restart this rank's weightsync.Engine")

    def _check_abort(self) -> None:
        if self._aborts != self._call.aborts:
            raise Aborted("the round was aborted for this engine rank")

    def _commit(self, version: Version) -> None:
        if self._state != "moved":
            raise ProtocolError("a commit needs a move that ended well")
        failpoints.reached("engine.finish")
        self._calls.finish(version)
        failpoints.reached("engine.flush")
        self._calls.wake_cache()
        if not self._calls.flush():
            raise LoadError("the engine refused to drop caches made with the old weights")
        self._become("committed")
        self.serving = version
        failpoints.reached("engine.committed")

    def _resume(self, deadline: Deadline) -> None:
        if self._state != "committed":
            raise ProtocolError("this engine rank holds bytes that were not committed: it is not resumed")
        self._check_abort()
        failpoints.reached("engine.resume")
        self._calls.resume()
        failpoints.reached("engine.resumed")
        try:
            self._become("serving")
        except Aborted:
            self._forget()
            self._pause_late(deadline)
            raise Aborted("the round was aborted while this engine rank resumed; it is paused again") from None
        self._resumed_by = self._call.number

    def _update(self, body: Update, deadline: Deadline) -> Updated:
        """A whole round: what the coordinator would compare between move and commit, the rank that holds everything does."""
        version, route = body.version, self._route
        if route is None:
            raise ProtocolError("an update needs a prepared plan")
        cover = route.cover  # made while still serving, once for a plan
        started = time.perf_counter()
        self._pause(Pause(body.mode), deadline)
        paused = time.perf_counter()
        moved = self._move(version.number, deadline)
        came = time.perf_counter()
        if not self._holds(version, moved, cover):
            return Updated(moved, False, paused - started, 0.0)  # in which tensors, the coordinator finds
        deadline.remaining("committing")
        self._commit(version)
        deadline.remaining("resuming")
        self._resume(deadline)
        return Updated(moved, True, paused - started, time.perf_counter() - came)

    def _holds(self, version: Version, moved: Moved, cover: Cover) -> bool:
        digests = np.frombuffer(moved.digests, "<u8").astype(np.uint64, copy=False)
        return fold(cover.total({"": digests})) == version.digest

    def _quarantine(self, call: ReceivedCall, deadline: Deadline) -> Done:
        self._due = None
        if self._resumed_by > call.number:
            return Done()  # a round that was ordered after this quarantine has brought a version
        self._forget()  # whatever pausing does
        self._pause_late(deadline)
        return Done()

    def _pause_late(self, deadline: Deadline) -> None:
        """Pause what must not generate, also when the time for it is over."""
        self._calls.pause("abort", max(deadline.at - time.monotonic(), _PAUSE_SECONDS))

    @property
    def attests(self) -> Version | None:
        """The version that this rank generates with right now; ``None`` while it is paused, whatever it holds."""
        return self.serving if self._state == "serving" else None

    def abort(self) -> None:
        """End every call that has arrived, soon: nobody waits for it. Never blocks; an engine that is paused stays paused."""
        with self._changing:
            self._aborts = next(self._abort_numbers)
        for route in (self._route, self._opening):
            if route is not None:
                route.abort()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what runs, close connections, free the staging; wait at most ``timeout`` seconds. The engine stays as it is.

        What runs longer than that (a loader that hangs) frees them itself when it ends.
        """
        self._closed = True
        self.abort()
        if self._turn.acquire(timeout=timeout):
            try:
                self._drop_route()
            finally:
                self._turn.release()
