"""Rollout controller for code without an event loop, on its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from weightsync import forks
from weightsync.closing import Closeable
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync_rollouts.controller import Counts, Rollout, RolloutController, Task

_START_SECONDS = 60.0
_CALL_SECONDS = 30.0
_GRACE = 5.0

T = TypeVar("T")
V = TypeVar("V")


class Rollouts(Closeable, Generic[T]):
    """Runs a controller on an event loop in a thread. Use it in a ``with``.

    Tasks are still coroutine functions. They run on that thread, so long computations belong in ``asyncio.to_thread``. The
    iterables of :meth:`feed` are also advanced on that thread.

    Args:
        make: Called on that thread. Returns the controller.

    ::

        with Rollouts(lambda: RolloutController(settings, VllmTokens(), urls, coordinator=where)) as rollouts:
            rollouts.feed(tasks)
            for step in range(100):
                train(rollouts.batch(timeout=600))
    """

    def __init__(self, make: Callable[[], RolloutController[T]]) -> None:
        self._origin = forks.Origin()
        self._loop = forks.event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightsync-rollouts", daemon=True)
        self._thread.start()
        self._controller: RolloutController[T] | None = None
        try:
            self._controller = self._wait(self._enter(make), _START_SECONDS)
        except BaseException:
            self._end()
            raise

    async def _enter(self, make: Callable[[], RolloutController[T]]) -> RolloutController[T]:
        return await make().__aenter__()

    @property
    def _mine(self) -> RolloutController[T]:
        if self._controller is None:
            raise Aborted("the rollout controller is closed")
        return self._controller

    def submit(self, task: Task[T]) -> None:
        """See :meth:`RolloutController.submit`."""
        self._call(self._mine.submit, task)

    def feed(self, tasks: Iterable[Task[T]]) -> None:
        """See :meth:`RolloutController.feed`."""
        self._call(self._mine.feed, tasks)

    def publish(self, version: int) -> None:
        """See :meth:`RolloutController.publish`."""
        self._call(self._mine.publish, version)

    def pause(self) -> None:
        """See :meth:`RolloutController.pause`."""
        self._call(self._mine.pause)

    def resume(self) -> None:
        """See :meth:`RolloutController.resume`."""
        self._call(self._mine.resume)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See :meth:`RolloutController.paused`."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def batch(self, timeout: float, version: int | None = None) -> list[Rollout[T]]:
        """See :meth:`RolloutController.batch`."""
        return self._wait(self._mine.batch(timeout, version), timeout + _GRACE)

    def counts(self) -> Counts:
        """See :meth:`RolloutController.counts`."""
        return self._call(self._mine.counts)

    def close(self) -> None:
        """Cancel all tasks and end the thread. Idempotent. Does nothing in a forked child."""
        if self._origin.elsewhere:
            return
        controller, self._controller = self._controller, None
        try:
            if controller is not None:
                self._wait(controller.aclose(), _CALL_SECONDS)
        finally:
            self._end()

    def _call(self, what: Callable[..., V], *arguments: object) -> V:
        async def call() -> V:
            return what(*arguments)

        return self._wait(call(), _CALL_SECONDS)

    def _wait(self, what: Coroutine[Any, Any, V], seconds: float) -> V:
        answer = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return answer.result(seconds)
        except FutureTimeout:
            if answer.done():  # the coroutine raised TimeoutError
                raise
            answer.cancel()
            raise DeadlineExceeded(f"the rollout controller did not answer within {seconds:g} s") from None

    def _end(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
