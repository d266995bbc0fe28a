"""The state machine of one engine rank: the only caller of its adapter, for every source of weights."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal, TypeVar

import torch

from weightsync.arrays import Int32, UInt64
from weightsync.closing import OnFailure
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.adapter_calls import AdapterCalls
from weightsync.engine.read_back import ReadBack
from weightsync.errors import Aborted, DeadlineExceeded, LoadError, ProtocolError, as_load_error, few
from weightsync.model import Manifest, PauseMode, Version
from weightsync.model.manifest import join_manifests
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.shards import Shard

State = Literal["serving", "pausing", "paused", "writing", "written", "committed", "quarantined"]
"""An update takes a rank through these in order. ``quarantined`` is out of service: only a pause leads out of it."""

T = TypeVar("T")

_PAUSE_SECONDS = 5.0
_numbers = itertools.count(1)


@dataclass(eq=False)
class Ticket:
    """The place of one call among all calls of a session, taken when the call arrives.

    An abort ends every call that arrived before it, also one that has not begun, and none that arrives afterwards. A withdrawal
    ends one call.
    """

    what: str
    """The call's name, for people."""
    number: int
    """Calls are numbered as they arrive, those of all sessions in this process together: sessions may share an adapter."""
    aborts: int
    """The number of the newest abort when the call arrived."""
    update: int
    """The update that the call belongs to; 0 where a connection keeps calls in order."""
    withdrawn: bool = False
    """Whether its caller has given up."""
    yields: bool = False
    """Whether it waits for no other call, and the next call that arrives ends it."""


