"""Threads of which one runs at a time, when the event loop says so, and whose every wait is an event of the loop's virtual time.

The agents and roles are synchronous code that blocks on locks, queues, events and the wire. Here each thread is a greenlet of
the loop's thread. One that would block switches back to the loop, which resumes it when what it waits for has come. So one seed
gives one order of events. A switch costs no more than a few function calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the simulation needs greenlet: pip install '.[test]' in a clone of weightsync", name="greenlet"
    ) from error

__all__ = ["Condition", "Event", "Executor", "Future", "Killed", "Lock", "SimpleQueue", "Thread", "Threads", "forget", "threads"]

T = TypeVar("T")


class Killed(BaseException):
    """The simulated process of this thread is dead."""


class Thread:
    """Looks like :class:`threading.Thread`. Belongs to the simulated process that started it (or to ``owner``)."""

    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = True, owner: Any = None) -> None:
        self.name, self._target = name, target
        self.process = owner if owner is not None else threads().process()
        self.alive = False
        self.killed = False
        self._greenlet: greenlet | None = None
        self._waiting = False
        self._turn = 0
        self._interruption: BaseException | None = None

    def start(self) -> None:
        """Run from the loop's next turn on."""
        self.alive = self._waiting = True
        world = threads()
        world.all.append(self)
        world.loop.call_soon(self.resume, self._turn)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.alive

    def join(self, timeout: float) -> None:
        """Wait for its end, if a simulated thread asks; the loop's thread cannot wait."""
        world = threads()
        if world.current is not None and self.alive:
            world.wait(self._ended_callbacks.append, timeout)

    @property
    def _ended_callbacks(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = self.__dict__.setdefault("_ended", [])
        return found

    def _body(self) -> None:
        world = threads()
        try:
            if not self.killed:
                self._target()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - a bug of the simulation or of what it runs: the schedule fails with it
            world.crashed.append(error)
        self.alive = False
        for ended in self._ended_callbacks:
            ended()

    def resume(self, turn: int) -> None:
        """Called by the loop: run until the thread waits or ends. A wake-up of a wait that is over does nothing."""
        if not self._waiting or turn != self._turn:
            return
        world = threads()
        stalled = 0.0 if self.killed or self.process is None else self.process.stalled_until
        if stalled > world.loop.time():
            world.loop.call_at(stalled, self.resume, turn)
            return
        self._waiting, self._turn = False, self._turn + 1
        if self._greenlet is None:
            self._greenlet = greenlet(self._body, world.greenlet)
        before, world.current = world.current, self
        asyncio._set_running_loop(None)  # as on a thread of its own
        try:
            self._greenlet.switch()
        finally:
            asyncio._set_running_loop(world.loop)
            world.current = before

    def park(self) -> None:
        """Called by the thread itself: hand over until :meth:`resume`.

        Raises :class:`Killed` if its process died meanwhile, and what :meth:`interrupt` was given.
        """
        if self.killed:
            raise Killed
        self._waiting = True
        threads().greenlet.switch()
        if self.killed:
            raise Killed
        if self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            raise interruption

    def interrupt(self, error: BaseException) -> None:
        """A signal handler raises ``error`` in this thread, where it waits."""
        if self._waiting and self._greenlet is not None:
            self._interruption = error
            threads().loop.call_soon(self.resume, self._turn)

    def kill(self) -> None:
        """Its process dies: it never returns into its own code; a thread that waits is unwound on the loop's next turn."""
        self.killed = True
        if self._waiting:
            threads().loop.call_soon(self.resume, self._turn)

    @property
    def turn(self) -> int:
        """Number of the wait that it is in or about to enter."""
        return self._turn


class Threads:
    """All simulated threads of one schedule."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Callable[[], Any]) -> None:
        global _threads
        self.loop = loop
        self.greenlet = getcurrent()
        """That of the loop."""
        self.current: Thread | None = None
        self.all: list[Thread] = []
        self.crashed: list[BaseException] = []
        self.on_wait: Callable[[Thread], None] | None = None
        """Called before a thread waits, for whatever. It may not wait itself."""
        self._process = process
        _threads = self

    def process(self) -> Any:
        """The simulated process whose code runs now."""
        return self.current.process if self.current is not None else self._process()

    def wait(self, register: Callable[[Callable[[], None]], None], timeout: float | None) -> None:
        """Block the current simulated thread until the callback given to ``register`` is called, or ``timeout`` seconds.

        Raises :class:`RuntimeError` on the loop's own thread, which must never block.
        """
        me = self.current
        if me is None:
            raise RuntimeError("the event loop's thread would block")
        if self.on_wait is not None:
            self.on_wait(me)
        turn = me.turn
        register(lambda: self._wake(me, turn))
        timer = None if timeout is None else self.loop.call_later(max(timeout, 0.0), me.resume, turn)
        try:
            me.park()
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self, thread: Thread, turn: int) -> None:
        self.loop.call_soon(thread.resume, turn)

    def sleep(self, seconds: float) -> None:
        """Virtual seconds pass for the current thread."""
        if self.current is not None:
            self.wait(lambda _: None, seconds)


_threads: Threads | None = None


def threads() -> Threads:
    """Those of the running schedule."""
    if _threads is None:
        raise RuntimeError("no schedule is running")
    return _threads


def forget() -> None:
    """The schedule is over. Until this is called, all that took part in it is still in use."""
    global _threads
    _threads = None


class _Waiters:
    def __init__(self) -> None:
        self._waiters: deque[Callable[[], None]] = deque()

    def _wait(self, timeout: float | None) -> None:
        threads().wait(self._waiters.append, timeout)

    def _notify(self) -> None:
        while self._waiters:
            self._waiters.popleft()()


class Lock(_Waiters):
    """Looks like :class:`threading.Lock`."""

    def __init__(self) -> None:
        super().__init__()
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, or ``False``. On the loop's own thread it never waits."""
        world = threads()
        until = None if timeout < 0 else world.loop.time() + timeout
        while self._held:
            left = None if until is None else until - world.loop.time()
            if not blocking or world.current is None or (left is not None and left <= 0):
                return False
            self._wait(left)
        self._held = True
        return True

    def release(self) -> None:
        """Let the next one take it."""
        self._held = False
        self._notify()

    def __enter__(self) -> Self:
        if not self.acquire():
            raise RuntimeError("the event loop's thread would block on a lock")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Event(_Waiters):
    """Looks like :class:`threading.Event`."""

    def __init__(self) -> None:
        super().__init__()
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Wake everybody."""
        self._set = True
        self._notify()

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set or ``timeout``; whether it is set."""
        world = threads()
        until = None if timeout is None else world.loop.time() + timeout
        while not self._set:
            left = None if until is None else until - world.loop.time()
            if left is not None and left <= 0:
                break
            self._wait(left)
        return self._set


class Condition(_Waiters):
    """Looks like :class:`threading.Condition` with a lock of its own."""

    def __init__(self, lock: Lock | None = None) -> None:
        super().__init__()
        self._lock = lock or Lock()

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until ``ready()`` or ``timeout``; what ``ready()`` says then."""
        world = threads()
        until = None if timeout is None else world.loop.time() + timeout
        while not (done := ready()):
            left = None if until is None else until - world.loop.time()
            if left is not None and left <= 0:
                break
            self._lock.release()
            try:
                self._wait(left)
            finally:
                self._lock.acquire()
        return done

    def notify_all(self) -> None:
        """Let all who wait look again."""
        self._notify()

    def __enter__(self) -> Self:
        self._lock.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


class SimpleQueue(_Waiters, Generic[T]):
    """Looks like :class:`queue.SimpleQueue`."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        """Never blocks."""
        self._items.append(item)
        self._notify()

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._items

    def get(self) -> T:
        """The oldest, when there is one."""
        while not self._items:
            self._wait(None)
        return self._items.popleft()


class _Unneeded:
    """In the place of a future's lock: only one thread runs, and none waits while it holds it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """Nobody waits for it."""


class Future(ConcurrentFuture[T]):
    """Looks like :class:`concurrent.futures.Future`; waiting for it is virtual."""

    def __init__(self) -> None:  # what the base's does, without a real condition
        self._condition: Any = _UNNEEDED
        self._state = "PENDING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def result(self, timeout: float | None = None) -> T:
        """See :meth:`concurrent.futures.Future.result`."""
        if not self.done() and threads().current is not None:
            threads().wait(lambda wake: self.add_done_callback(lambda _: wake()), timeout)
        if not self.done():
            raise TimeoutError
        return super().result(0)


_UNNEEDED = _Unneeded()


class Executor:
    """Looks like :class:`concurrent.futures.ThreadPoolExecutor`, with a thread for each call."""

    def __init__(self, workers: int = 1, thread_name_prefix: str = "") -> None:
        self._name = thread_name_prefix
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``work(*args)`` after those submitted before."""
        before, mine = self._last, Future[T]()

        def body() -> None:
            if not before.done():
                threads().wait(lambda wake: before.add_done_callback(lambda _: wake()), None)
            if not mine.set_running_or_notify_cancel():
                return
            try:
                mine.set_result(work(*args))
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 - the caller's to see
                mine.set_exception(error)

        self._last = mine
        Thread(body, self._name).start()
        return mine

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Wait for what runs, unless told not to."""
        if wait and not self._last.done():
            threads().wait(lambda wake: self._last.add_done_callback(lambda _: wake()), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
