"""An engine rank's front for the coordinator's rounds: prepare, pause, move, commit and resume, as steps of its session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.fill.choose import filler_for
from weightsync.engine.fill.filler import FillContext, Filled, Filler
from weightsync.engine.fill.streamed import bucket_bytes_for
from weightsync.engine.fill.windows import WindowReceiver
from weightsync.engine.readers import writing
from weightsync.engine.served_weights import ServedWeights
from weightsync.engine.session import EngineSession, Ticket
from weightsync.errors import ConfigurationError, PlanMismatch, ProtocolError
from weightsync.gc_pause import gc_paused
from weightsync.model import Layout, Manifest, Version, fold
from weightsync.planning.coverage import Coverage
from weightsync.protocol.messages import (
    Body,
    CheckSources,
    Commit,
    Done,
    EndStream,
    Host,
    Move,
    Moved,
    MoveWindow,
    OpenStream,
    Pause,
    Place,
    Placed,
    PlanSlice,
    Prepare,
    Prepared,
    Quarantine,
    Resume,
    Update,
    Updated,
    WindowMoved,
)
from weightsync.spans import span
from weightsync.tensors.device_memory import device_of
from weightsync.tensors.memory import layout_in_place
from weightsync.tensors.shards import Views
from weightsync.transports.base import Network, Transport
from weightsync.transports.select import transports_for

__all__ = ["EngineRole", "ReceivedCall"]


@dataclass(frozen=True, eq=False)
class ReceivedCall:
    """A call of the coordinator, from its arrival on. It runs on another thread than it arrives on, and later."""

    role: EngineRole
    body: Body
    ticket: Ticket

    @property
    def patience(self) -> float:
        """Seconds that this call may wait for the call before it, which the coordinator has given up, to end."""
        return self.role.patience

    def run(self, timeout: float) -> Body:
        """Answer the call. Raises :class:`~weightsync.errors.Aborted` if it was aborted since it arrived."""
        return self.role.answer(self, timeout)

    def withdraw(self) -> str:
        """The caller has given up: abort the call, unless it is a quarantine. Returns what the rank is doing."""
        if not isinstance(self.body, Quarantine):
            self.role.session.abort(None)
        return self.role.session.occupation


class EngineRole:
    """Runs one engine rank through rounds, on behalf of the coordinator.

    It prepares fillers and fills the engine's memory. What must never happen, whatever the coordinator says, its
    :class:`~weightsync.engine.session.EngineSession` refuses.

    ``alone`` says that this rank is its whole replica, ``member`` names it in errors.
    """

    patience = 5.0
    """Seconds after which a call that still waits for its turn is refused."""

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
        alone: bool = False,
        member: str = "this engine rank",
    ) -> None:
        self.adapter, self._alone = adapter, alone
        self._filler: Filler | None = None
        self._preparing: Filler | None = None
        self._windows: WindowReceiver | None = None
        self._served: ServedWeights | None = None
        self.session = EngineSession(adapter, member, self._abort_work, self._withdraw)
        self.transports = transports_for(transports, encrypted)
        self.here = here
        self.manifest: Manifest = self.session.manifest
        self._views: Views | None = None
        self.layout, self._addresses = self._look()
        self.device_memory = self._device is not None and adapter.can_load
        self._staging_on = self._staging_device()
        self.bucket_bytes = bucket_bytes or bucket_bytes_for(self._staging_on)
        """The most that a plan may ask for as one staging bucket (the largest tensor, if that is more)."""
        self._fill_context = FillContext(
            engine=self.session, manifest=self.manifest, transports=self.transports, host=here, staging_device=self._staging_on,
            bucket_bytes=self.bucket_bytes, buffers=buffers, encrypted=encrypted, rank=rank, check_memory=self._check_memory,
            progress=progress,
        )  # fmt: skip

    def _look(self) -> tuple[Layout | None, tuple[int, ...]]:
        """The engine's parameters as they lie in memory now; ``None`` if it can only be streamed to.

        That is so too for parameters on several devices, or on a CUDA device that no allowed transport writes to.
        """
        shards = self.session.shards()
        device = None if shards is None else device_of(shards)
        if shards is None or device is None or (device.type != "cpu" and not writing(device, self.transports)):
            return None, ()
        self._device = device if device.type == "cuda" else None
        self._views = Views([shard.tensor for shard in shards])
        # Rows are cut so that a processor's cache holds them until they are digested; a GPU digests all at once.
        cut = {} if self._device is None else {"block_bytes": None}
        layout, addresses = layout_in_place(self.manifest, shards, **cut)
        return layout, addresses

    def _staging_device(self) -> torch.device | None:
        """The CUDA device where buckets for the engine's loader belong, if bytes can come straight to it."""
        device = self.session.device()
        if device is None:
            device = device_of(self.session.shards() or ())
        if device is None or device.type != "cuda" or not writing(device, self.transports):
            return None
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def serve_weights(self, transports: Sequence[Transport], key: bytes, network: Network) -> ServedWeights:
        """Let other replicas read what this rank serves, by ``transports``, from now on.

        Raises:
            ConfigurationError: It is not known where every byte of a version is in this engine's memory, or that memory may be gone
                while the engine serves; or a transport cannot encrypt where it must.
            TransportUnavailable: No transport can publish the memory.
        """
        name, reason = self.adapter.name, self.adapter.no_source
        if self.session.sleeps and not reason:
            reason = "its weights may be asleep while it serves: its class has wake_weights() and does not say sleeps = False"
        if self.layout is None:
            reason = f"it has no shards() that can be written in place{_because(self.adapter.no_shards)}"
        alone = [transport for transport in transports if not transport.traits.shared_fate]
        if not alone:
            reason = f"{', '.join(transport.name for transport in transports)} reads only from trainers: allow another transport"
        if reason:
            raise ConfigurationError(f"the {name} adapter cannot serve its weights to other replicas: {reason}")
        self._served = ServedWeights(self.session, alone, key, self.here, network)
        return self._served

    def _withdraw(self) -> None:
        if self._served is not None:
            self._served.withdraw()

    def receive(self, body: Body) -> ReceivedCall:
        """Take note of a call when it arrives, before it waits for its turn. Never blocks. A :class:`Quarantine` aborts here."""
        aborts = isinstance(body, Quarantine)
        reason = (body.reason or "the round failed") if isinstance(body, Quarantine) else ""
        return ReceivedCall(self, body, self.session.receive(type(body).__name__, aborts=aborts, reason=reason))

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator that arrives now."""
        return self.receive(body).run(timeout)

    def answer(self, call: ReceivedCall, timeout: float) -> Body:
        """Run a call that was received.

        One at a time, except :class:`Quarantine`, which may come from another thread while a move runs and ends it.
        """
        deadline = Deadline(timeout)
        failpoints.reached(f"engine.received.{type(call.body).__name__.lower()}")
        if isinstance(call.body, Quarantine):
            self.session.quarantine(call.ticket, deadline)
            return Done()
        with self.session.turn(call.ticket, deadline):
            self.session.check_abort()
            return self._answer(call.body, deadline)

    def _answer(self, body: Body, deadline: Deadline) -> Body:
        match body:
            case Prepare():
                return self._prepare(body, deadline)
            case OpenStream():
                return self._open_stream(body, deadline)
            case MoveWindow():
                return self._move_window(body, deadline)
            case EndStream():
                return self._end_stream(body, deadline)
            case Place():
                return self._place(body, deadline)
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
        if body.plan.delivery == "streamed" and not self.adapter.can_load:
            raise ConfigurationError(
                f"the {self.adapter.name} adapter has no load(), so nothing can be streamed to this engine rank"
            )
        layout, addresses = self._look()
        if body.plan.delivery == "direct" and (layout is None or self.layout is None or layout.digest != self.layout.digest):
            raise PlanMismatch("the engine rebuilt its parameters since it joined: restart this rank's weightsync.Engine")
        self._addresses = addresses
        if self._filler is None or not self._filler.fits(body.plan, addresses):
            self._drop_filler()
            self._filler = self._new_filler(body.plan, layout, addresses, deadline)
        if self._alone:
            with span("cover"):  # which its updates compare digests by
                _ = self._filler.cover
        failpoints.reached("engine.prepared")
        return Prepared(digest=self._filler.digest, transports=self._filler.transports)

    def _new_filler(self, plan: PlanSlice, layout: Layout | None, addresses: tuple[int, ...], deadline: Deadline) -> Filler:
        filler = filler_for(self._fill_context, plan, layout, addresses, self._device)
        self._preparing = filler
        try:
            self.session.check_abort()  # an abort before the filler was in its place did not reach it
            filler.prepare(deadline)
        except BaseException:
            filler.close()
            raise
        finally:
            self._preparing = None
        return filler

    def _drop_filler(self) -> None:
        filler, self._filler = self._filler, None
        windows, self._windows = self._windows, None
        for held in (filler, windows):
            if held is not None:
                held.close()

    def _open_stream(self, body: OpenStream, deadline: Deadline) -> Prepared:
        if not self.adapter.can_load:
            raise ConfigurationError(f"the {self.adapter.name} adapter has no load(), and the tensors of a stream go through it")
        if self._windows is None or self._windows.key != body.key:
            self._drop_filler()
            self._windows = WindowReceiver(self._fill_context, body, takes_any=self.adapter.takes_any)
            try:
                self._windows.prepare(deadline)
            except BaseException:
                self._drop_filler()
                raise
        failpoints.reached("engine.prepared")
        return Prepared(digest=body.key, transports=self._windows.transports)

    def _move_window(self, body: MoveWindow, deadline: Deadline) -> WindowMoved:
        windows = self._prepared_windows()
        try:
            with self.session.writing(then="paused"):
                failpoints.reached("engine.move")
                if body.window == 0:
                    windows.begin()
                    self.session.begin()
                with gc_paused():
                    digests = windows.move(body, deadline)
        except BaseException:
            self._drop_filler()  # connections may be beyond use, or aborted
            raise
        failpoints.reached("engine.window")
        return WindowMoved(digests.astype("<u8").tobytes())

    def _end_stream(self, body: EndStream, deadline: Deadline) -> Moved:
        windows = self._prepared_windows()
        try:
            with self.session.writing():
                filled = windows.end(body.manifest, deadline)
        except BaseException:
            self._drop_filler()
            raise
        failpoints.reached("engine.moved")
        return _moved(windows.nbytes, filled)

    def _prepared_windows(self) -> WindowReceiver:
        if self._windows is None:
            raise ProtocolError("a window came to an engine rank that is not prepared for a stream")
        self.session.require("paused")
        return self._windows

    def _check_sources(self, number: int, deadline: Deadline) -> None:
        if self._filler is None:
            raise ProtocolError("looking for a version needs a prepared plan")
        self._filler.require(number, deadline)

    def _place(self, body: Place, deadline: Deadline) -> Placed:
        if self._served is None:
            raise ProtocolError(f"{self.session.member} does not serve its weights to other replicas")
        placed = self._served.place(body, deadline)
        failpoints.reached("engine.placed")
        return placed

    def _pause(self, body: Pause, deadline: Deadline) -> None:
        with self.session.leaving_service():
            failpoints.reached("engine.pausing")
            if self._filler is not None and not self.session.sleeps:
                self._follow_memory(self._filler, deadline)  # while the engine still generates: it may take seconds
            timeout = deadline.remaining("pausing")
        failpoints.reached("engine.pause")
        self.session.pause(body.mode, timeout)

    def _move(self, number: int, deadline: Deadline) -> Moved:
        filler = self._filler
        if filler is None:
            raise ProtocolError("a move needs a prepared plan")
        self.session.require("paused", "written")
        try:
            with self.session.writing():
                failpoints.reached("engine.move")
                self.session.begin()
                if self.session.sleeps:
                    filler = self._follow_memory(filler, deadline)
                with gc_paused():
                    filled = filler.run(number, deadline)
        except BaseException:
            self._drop_filler()  # connections may be beyond use, or aborted: the next round makes new ones
            raise
        failpoints.reached("engine.moved")
        return _moved(filler.nbytes, filled)

    def _follow_memory(self, filler: Filler, deadline: Deadline) -> Filler:
        """The filler for the memory where the parameters are now: an engine may have moved them since it prepared."""
        if filler.plan.delivery != "direct":
            return filler
        if self._views is not None:
            tensors = [shard.tensor for shard in self.session.shards() or ()]
            # How memory on a device is read is looked at while the device copies: this must be quick for ten thousands of tensors.
            if self._views.are_of(tensors) if filler.device is None else self._views.are_at(tensors):
                return filler
        layout, addresses = self._look()
        if self._device != filler.device or layout is None or layout.digest != filler.layout.digest:
            raise PlanMismatch("the engine rebuilt its parameters since it prepared: restart this rank's weightsync.Engine")
        self._drop_filler()
        self._filler = self._new_filler(filler.plan, layout, addresses, deadline)
        return self._filler

    def _check_memory(self) -> None:
        if self._views is not None and not self._views.are_of([shard.tensor for shard in self.session.shards() or ()]):
            raise PlanMismatch("the engine rebuilt its parameters since it prepared: restart this rank's weightsync.Engine")

    def _commit(self, version: Version) -> None:
        self.session.require("written")
        failpoints.reached("engine.finish")
        self.session.finish(version)
        failpoints.reached("engine.flush")
        self.session.commit(version)
        failpoints.reached("engine.committed")

    def _resume(self, deadline: Deadline) -> None:
        self.session.require("committed")
        failpoints.reached("engine.resume")
        with self.session.resuming(deadline):
            failpoints.reached("engine.resumed")

    def _update(self, body: Update, deadline: Deadline) -> Updated:
        """A whole round: what the coordinator would compare between move and commit, the rank that holds everything does."""
        version, filler = body.version, self._filler
        if filler is None:
            raise ProtocolError("an update needs a prepared plan")
        cover = filler.cover  # made while still serving, once for a plan
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

    def _holds(self, version: Version, moved: Moved, cover: Coverage) -> bool:
        digests = np.frombuffer(moved.digests, "<u8").astype(np.uint64, copy=False)
        return fold(cover.total({"": digests})) == version.digest

    def _abort_work(self) -> None:
        for held in (self._filler, self._preparing, self._windows, self._served):
            if held is not None:
                held.abort()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what runs, close connections, free the staging; wait at most ``timeout`` seconds. The engine stays as it is.

        If something runs longer than that (a loader that hangs, an update from outside), they are freed when it ends.
        """
        self.session.close(timeout, self._release)

    def _release(self) -> None:
        self._drop_filler()
        if self._served is not None:
            self._served.close()


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _moved(nbytes: int, filled: Filled) -> Moved:
    return Moved(
        nbytes=nbytes,
        digests=filled.digests.astype("<u8").tobytes(),
        receive_seconds=filled.receive_seconds,
        load_seconds=filled.load_seconds,
        digest_seconds=filled.digest_seconds,
        verified=filled.verified,
    )