class EngineSession:
    """Takes one engine rank through updates, and makes every call of its adapter.

    Two fronts feed it: the coordinator's rounds and the updates from outside. Each takes a :class:`Ticket` when a call arrives
    (:meth:`receive`), runs the call's steps in its :meth:`turn`, and is refused what must never happen, whatever it asks for:

    * Steps run in order. A resume needs a commit of the last bytes written, a commit a write that ended well, a write a pause.
    * A call that was aborted after it arrived, or whose update has ended, changes nothing more.
    * A write that fails leaves the rank quarantined: paused, with no version, until another update pauses it again.
    * A quarantine is carried out even if it gave up waiting for its turn: by the call that holds the turn, when that ends.

    ``member`` names this rank in errors. ``on_abort`` is called by :meth:`abort` and :meth:`withdraw`, on any thread. It must end
    what the current call waits for, and not block.
    ``on_leaving`` is called when the rank leaves service, before anything changes, and must not block. ``on_overwritten`` is
    called, in its turn, before another session writes the engine. A speculative decoder's own model may be updated with the
    engine: ``draft`` takes the tensors whose names begin with ``draft_prefix``.

    Methods below :meth:`turn` are called within a turn, except for properties.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        member: str,
        on_abort: Callable[[], None] = lambda: None,
        on_leaving: Callable[[], None] = lambda: None,
        on_overwritten: Callable[[], None] = lambda: None,
        *,
        draft: EngineAdapter | None = None,
        draft_prefix: str = "mtp.",
    ) -> None:
        self.member, self._on_abort, self._on_leaving = member, on_abort, on_leaving
        self._adapters = (adapter,) if draft is None else (adapter, draft)
        self._draft_prefix = None if draft is None else draft_prefix
        self._calls = AdapterCalls(self._adapters, member, self._taken, on_overwritten)
        main, *rest = (adapter.manifest() for adapter in self._adapters)
        self.manifest: Manifest = join_manifests(main, rest[0] if rest else None, draft_prefix)
        self.sleeps = any(adapter.sleeps for adapter in self._adapters)
        """Whether parameters may be elsewhere after :meth:`begin`."""
        self.loads_some = all(adapter.loads_some for adapter in self._adapters)
        """Whether loaders may get only the tensors that changed."""
        self._owner_pauses = any(adapter.owner_pauses for adapter in self._adapters)
        self._read_back = ReadBack(self.manifest)
        self.state: State = "serving"
        self.serving: Version | None = None
        """The version whose bytes this rank holds, verified and committed; ``None`` before the first and during an update."""
        self._abort_numbers = itertools.count(1)
        self._update = self._aborts = 0
        self._current, self._in_turn = Ticket("nothing", 0, 0, 0), False
        self._yielding: Ticket | None = None  # the last call that arrived, if it yields
        self._due: Ticket | None = None  # a quarantine that has arrived, waits for its turn, or has given up waiting
        # Held while an abort is noted or the state changes, so that `served_version` stays true after an abort.
        self._changing = threading.Condition(threading.Lock())
        self.latest: Version | None = None
        """The last version that it took, also if it serves none since."""
        self.refuted: tuple[Version, str] | None = None
        """The version that this rank served until it found other bytes in its parameters, and what it found."""
        self.closed = False
        """Whether :meth:`close` was called."""

    # Any thread, at any time.

    @property
    def served_version(self) -> Version | None:
        """The version that this rank generates with right now; ``None`` while it is paused, or soon is by a quarantine."""
        return self.serving if self.state == "serving" and not self._concerns(self._due) else None

    @property
    def occupation(self) -> str:
        """What this rank is doing now, for people: the adapter's method that it is inside of, and for how long."""
        return self._calls.running or f"{self.member} is busy with {self._current.what}"

    @property
    def yields(self) -> bool:
        """Whether the current call yields to others: it reads nothing but parameters."""
        return self._current.yields

    def receive(self, what: str, update: int = 0, *, aborts: bool = False, reason: str = "", yields: bool = False) -> Ticket:
        """Take note of a call when it arrives, before it waits for its turn. Never blocks.

        A call that ``aborts``, a quarantine, ends those that arrived before, unless it belongs to another ``update`` than they. The
        adapter gets its ``reason``. One that ``yields`` is ended by each call that arrives after it.
        """
        if ends := aborts and update == self._update:
            self.abort(reason)
        ticket = Ticket(what, next(_numbers), self._aborts, update, yields=yields)
        earlier, self._yielding = self._yielding, ticket if yields else None
        if earlier is not None:
            self.withdraw(earlier)
        if ends:
            self._due = ticket  # from here on no version is served: a coordinator may ask before the quarantine has its turn
        return ticket

    def abort(self, reason: str = "") -> None:
        """End every call that has arrived, soon. Never blocks; an engine that is paused stays paused."""
        with self._changing:
            self._aborts = next(self._abort_numbers)
        self._on_abort()
        self._calls.aborted(reason)

    def call_ended(self, call: int, reason: str, refuse: bool) -> None:
        """See :meth:`EngineAdapter.call_ended`."""
        for adapter in self._adapters:
            adapter.call_ended(call, reason, refuse)

    def withdraw(self, call: Ticket) -> None:
        """End ``call``, soon, and no other: its caller has given up. Never blocks.

        The adapter is notified by the quarantine that follows, because that has the reason.
        """
        with self._changing:
            call.withdrawn = True
            if self._in_turn and self._current is call:
                self._on_abort()

    def check(self, call: Ticket, *states: State) -> None:
        """Raise unless ``call`` may go on and the rank is in one of ``states``.

        Raises :class:`~weightsync.errors.Aborted`, also once the session is closed, and
        :class:`~weightsync.errors.ProtocolError` for another state, or if another update was begun meanwhile.
        """
        if self.closed:
            raise Aborted(f"{self.member} was closed")
        if self._aborts != call.aborts or call.withdrawn:
            raise Aborted("the update was aborted for this engine rank")
        if states and self.state not in states:
            raise ProtocolError(f"{call.what} needs an engine rank that is {' or '.join(states)}; {self.member} is {self.state}")
        if states and self._update != call.update:
            raise ProtocolError(f"this {call.what} belongs to an update that ended; another one has begun since")

    @contextmanager
    def turn(self, call: Ticket, deadline: Deadline) -> Iterator[None]:
        """The engine is ``call``'s meanwhile: neither another call nor another front uses it.

        Raises :class:`~weightsync.errors.DeadlineExceeded` if the turn does not come in time.
        """
        timeout = 0.0 if call.yields else deadline.left
        if not self._calls.turn.acquire(timeout=timeout):
            never = "; it is never resumed from here" if call is self._due else ""
            raise DeadlineExceeded(f"{self.occupation}, so {call.what} did not get its turn in {timeout:.3g} s{never}")
        try:
            self._current, self._in_turn = call, True
            yield
        finally:
            with self._changing:
                self._in_turn = False  # from here on a withdrawal of the call ends nothing
            try:
                if self._due is not None:
                    self._quarantine(self._due, deadline)
            finally:
                self._calls.end_turn()

    def quarantine(self, call: Ticket, deadline: Deadline) -> None:
        """Pause the engine and drop its version. Takes a turn.

        Does nothing if an update that was begun after ``call``, by this or another session, has paused the engine, or if this
        session is closed.
        """
        self._due = call
        with self.turn(call, deadline):
            pass  # its end carries out what is due

    def close(self, timeout: float, last: Callable[[], None]) -> None:
        """Abort what runs, refuse every later call, and call ``last`` in a turn: within ``timeout`` seconds, or at its end.

        If none comes in time, another front may drive the engine on, so this session leaves service.
        """
        self.abort()
        with self._changing:
            self.closed = True
            self._changing.notify_all()
        if not self._calls.when_free(last, timeout):
            self._invalidate()

    def wait_for_version(self, version: int | Version, deadline: Deadline) -> Version:
        """Wait until this rank serves ``version`` (a number, or a version with its epoch) or a later one, and return that.

        Raises :class:`~weightsync.errors.DeadlineExceeded`, and :class:`~weightsync.errors.Aborted` once the session is closed.
        """
        with self._changing:
            while (served := self.served_version) is None or not _reaches(served, version):
                if self.closed:
                    raise Aborted(f"{self.member} was closed during a wait for version {version}")
                self._changing.wait(deadline.remaining(f"waiting for {self.member} to serve version {version}"))
            return served

    # Within a turn.

    def check_abort(self) -> None:
        """Raise :class:`~weightsync.errors.Aborted` if the current call was aborted."""
        self.check(self._current)

    def require(self, *states: State) -> None:
        """Raise as :meth:`check` does, for the current call."""
        self.check(self._current, *states)

    def _become(self, state: State) -> None:
        """Enter ``state``, unless the current call was aborted: then raise, and change nothing."""
        with self._changing:
            self.check_abort()
            if self.state == "serving" != state:
                self._on_leaving()
            self.state = state
            self._changing.notify_all()

    def _taken(self) -> None:
        """End this session's update, because another session pauses or writes the engine. Runs in the other session's turn."""
        self._invalidate()
        self._update = 0

    def _invalidate(self) -> None:
        """Serve no version; without a pause this rank is not written."""
        with self._changing:
            self._on_leaving()
            self.state, self.serving, self.refuted = "quarantined", None, None

    def refute(self, why: str) -> None:
        """Report no version any more, because parameters are not what was installed. The engine generates until it is paused."""
        with self._changing:
            self._on_leaving()
            if self.serving is not None:
                self.refuted, self.serving = (self.serving, why), None
            self._changing.notify_all()

    @contextmanager
    def leaving_service(self) -> Iterator[None]:
        """Serve no version from here on: a client that connects meanwhile must not rely on this rank. Comes before :meth:`pause`.

        If the block raises, nothing was changed and the rank serves again; but not after an abort, because a client
        may have been told that it serves nothing.
        """
        served = self.state == "serving"
        self._become("pausing")
        try:
            yield
        except BaseException:
            if served:
                with suppress(Aborted):
                    self._become("serving")
            raise

    def pause(self, mode: PauseMode, timeout: float, order: tuple[int, int] | None = None) -> None:
        """Pause the engine for the current call's update, to the version of this epoch and number."""
        for adapter in self._adapters:
            adapter.announced(order)
        if self.state != "pausing":
            self._become("pausing")
        if self._owner_pauses:
            self.check_abort()  # an abort before the announcement does not end the wait for a call
        self._update = self._current.update  # even if pausing fails
        self._calls.pause(mode, timeout)
        self._calls.driven.paused_by = self._current.number
        self.state = "paused"
        self.check_abort()

    def _begin_writing(self, *states: State) -> None:
        """Enter ``writing`` from one of ``states``, with a paused engine."""
        self.require(*states)
        if not self._calls.paused:
            raise ProtocolError(f"{self._current.what} needs a paused engine; {self.member} is not paused")
        self._become("writing")

    @contextmanager
    def writing(self, then: State = "written") -> Iterator[None]:
        """Bytes of the parameters may change in the block, and have no name until a commit. Afterwards the rank is ``then``.

        If the block raises, what was written is not known: the rank is quarantined.
        """
        self._begin_writing("paused", "written")
        self.serving = self.refuted = None
        with OnFailure(self._invalidate):
            yield
            self._become(then)

    @contextmanager
    def reverting(self, base: Version) -> Iterator[None]:
        """Put the bytes of ``base`` back in the block. Afterwards the rank is as after a commit of it, and may resume.

        ``base`` is what the rank served before this update, of which only words were replaced that the block puts back.
        """
        self._begin_writing("paused", "written", "quarantined")
        with OnFailure(self._invalidate):
            yield
            self._calls.finish(base)  # the adapter may have begun an update: what it derives, and its label, are the base's again
            self._become("committed")
        self.serving = base

    def end_writing(self) -> None:
        """Take no more buckets: everything is written. For an update whose buckets are written one by one."""
        self.require("paused", "written")
        self._become("written")

    def begin(self) -> None:
        """Begin to write: let the adapter drop an earlier update, and wake the weights of an engine that sleeps."""
        self._calls.begin()
        self._calls.wake_weights()

    def keep(self, names: Sequence[str]) -> None:
        """Tell the adapter which tensors do not come, see :meth:`EngineAdapter.keep`. Comes after :meth:`begin`."""
        shares = [names] if self._draft_prefix is None else _split(names, self._draft_prefix, str)
        for index, share in enumerate(shares):
            self._calls.keep(index, share)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hand one bucket to the engine's loader. Raises :class:`~weightsync.errors.LoadError` unless it takes all tensors."""
        self.check_abort()
        shares = [tensors] if self._draft_prefix is None else _split(tensors, self._draft_prefix, itemgetter(0))
        for index, share in enumerate(shares):
            if share:
                load_all(partial(self._calls.load, index), self._adapters[index].name, share)

    def shards(self, phase: str = "") -> Sequence[Shard] | None:
        """Where the parameters are now; ``None`` if the engine can only be streamed to. ``phase`` names the call in traces."""
        return self._calls.shards(phase)

    def hold_parameters(self, seconds: float) -> None:
        """Let the engine exchange no parameters with other ranks, see :meth:`EngineAdapter.hold_parameters`."""
        self._calls.hold_parameters(seconds)

    def device(self) -> torch.device | None:
        """Where the engine's loader wants its buckets."""
        return self._adapters[0].device()

    @property
    def _rewritten(self) -> bool:
        """Whether the engine changes parameters after they were written."""
        return any(adapter.loads_late or adapter.repacks for adapter in self._adapters)

    def can_read_back(self) -> bool:
        """Whether parameters can be digested after a write. Tables for a device are made now, not in a round."""
        if self._rewritten or not self._read_back.look(self._calls.shards()):
            return False
        self._read_back.build()
        return True

    def read_back(self, deadline: Deadline, constants: DigestConstants = PUBLIC) -> tuple[Int32, UInt64] | None:
        """Digest the parameters themselves where they are whole, plain copies: "installed". Else ``None``: "received" must do.

        Returns the tensors' indices in the manifest and their digests.
        """
        if self._rewritten:
            return None
        return self._read_back.digests(self._calls.shards(), deadline, constants)

    def finish(self, version: Version) -> None:
        """Let the engine rebuild what it derives from its weights: all bytes of ``version`` are in place and verified."""
        self.require("written")
        self.latest = version
        with OnFailure(self._invalidate):  # it may have rebuilt a part, and nothing is rebuilt twice
            self._calls.finish(version)

    def commit(self, version: Version) -> None:
        """Drop caches made with the old weights, and name the bytes. Comes after :meth:`finish`."""
        self.require("written")
        with OnFailure(self._invalidate):
            self._calls.wake_cache()
            if (stale := self._calls.flush()) is not None:
                raise LoadError(f"the {stale} engine refused to drop caches made with the old weights")
            self._become("committed")
        self.serving, self.refuted = version, None

    @contextmanager
    def resuming(self, deadline: Deadline) -> Iterator[None]:
        """Generate again before the block, and serve the version after it; or, after an abort meanwhile, pause again and raise."""
        self.require("committed")
        with OnFailure(self._invalidate):  # it may generate: only a pause leads on
            self._calls.resume()
        try:
            yield
            self._become("serving")
        except BaseException as error:
            self._invalidate()
            self._pause_late(deadline)
            if isinstance(error, Aborted):
                raise Aborted(f"the update was aborted while {self.member} resumed; it is paused again") from None
            raise

    def _concerns(self, due: Ticket | None) -> bool:
        """Whether a quarantine is due, and no update that was begun after it has paused the engine: that one is not spoiled."""
        return due is not None and due.update == self._update and self._calls.driven.paused_by <= due.number

    def _quarantine(self, call: Ticket, deadline: Deadline) -> None:
        if self.closed or not self._concerns(call):
            self._due = None
            return
        self._invalidate()  # whatever pausing does
        self._due = None  # not before: until then it is why no version is reported
        self._pause_late(deadline)

    def _pause_late(self, deadline: Deadline) -> None:
        """Pause what must not generate, also when the time for it is over. An engine's owner learns it by ``aborted``."""
        if not self._owner_pauses:
            self._calls.pause("abort", max(deadline.left, _PAUSE_SECONDS))


def _reaches(served: Version, version: int | Version) -> bool:
    return served.order >= version.order if isinstance(version, Version) else served.number >= version


def _split(items: Sequence[T], prefix: str, name: Callable[[T], str]) -> list[Sequence[T]]:
    """What is the model's, and what is the draft model's."""
    return [[item for item in items if name(item).startswith(prefix) is draft] for draft in (False, True)]


def load_all(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], None], name: str, tensors: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Hand ``tensors`` to ``load``, the loader of the adapter ``name``.

    Raises :class:`~weightsync.errors.LoadError` if the loader raises, or leaves tensors of its iterator untaken.
    """
    left = iter(tensors)
    with as_load_error(f"the {name} loader raised on a bucket of {len(tensors)} tensors ({few((n for n, _ in tensors), 3)})"):
        load(left)
    if missed := sum(1 for _ in left):
        raise LoadError(f"the {name} loader took {len(tensors) - missed} of the {len(tensors)} tensors of a bucket")
