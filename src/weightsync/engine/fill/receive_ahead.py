"""The ring of staging buckets where readers block: a thread receives the next bucket while the engine's loader works."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from weightsync.deadline import Deadline

__all__ = ["ReceiveAhead"]

_GRACE = 5.0  # seconds for the receiver thread to end after an abort, which a read notices every few hundred KiB


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
        self._receive, self._load, self._abort = receive, load, abort
        self._receiving: Future[None] | None = None
        self._receive_seconds = 0.0

    def run(self, done: Callable[[int], None], deadline: Deadline) -> tuple[float, float]:
        """Fill and load every bucket; ``done(bucket)`` is called after each.

        Returns the seconds spent receiving and loading, which overlap. After an error the receiver thread has ended, unless it did
        not do so in five seconds: see :meth:`when_idle`.
        """
        count, load_seconds, self._receive_seconds = self._buckets, 0.0, 0.0
        context = contextvars.copy_context()  # in which spans are recorded
        receiver = ThreadPoolExecutor(1, thread_name_prefix="weightsync-receive")
        self._receiving = receiver.submit(context.run, self._fetch, 0, deadline) if count else None
        try:
            for bucket in range(count):
                if self._receiving is not None:
                    self._receiving.result(deadline.remaining("receiving a bucket"))
                more = bucket + 1 < count
                self._receiving = receiver.submit(context.run, self._fetch, bucket + 1, deadline) if self._ahead and more else None
                started = time.perf_counter()
                self._load(bucket, deadline)
                load_seconds += time.perf_counter() - started
                if more and not self._ahead:
                    self._receiving = receiver.submit(context.run, self._fetch, bucket + 1, deadline)
                done(bucket)
        except BaseException:
            self._abort()
            self._stop()
            raise
        finally:
            receiver.shutdown(wait=False, cancel_futures=True)
        return self._receive_seconds, load_seconds

    def _fetch(self, bucket: int, deadline: Deadline) -> None:
        started = time.perf_counter()
        self._receive(bucket, deadline)
        self._receive_seconds += time.perf_counter() - started

    def _stop(self) -> None:
        if self._receiving is not None and not self._receiving.cancel():
            wait([self._receiving], _GRACE)

    def when_idle(self, act: Callable[[], None]) -> None:
        """Call ``act`` now, or when the receiver thread exits if it is still running."""
        if self._receiving is None or self._receiving.done():
            self._receiving = None  # its error refers to itself through this object, and so keeps what a reader read
            act()
        else:
            self._receiving.add_done_callback(lambda _: self.when_idle(act))
