"""An engine rank's front for the coordinator's rounds: prepare, pause, move, commit and resume, as steps of its session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from weightsync import failpoints
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.fill.direct import DeviceDirect, DirectFiller, HostDirect, StagedChanges
from weightsync.engine.fill.filler import FillContext, Filled, Filler, PlanFiller
from weightsync.engine.fill.streamed import DeviceStreamed, HostStreamed, StagedTensors, StreamedFiller, bucket_bytes_for
from weightsync.engine.fill.windows import WindowFiller
from weightsync.engine.lora_role import LoraRole
from weightsync.engine.read_back import ParameterMemory
from weightsync.engine.readers import writing
from weightsync.engine.served_weights import ServedWeights
from weightsync.engine.session import EngineSession, State
from weightsync.engine.session_front import SessionFront
from weightsync.errors import ConfigurationError, PlanMismatch, ProtocolError, StaleSource, VerificationError, few
from weightsync.gc_pause import gc_paused
from weightsync.model import Box, Layout, Manifest, Version, fold
from weightsync.planning.coverage import Coverage
from weightsync.protocol.lora_messages import DropLora, PrepareLora, RegisterLora, StageLora
from weightsync.protocol.messages import (
    Audit,
    Body,
    CheckSources,
    Commit,
    EndCall,
    EndStream,
    Host,
    KeepLayout,
    LayoutKept,
    LetGo,
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
    Refuted,
    Resume,
    Revert,
    Stage,
    Staged,
    Update,
    Updated,
    WindowMoved,
)
from weightsync.protocol.worker import IncomingCall
from weightsync.publishing.publication import ReaderAccess
from weightsync.spans import span
from weightsync.tensors.device_memory import device_of
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.overlaps import check_writable
from weightsync.tensors.shards import Shard, Views
from weightsync.transports.base import Network, Transport
from weightsync.transports.registry import transports_for

_SHOWN, _LONGEST = 10, 4000  # tensors, characters
_YIELD_SECONDS = 1.0  # in which an idle rank begins a call; one that is busy refuses an audit after it


class EngineRole(SessionFront):
    """Runs one engine rank through rounds, on behalf of the coordinator.

    It prepares fillers and fills the engine's memory. What must never happen, whatever the coordinator says, its
    :class:`~weightsync.engine.session.EngineSession` refuses.

    ``alone`` says that this rank is its whole replica, ``member`` names it in errors.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        transports: Sequence[Transport | str] | None,
        here: Host,
        progress: Callable[[int], None] = lambda nbytes: None,
        report: Callable[[Body], None] = lambda body: None,
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
        self._served: ServedWeights | None = None
        self._staged: StagedChanges | StagedTensors | None = None
        """What the next move applies, or the last one has applied."""
        self._moved: tuple[str, Filled, DigestConstants] | None = None
        """What was moved and is not committed, where its digests are those of the parameters, or of what the loader was handed: of
        the layout with this digest."""
        self._installed: tuple[Version, str, Filled, DigestConstants] | None = None
        """What this rank serves, as it installed or received it: the base of changes, and what it is compared with."""
        self._freed: DirectFiller | None = None
        """Reads parameters again while no filler is prepared: the trainer is gone."""
        self._report = report
        super().__init__(EngineSession(adapter, member, self._abort_work, self._withdraw, lambda: self.loras.base_changed(None)))
        self._handlers |= {
            KeepLayout: self._hold, Prepare: self._prepare, OpenStream: self._open_stream, MoveWindow: self._move_window,
            EndStream: self._end_stream, Place: self._place, CheckSources: self._check_sources, Stage: self._stage,
            Pause: self._pause, Move: self._move, Revert: self._revert, Update: self._update, LetGo: self._free,
            Audit: self._audit,
        }  # fmt: skip
        self._at_once[EndCall] = lambda body, ticket, deadline: self.session.call_ended(body.call, body.reason, body.refuse)
        self.transports = transports_for(transports, encrypted)
        self.here = here
        self.manifest: Manifest = self.session.manifest
        self._memory: ParameterMemory | None = None
        self._memory = self._look(self.session.shards())
        self._held: Sequence[Shard] | None = None
        """What was found to be ``_memory``. Alive from the first look of a round to its last byte: no write is to freed memory."""
        self.layout = None if self._memory is None else self._memory.layout
        self.device_memory = self._memory is not None and self._memory.device is not None and adapter.can_load
        self._staging_on = self._staging_device()
        self.bucket_bytes = bucket_bytes or bucket_bytes_for(self._staging_on)
        """The most that a plan may ask for as one staging bucket (the largest tensor, if that is more)."""
        self._fill_context = FillContext(
            engine=self.session, manifest=self.manifest, transports=self.transports, host=here, staging_device=self._staging_on,
            bucket_bytes=self.bucket_bytes, bounded=bucket_bytes is not None, buffers=buffers, encrypted=encrypted, rank=rank,
            check_memory=self._check_memory, progress=progress,
        )  # fmt: skip
        self.loras = LoraRole(adapter, member, lambda: self.session.serving, self._fill_context, report)

    def receive(self, body: Body, update: int = 0) -> IncomingCall:
        """See :meth:`SessionFront.receive`. What is about LoRA adapters runs beside rounds."""
        if isinstance(body, EndCall):
            return replace(super().receive(body, update), beside=True)
        if isinstance(body, PrepareLora | StageLora | RegisterLora | DropLora) or (isinstance(body, LetGo) and body.adapters):
            return self.loras.receive(body, update)
        call = super().receive(body, update)
        return replace(call, turn_seconds=_YIELD_SECONDS, yields=True) if isinstance(body, Audit) else call

    def _look(self, shards: Sequence[Shard] | None) -> ParameterMemory | None:
        """The engine's parameters as they lie in memory now; ``None`` if it can only be streamed to.

        That is so too for parameters on several devices, or on a CUDA device that no allowed transport writes to.
        """
        device = None if shards is None else device_of(shards)
        if shards is None or device is None or (device.type != "cpu" and not writing(device, self.transports)):
            return None
        # Rows are cut so that a processor's cache holds them until they are digested; a GPU digests all at once.
        cut = {} if device.type == "cpu" else {"block_bytes": None}
        layout, addresses = layout_in_place(self.manifest, shards, **cut)
        if device.type == "cpu" and (self._memory is None or self._memory.addresses != addresses):
            check_writable(self.manifest, layout, addresses)
        views = Views([shard.tensor for shard in shards])
        return ParameterMemory(layout, addresses, device if device.type == "cuda" else None, views, self._parts(shards))

    def _parts(self, shards: Sequence[Shard]) -> Sequence[tuple[str, Box]]:
        return [(shard.name, shard.box) for shard in shards] if self.adapter.moves else ()

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
        if self.adapter.repacks and not reason:
            reason = "its parameters do not stay as they are written: its class says repacks = True"
        if self.session.sleeps and not reason:
            reason = "its weights may be asleep while it serves: its class has wake_weights() and does not say sleeps = False"
        if self.layout is None:
            reason = f"it has no shards() that can be written in place{_because(self.adapter.no_shards)}"
        alone = [transport for transport in transports if not transport.traits.shared_fate]
        if not alone:
            reason = f"{', '.join(transport.name for transport in transports)} reads only from trainers: allow another transport"
        if reason:
            raise ConfigurationError(f"the {name} adapter cannot serve its weights to other replicas: {reason}")
        self._served = ServedWeights(self.session, ReaderAccess(alone, key, self.here, network))
        return self._served

    def _withdraw(self) -> None:
        if self._served is not None:
            self._served.withdraw()

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator that arrives now."""
        return self.answer(body, timeout)

    def _hold(self, body: KeepLayout, deadline: Deadline) -> LayoutKept:
        """Keep experts and the like where they are, and say where that is."""
        if not self.adapter.moves:
            raise ProtocolError(f"the layout of {self.session.member} does not change")
        self.session.hold_parameters(deadline.left)
        if (memory := self._look(self.session.shards())) is None:
            raise PlanMismatch(f"the parameters of {self.session.member} cannot be written any more")
        self.layout = memory.layout
        failpoints.reached("engine.held")
        return LayoutKept(None if memory.layout.digest == body.layout else memory.layout.to_columns())

    def _prepare(self, body: Prepare, deadline: Deadline) -> Prepared:
        if body.plan.delivery == "streamed" and not self.adapter.can_load:
            raise ConfigurationError(
                f"the {self.adapter.name} adapter has no load(), so nothing can be streamed to this engine rank"
            )
        memory = self._look(self.session.shards())
        if body.plan.delivery == "direct" and (memory is None or self.layout is None or memory.layout.digest != self.layout.digest):
            raise self._rebuilt("joined")
        filler = self._filler
        if not isinstance(filler, PlanFiller) or not filler.fits(body.plan, () if memory is None else memory.addresses):
            filler = self._new_filler(body.plan, memory, deadline)
        self._memory, self._held = memory, None
        if self._alone:
            with span("cover"):  # which its updates compare digests by
                _ = filler.cover
        failpoints.reached("engine.prepared")
        return Prepared(digest=filler.digest, transports=filler.transports)

    def _rebuilt(self, since: str) -> PlanMismatch:
        if self.adapter.moves:
            return PlanMismatch(f"the engine moved parameters between its ranks since it {since}, which the next round follows")
        return PlanMismatch(f"the engine rebuilt its parameters since it {since}: restart this rank's weightsync.Engine")

    def _new_filler(self, plan: PlanSlice, memory: ParameterMemory | None, deadline: Deadline) -> PlanFiller:
        self._drop_filler()
        filler = filler_for(self._fill_context, plan, memory)
        self._bring_up(filler, deadline)
        self._memory = memory
        return filler

    def _bring_up(self, filler: Filler, deadline: Deadline) -> None:
        """Prepare the next filler, where an abort reaches it. It is closed if that fails."""
        self._preparing = filler
        try:
            with OnFailure(filler.close):
                self.session.check_abort()  # an abort before the filler was in its place did not reach it
                filler.prepare(deadline)
        finally:
            self._preparing = None
        self._filler, self._freed = filler, None

    def _drop_filler(self) -> None:
        filler, self._filler = self._filler, None
        if filler is not None:
            filler.close()

    def _free(self, _: LetGo, deadline: Deadline) -> None:
        filler = self._filler
        self._drop_filler()
        if isinstance(filler, DirectFiller):
            filler.let_go()
            self._freed = filler
        self._staged = None
        self.loras.answer(LetGo(adapters=True), deadline.left)

    def _plan_filler(self, what: str) -> PlanFiller:
        if not isinstance(self._filler, PlanFiller):
            raise ProtocolError(f"{what} needs a prepared plan")
        return self._filler

    def _window_filler(self) -> WindowFiller:
        if not isinstance(self._filler, WindowFiller):
            raise ProtocolError("a window came to an engine rank that is not prepared for a stream")
        self.session.require("paused")
        return self._filler

    def _open_stream(self, body: OpenStream, deadline: Deadline) -> Prepared:
        if not self.adapter.can_load:
            raise ConfigurationError(f"the {self.adapter.name} adapter has no load(), and the tensors of a stream go through it")
        filler = self._filler
        if not isinstance(filler, WindowFiller) or filler.digest != body.key:
            self._drop_filler()
            filler = WindowFiller(self._fill_context, body, takes_any=self.adapter.takes_any)
            self._bring_up(filler, deadline)
        failpoints.reached("engine.prepared")
        return Prepared(digest=filler.digest, transports=filler.transports)

    def _move_window(self, body: MoveWindow, deadline: Deadline) -> WindowMoved:
        windows = self._window_filler()
        with self._writing(then="paused"):
            failpoints.reached("engine.move")
            if body.window == 0:
                windows.begin()
                self.session.begin()
            with gc_paused():
                digests = windows.move(body, deadline)
        failpoints.reached("engine.window")
        return WindowMoved(digests.astype("<u8").tobytes())

    def _end_stream(self, body: EndStream, deadline: Deadline) -> Moved:
        windows = self._window_filler()
        with self._writing():
            filled = windows.end(body.manifest, deadline)
        failpoints.reached("engine.moved")
        return _moved(windows.nbytes, filled)

    @contextmanager
    def _writing(self, then: State = "written") -> Iterator[None]:
        """Write in the block, see :meth:`EngineSession.writing`. After an error the next round makes a new filler."""
        try:
            with OnFailure(self._drop_filler), self.session.writing(then):  # its connections may be beyond use, or aborted
                yield
        finally:
            self._let_go()

    def _check_sources(self, body: CheckSources, deadline: Deadline) -> None:
        self._plan_filler("looking for a version").require(body.number, deadline)

    def _place(self, body: Place, deadline: Deadline) -> Placed:
        if self._served is None:
            raise ProtocolError(f"{self.session.member} does not serve its weights to other replicas")
        placed = self._served.place(body, deadline)
        failpoints.reached("engine.placed")
        return placed

    def _stage(self, body: Stage, deadline: Deadline) -> Staged:
        """Read what changed while the engine serves. A rank that cannot raises, and all bytes are moved."""
        self._staged = None
        if isinstance(self._filler, StreamedFiller):
            return self._stage_tensors(self._filler, body, deadline)
        filler, installed, shards, constants = self._served_now(body.base)
        _require_public(constants)
        if filler.changes is None:
            raise ConfigurationError("parameters that share memory take no changes")
        failpoints.reached("engine.stage")
        with filler.beside():
            self._require_installed(body.base, filler, installed, constants, deadline)
            staged = self._staged = filler.changes.read(filler, body, installed.digests, shards, deadline)
            self.session.check_abort()  # an abort that came before did not reach it
            with span("digest"):
                digests = staged.predict(deadline)
        failpoints.reached("engine.staged")
        return Staged(staged.nbytes, digests.astype("<u8").tobytes())

    def _stage_tensors(self, filler: StreamedFiller, body: Stage, deadline: Deadline) -> Staged:
        """Compare the digests of the tensors that the loader has with the new ones. Parameters that can be read are read again."""
        if not self.session.loads_some:
            raise ConfigurationError(f"the {self.adapter.name} adapter's loader takes whole versions")
        received, constants = self._installed_of(body.base, filler.layout)
        _require_public(constants)
        failpoints.reached("engine.stage")
        held = received.digests
        if received.verified == "installed":
            again = self.session.read_back(deadline)
            if again is None or self.adapter.outdated or not np.array_equal(again[0], filler.layout.tensor):
                raise StaleSource(f"the parameters of {self.session.member} cannot be read now")
            held = again[1]
        elif self.session.shards("follow") is not None:
            raise StaleSource(f"the parameters of {self.session.member} cannot be read again: others may have changed them")
        staged, digests = filler.stage(body, held, deadline)
        self.session.check_abort()  # an abort that came before did not reach it
        self._staged = staged
        failpoints.reached("engine.staged")
        return Staged(staged.nbytes, digests.astype("<u8").tobytes())

    def _installed_of(self, version: Version, layout: Layout) -> tuple[Filled, DigestConstants]:
        """What this rank installed or received of ``version``, which it serves, and the constants of its digests."""
        installed = self._installed
        if installed is None or self.session.served_version != version or installed[:2] != (version, layout.digest):
            raise StaleSource(f"it is not known what {self.session.member} has installed of version {version}")
        return installed[2:]

    def _served_now(self, version: Version) -> tuple[DirectFiller, Filled, Sequence[Shard], DigestConstants]:
        """What wrote ``version``, which this rank serves, what it installed, the parameters, still in that memory, and its key."""
        if (refuted := self.session.refuted) is not None and refuted[0] == version:
            raise VerificationError(refuted[1])
        filler = self._freed or self._plan_filler("looking at what is installed")
        if not isinstance(filler, DirectFiller) or self.session.sleeps:
            raise ConfigurationError("only parameters that stay where they are, and that are written directly, can be read again")
        installed, constants = self._installed_of(version, filler.layout)
        shards = self.session.shards("follow")
        if shards is None or not self._unmoved(shards, self._held) or self.adapter.outdated:
            raise StaleSource(f"the parameters of {self.session.member} are elsewhere since it installed version {version}")
        return filler, installed, shards, constants

    def _require_installed(
        self, version: Version, filler: DirectFiller, installed: Filled, constants: DigestConstants, deadline: Deadline
    ) -> None:
        """Raise unless all parameters are what this rank installed of ``version``. Reports a difference, in a round too."""
        with span("audit"):
            bad = np.flatnonzero(filler.digests(deadline, constants) != installed.digests)
        if len(bad):
            if self.adapter.outdated:  # the engine has exchanged parameters since then
                raise StaleSource(f"the parameters of {self.session.member} moved while they were read")
            names = few([self.manifest[tensor].name for tensor in np.unique(filler.layout.tensor[bad]).tolist()], _SHOWN)
            why = f"parameters of {self.session.member} were changed since it installed version {version}: {names}"
            self._installed = None
            self.session.refute(why)
            self._report(Refuted(version, why[:_LONGEST]))
            raise VerificationError(why)

    def _audit(self, body: Audit, deadline: Deadline) -> None:
        """Read all parameters again while the engine serves. An abort ends this, and nothing that is prepared."""
        filler, installed, _, constants = self._served_now(body.version)
        failpoints.reached("engine.audit")
        with filler.beside():
            self._require_installed(body.version, filler, installed, constants, deadline)

    def _revert(self, body: Revert, deadline: Deadline) -> None:
        staged = self._staged
        if not isinstance(staged, StagedChanges) or staged.base != body.base:
            raise ProtocolError(f"{self.session.member} has replaced no words of version {body.base}")
        with self.session.reverting(body.base):
            failpoints.reached("engine.revert")
            shards = self.session.shards("follow")
            if shards is None or not Views([shard.tensor for shard in staged.shards]).are_of([shard.tensor for shard in shards]):
                raise PlanMismatch(f"the parameters of {self.session.member} are elsewhere, and need not hold version {body.base}")
            staged.revert(deadline)
        failpoints.reached("engine.reverted")

    def _commit(self, body: Commit, deadline: Deadline) -> None:
        self._staged = None  # no words are put back once a rank may have committed
        super()._commit(body, deadline)
        self.loras.base_changed(body.version)
        moved, self._moved = self._moved, None
        self._installed = None if moved is None else (body.version, *moved)

    def _pause(self, body: Pause, deadline: Deadline) -> None:
        with self.session.leaving_service():
            failpoints.reached("engine.pausing")
            self._let_go()  # of a round that never moved, or never committed
            self._moved = None
            if isinstance(self._filler, PlanFiller) and not self.session.sleeps:
                self._follow_memory(self._filler, deadline)  # while the engine still generates: it may take seconds
            timeout = deadline.remaining("pausing")
        failpoints.reached("engine.pause")
        self.session.pause(body.mode, timeout, None if body.number is None else (body.epoch, body.number))
        failpoints.reached("engine.paused")

    def _move(self, body: Move, deadline: Deadline) -> Moved:
        filler = self._plan_filler("a move")
        self.session.require("paused", "written")
        if self._staged is not None and self.session.serving != self._staged.base:
            self._staged = None  # another update came between, from outside
        with self._writing():
            failpoints.reached("engine.move")
            self.session.begin()
            with gc_paused():
                # Again: parameters may have moved while the pause waited for a generation step, or in begin().
                filler = self._follow_memory(filler, deadline, "follow")
                constants = DigestConstants(body.key) if body.key else PUBLIC
                nbytes, staged = filler.nbytes, self._staged
                if body.staged and staged is not None and staged.is_for(body.number, filler):
                    nbytes, filled = staged.nbytes, staged.apply(deadline)
                else:  # what is staged is for memory that the parameters have left
                    self._staged = None
                    filled = filler.run(body.number, deadline, constants)
                    if self.adapter.repacks:
                        filled = replace(filled, verified="received")
        known = filled.verified == "installed" or isinstance(filler, StreamedFiller)
        self._moved = (filler.layout.digest, filled, constants) if known else None
        failpoints.reached("engine.moved")
        return _moved(nbytes, filled)

    def _follow_memory(self, filler: PlanFiller, deadline: Deadline, phase: str = "") -> PlanFiller:
        """The filler for the memory where the parameters are now: an engine may have moved them since it was looked at."""
        if filler.plan.delivery != "direct":
            return filler
        held, shards = self._held, self.session.shards(phase)
        self._held = shards
        if shards is not None and self._unmoved(shards, held):
            return filler
        self._held = None
        memory = self._look(shards)
        if memory is None or memory.device != filler.device or memory.layout.digest != filler.layout.digest:
            self._drop_filler()
            raise self._rebuilt("prepared")
        filler = self._new_filler(filler.plan, memory, deadline)
        self._held = shards
        return filler

    def _let_go(self) -> None:
        """Keep no tensor alive between rounds, except those of an adapter that ``follows``: it keeps them alive itself.

        The next round then need not compare them, which would take 10 to 17 ms for 18,867 tensors, in its pause.
        """
        if not self.adapter.follows:
            self._held = None

    def _unmoved(self, shards: Sequence[Shard], held: Sequence[Shard] | None) -> bool:
        """Whether ``shards`` are the memory that the filler writes. ``held`` is that memory, alive; ``None`` at the first look.

        This must be quick for ten thousands of tensors: the engine may be paused.
        """
        if self._memory is None:
            return False
        if held is not None and shards is held and self.adapter.follows:
            return True
        if self._parts(shards) != self._memory.parts:
            return False
        tensors, views = [shard.tensor for shard in shards], self._memory.views
        return views.are_of(tensors) if held is None else views.are_at(tensors)

    def _check_memory(self) -> None:
        if self._memory is not None and not self._unmoved(self.session.shards("follow") or (), self._held):
            raise self._rebuilt("prepared")

    def _update(self, body: Update, deadline: Deadline) -> Updated:
        """A whole round: what the coordinator would compare between move and commit, the rank that holds everything does."""
        version, cover = body.version, self._plan_filler("an update").cover  # made while still serving, once for a plan
        started = time.perf_counter()
        self._pause(Pause(body.mode, version.number, version.epoch), deadline)
        paused = time.perf_counter()
        moved = self._move(Move(version.number, staged=body.staged), deadline)
        came = time.perf_counter()
        if not self._holds(version, moved, cover):
            return Updated(moved, False, paused - started, 0.0)  # in which tensors, the coordinator finds
        deadline.remaining("committing")
        self._commit(Commit(version), deadline)
        deadline.remaining("resuming")
        self._resume(Resume(), deadline)
        return Updated(moved, True, paused - started, time.perf_counter() - came)

    def _holds(self, version: Version, moved: Moved, cover: Coverage) -> bool:
        digests = np.frombuffer(moved.digests, "<u8").astype(np.uint64, copy=False)
        return fold(cover.total({"": digests})) == version.digest

    def _abort_work(self) -> None:
        for held in () if self.session.yields else (self._filler, self._preparing, self._served, self._staged):
            if held is not None:
                held.abort()

    def close(self, timeout: float = 5.0) -> None:
        """Abort what runs, close connections, free the staging; wait at most ``timeout`` seconds. The engine stays as it is.

        If something runs longer than that (a loader that hangs, an update from outside), they are freed when it ends.
        """
        self.loras.close(timeout)
        self.session.close(timeout, self._release)

    def _release(self) -> None:
        self._drop_filler()
        if self._served is not None:
            self._served.close()


def filler_for(context: FillContext, plan: PlanSlice, memory: ParameterMemory | None) -> PlanFiller:
    """The filler for ``plan``, yet to be prepared. ``memory`` are the engine's parameters, ``None``: they cannot be written.

    Buckets are staged on the engine's CUDA device if all bytes of the plan can come straight to it, otherwise in host memory.

    Raises:
        PlanMismatch: The plan is for another layout, or not the one that the coordinator computed.
        LayoutError: The plan asks for larger staging buckets than this engine rank allows.
    """
    layout = Layout.from_columns(context.manifest, plan.layout)
    if plan.delivery == "streamed":
        device = context.staging_for(plan.sources)
        return HostStreamed(context, plan, layout) if device is None else DeviceStreamed(context, plan, layout, device)
    if memory is None or memory.layout.digest != layout.digest:
        raise PlanMismatch(
            "the plan was made for another layout than this engine rank's: its parameters were rebuilt; register again"
        )
    if memory.device is None:
        return HostDirect(context, plan, layout, memory.addresses)
    return DeviceDirect(context, plan, layout, memory.addresses, memory.device)


def _require_public(constants: DigestConstants) -> None:
    """Raise unless digests can be compared with those of another version."""
    if constants is not PUBLIC:
        raise StaleSource("the version before was read from another replica: its digests are under a key")


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
