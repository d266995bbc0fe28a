"""The ring of staging buckets where readers block: a thread receives the next bucket while the engine's loader works."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from weightsync.deadline import Deadline

_GRACE = 5.0  # seconds for the receiver thread to end after an abort, which a read notices every few hundred KiB
_IDLE: Future[Any] = Future()
_IDLE.set_result(None)


class ReceiverThread:
    """Receives one bucket or window at a time while the caller loads another. ``abort`` makes a receive that runs raise soon."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightsync-receive")
        self._receiving = _IDLE
        self.seconds = 0.0
        """Seconds spent receiving."""

    def start(self, receive: Callable[..., Any], *arguments: object) -> None:
        """Call ``receive``, in the caller's context: in it spans are recorded."""
        self._receiving = self._thread.submit(contextvars.copy_context().run, self._receive, receive, *arguments)

    def _receive(self, receive: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - what ``receive`` returns
        started = time.perf_counter()
        received = receive(*arguments)
        self.seconds += time.perf_counter() - started
        return received

    def result(self, what: str, deadline: Deadline) -> Any:  # noqa: ANN401 - what ``receive`` returns
        """Wait for what :meth:`start` began, and return its result."""
        return self._receiving.result(deadline.remaining(what))

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """After an error in the block, end what is received, unless it does not end in five seconds: see :meth:`when_idle`."""
        try:
            yield
        except BaseException:
            self._abort()
            if not self._receiving.cancel():
                with suppress(Exception):  # the error that ended the block is the one to report
                    self._receiving.result(_GRACE)
            raise

    def when_idle(self, act: Callable[[], None]) -> None:
        """End the thread, and what it receives, and call ``act`` after that: now, if it receives nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._receiving.done():
            self._receiving = _IDLE  # its error refers to itself through this object, and so keeps what a reader read
            act()
        else:
            self._abort()
            self._receiving.add_done_callback(lambda _: self.when_idle(act))


class ReceiveAhead:
    """Hands bucket ``k`` to ``load`` while a thread fills bucket ``k + 1`` by ``receive``. With one buffer they alternate.

    ``load`` returns when its bucket may be filled again. ``abort`` makes a ``receive`` in another thread raise soon. Used by one
    thread at a time.
    """

    def __init__(
        self,
        buckets: int,
        buffers: int,
        receive: Callable[[int, Deadline], None],
        load: Callable[[int, Deadline], None],
        abort: Callable[[], None],
    ) -> None:
        self._buckets, self._ahead = buckets, buffers > 1
        self._receive, self._load = receive, load
        self._thread = ReceiverThread(abort)
        self.when_idle = self._thread.when_idle

    def run(self, done: Callable[[int], None], deadline: Deadline) -> tuple[float, float]:
        """Fill and load every bucket; ``done(bucket)`` is called after each.

        Returns the seconds spent receiving and loading, which overlap.
        """
        thread, load_seconds = self._thread, 0.0
        thread.seconds = 0.0
        with thread.stopping():
            for bucket in range(self._buckets):
                if not (bucket and self._ahead):
                    thread.start(self._receive, bucket, deadline)
                thread.result("receiving a bucket", deadline)
                if self._ahead and bucket + 1 < self._buckets:
                    thread.start(self._receive, bucket + 1, deadline)
                started = time.perf_counter()
                self._load(bucket, deadline)
                load_seconds += time.perf_counter() - started
                done(bucket)
        return thread.seconds, load_seconds
