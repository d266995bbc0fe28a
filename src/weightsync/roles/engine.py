"""An engine rank's part of a round: pause, fetch, verify what was installed, commit; or stay quarantined."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from weightsync import points
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, LoadError, PlanMismatch, ProtocolError
from weightsync.garbage import no_collection
from weightsync.messages import (
    DEVICE_SCHEMES,
    Body,
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
from weightsync.model import Layout, Manifest, Version, fold
from weightsync.planning.cover import Cover
from weightsync.roles.adapter import EngineAdapter
from weightsync.roles.device_memory import device_of, pointers_of
from weightsync.roles.device_streaming import bucket_bytes_for
from weightsync.roles.filling import Clock, Filling
from weightsync.roles.read_back import ReadBack
from weightsync.roles.route import Route, StagingSettings
from weightsync.tensors.memory import layout_in_place

__all__ = ["EngineRole"]

_RECEIVER_SECONDS = 5.0  # after an abort, a read looks at it every few hundred KiB


class EngineRole:
    """Runs one engine rank through rounds, on behalf of the coordinator.

    It enforces on its own side what must never happen, whatever the coordinator says: :class:`Resume` is refused unless the
    last bytes written were committed, :class:`Commit` unless a move ended well, and a move before a pause.
    """

    _device: torch.device | None = None  # the CUDA device that holds the parameters, where they are written directly

    def __init__(
        self,
        adapter: EngineAdapter,
        transports: Sequence[str],
        here: Host,
        progress: Callable[[int], None] = lambda nbytes: None,
        *,
        bucket_bytes: int | None = None,
        buffers: int = 2,
        encrypted: bool = False,
        rank: int = 0,
    ) -> None:
        self.adapter = adapter
        self._sleeps = type(adapter).wake_weights is not EngineAdapter.wake_weights
        self._rank = rank
        self._encrypted = encrypted
        self.transports = tuple(transports)
        self.here = here
        self.manifest: Manifest = adapter.manifest()
        self._pointers: list[int] = []
        self.layout, self._addresses = self._look()
        self.device_memory = self._device is not None and type(adapter).load is not EngineAdapter.load
        self._staging_on = self._staging_device()
        self._settings = StagingSettings(bucket_bytes or bucket_bytes_for(self._staging_on), buffers)
        self._read_back = ReadBack(self.manifest)
        self.serving: Version | None = None
        self._state: Literal["serving", "pausing", "paused", "moved", "committed"] = "serving"
        self._route: Route | None = None
        self._opening: Route | None = None
        self._closed = False
        self._quarantined = threading.Event()
        self._kept_paused = False
        self._turn = threading.Lock()
        self._filling = Filling(adapter, self._read_back, self._check_abort, progress)

    def _look(self) -> tuple[Layout | None, tuple[int, ...]]:
        """The engine's parameters as they lie in memory now; ``None`` if it can only be streamed to.

        That is so too for parameters on several devices, or on a CUDA device with neither ``cuda_ipc`` nor ``nccl`` allowed.
        """
        shards = self.adapter.shards()
        device = None if shards is None else device_of(shards)
        if shards is None or device is None or (device.type != "cpu" and not DEVICE_SCHEMES & set(self.transports)):
            return None, ()
        self._device = device if device.type == "cuda" else None
        self._pointers = pointers_of(shards)
        # Rows are cut so that a processor's cache holds them until they are digested; a GPU digests all at once.
        cut = {} if self._device is None else {"block_bytes": None}
        layout, addresses = layout_in_place(self.manifest, shards, **cut)
        return layout, addresses

    def _staging_device(self) -> torch.device | None:
        """The CUDA device where buckets for the engine's loader belong, if bytes can come straight to it."""
        if not DEVICE_SCHEMES & set(self.transports):
            return None
        device = self.adapter.device()
        if device is None:
            device = device_of(self.adapter.shards() or ())
        if device is None or device.type != "cuda":
            return None
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    @property
    def bucket_bytes(self) -> int:
        """The most that a plan may ask for as one staging bucket (the largest tensor, if that is more)."""
        return self._settings.bucket_bytes

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator.

        One at a time, except :class:`Quarantine`, which may come from another thread while a move runs and ends it.
        """
        if isinstance(body, Quarantine):
            return self._quarantine(timeout)
        with self._turn:
            try:
                return self._answer(body, timeout)
            finally:
                if self._closed:  # meanwhile: whoever closed did not wait for this to end
                    self._drop_route()

    def _answer(self, body: Body, timeout: float) -> Body:
        match body:
            case Prepare():
                return self._prepare(body, Deadline(timeout))
            case Pause():
                self._pause(body, Deadline(timeout))
            case Move():
                return self._move(body.number, Deadline(timeout))
            case Commit():
                self._commit(body.version)
            case Update():
                return self._update(body, Deadline(timeout))
            case Resume():
                self._resume(timeout)
            case _:
                raise ProtocolError(f"an engine rank does not understand {type(body).__name__}")
        return Done()

    def _prepare(self, body: Prepare, deadline: Deadline) -> Prepared:
        points.reached("engine.prepare")
        layout, addresses = self._look()
        if body.plan.delivery == "direct" and (layout is None or self.layout is None or layout.digest != self.layout.digest):
            raise PlanMismatch("the engine rebuilt its parameters since it joined: restart this rank's weightsync.Engine")
        self._addresses = addresses
        if self._route is None or not self._route.fits(body.plan, addresses):
            self._drop_route()
            self._route = self._new_route(body.plan, layout, addresses, deadline)
        points.reached("engine.prepared")
        return Prepared(digest=self._route.digest, transports=tuple(dict.fromkeys(self._route.schemes)))

    def _new_route(self, plan: PlanSlice, layout: Layout | None, addresses: tuple[int, ...], deadline: Deadline) -> Route:
        device, settings = self._device, self._settings
        if plan.delivery == "streamed":
            device = self._staging_on
            if device is not None and not self.adapter.loads_late and self._read_back.look(self.adapter.shards()):
                settings = replace(settings, reads_back=True)
                self._read_back.build()
        route = Route(self.manifest, plan, layout, addresses, device, settings, self._rank)
        self._opening = route
        try:
            if self._closed:
                raise Aborted("this engine rank was closed")
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

    def _pause(self, body: Pause, deadline: Deadline) -> None:
        if self._route is not None and not self._sleeps:
            self._follow_memory(self._route, deadline)  # while the engine still serves: for ten thousands it takes milliseconds
        timeout = deadline.remaining("pausing")
        self._quarantined.clear()
        self._kept_paused = False
        self._state = "pausing"  # from here on nothing is attested: whoever connects meanwhile must not count on this rank
        points.reached("engine.pause")
        self.adapter.pause(body.mode, timeout)
        self._state = "paused"

    def _move(self, number: int, deadline: Deadline) -> Moved:
        route = self._route
        if self._state not in ("paused", "moved") or route is None:
            raise ProtocolError("a move needs a prepared plan and a paused engine")
        self.serving = None  # from here to the commit this rank's bytes have no name
        self._state = "paused"
        points.reached("engine.move")
        clock = Clock()
        try:
            self.adapter.wake_weights()
            if self._sleeps:
                route = self._follow_memory(route, deadline)
            with no_collection():
                digests, verified = self._filling.run(route, number, clock, deadline)
            self._check_abort()
        except BaseException:
            self._drop_route()  # connections may be beyond use, or aborted: the next round makes new ones
            raise
        self._state = "moved"
        points.reached("engine.moved")
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
        if route.plan.delivery != "direct" or pointers_of(self.adapter.shards() or ()) == self._pointers:
            return route
        layout, addresses = self._look()
        if self._device != route.device or layout is None or layout.digest != route.layout.digest:
            raise PlanMismatch("the engine rebuilt its parameters since it prepared: restart this rank's weightsync.Engine")
        self._drop_route()
        self._route = self._new_route(route.plan, layout, addresses, deadline)
        return self._route

    def _check_abort(self) -> None:
        if self._quarantined.is_set():
            raise Aborted("the round was aborted for this engine rank")

    def _commit(self, version: Version) -> None:
        if self._state != "moved":
            raise ProtocolError("a commit needs a move that ended well")
        points.reached("engine.finish")
        self.adapter.finish(version)
        points.reached("engine.flush")
        self.adapter.wake_cache()
        if not self.adapter.flush():
            raise LoadError("the engine refused to drop caches made with the old weights")
        self._check_abort()
        self.serving = version
        self._state = "committed"
        points.reached("engine.committed")

    def _resume(self, timeout: float) -> None:
        if self._state != "committed":
            raise ProtocolError("this engine rank holds bytes that were not committed: it is not resumed")
        points.reached("engine.resume")
        self.adapter.resume()
        points.reached("engine.resumed")
        if self._kept_paused:  # a quarantine came meanwhile, and gave up waiting
            self._state, self.serving = "paused", None
            self.adapter.pause("abort", timeout)
            raise Aborted("the round was aborted while this engine rank resumed; it is paused again")
        self._state = "serving"

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
        self._resume(deadline.remaining("resuming"))
        return Updated(moved, True, paused - started, time.perf_counter() - came)

    def _holds(self, version: Version, moved: Moved, cover: Cover) -> bool:
        digests = np.frombuffer(moved.digests, "<u8").astype(np.uint64, copy=False)
        return fold(cover.total({"": digests})) == version.digest

    def _quarantine(self, timeout: float) -> Done:
        self._kept_paused = True
        self.abort()
        if not self._turn.acquire(timeout=timeout):  # what runs looks at the flag at every group; a stuck loader does not
            raise DeadlineExceeded(
                f"the {self.adapter.name} engine is still busy after {timeout:g} s; it is never resumed from here"
            )
        try:
            self.serving = None
            if self._state in ("serving", "pausing"):
                self._state = "paused"  # whatever pausing does: without a commit this rank is not resumed
                self.adapter.pause("abort", timeout)
            self._state = "paused"
        finally:
            self._turn.release()
        return Done()

    @property
    def attests(self) -> Version | None:
        """The version that this rank generates with right now; ``None`` while it is paused, whatever it holds."""
        return self.serving if self._state == "serving" else None

    def abort(self) -> None:
        """End a move that runs, soon: the coordinator that ordered it is gone. Never blocks; the engine stays paused."""
        self._quarantined.set()
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
