"""Calls to several actors at a time, one a rank: waited for with or without an event loop, and their errors in our words."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, PeerLost, WeightSyncError
from weightsync.ray.places import Place

__all__ = ["Calls", "call", "handles", "in_our_words"]


def handles(workers: object) -> tuple[Any, ...]:
    """The actors of a worker group in the order of their ranks: handles, one handle, or an object that has them as ``workers``."""
    if isinstance(workers, ray.actor.ActorHandle):
        return (workers,)
    found = getattr(workers, "workers", workers)
    actors = tuple(found) if isinstance(found, Sequence) else ()
    if not actors or not all(isinstance(one, ray.actor.ActorHandle) for one in actors):
        raise ConfigurationError(
            f"{type(workers).__name__} is no worker group: give the handles of its actors in the order of their ranks, or an "
            "object that has them as `workers`"
        )
    return actors


def call(actor: Any, function: Callable[..., object], *arguments: object, retries: int = 0) -> Any:  # noqa: ANN401 - Ray's types
    """Run ``function(worker, *arguments)`` in an actor, whatever its class; ``retries`` times again if the actor was restarted.

    Returns Ray's reference to the result.
    """
    return actor.__ray_call__.options(max_task_retries=retries).remote(function, *arguments)


_OTHERS = 0.5
"""Seconds that others may still answer after one failed: what they say may be nearer to the cause."""
_UNDER_WAY = 2.0
"""Seconds after which a call has surely reached its actor. Where one is cancelled before, the actor may wait half a minute for it,
and then drops whatever was asked after it (Ray 2.60: "timed out waiting for seq_no")."""


class Calls:
    """Calls under way, one a place. Either :meth:`wait` or ``await`` :meth:`join`, once."""

    def __init__(self, what: str, asked: Sequence[tuple[Place, Any]]) -> None:
        self._what, self._since = what, time.monotonic()
        self._asked = [(place, ref, ref.future()) for place, ref in asked]

    def wait(self, timeout: float) -> list[Any]:
        """All results, in order, within ``timeout`` seconds.

        Raises soon after the first of them failed, and then the error that is nearest to the cause: that an actor died, else what
        the first rank raised; or :class:`~weightsync.errors.DeadlineExceeded`. Calls that have not begun are withdrawn then.
        """
        try:
            futures = [future for _, _, future in self._asked]
            if concurrent.futures.wait(futures, timeout, concurrent.futures.FIRST_EXCEPTION).not_done:
                concurrent.futures.wait(futures, _OTHERS)
            return self._results(timeout)
        except BaseException:
            self._withdraw()
            raise

    async def join(self, timeout: float) -> list[Any]:
        """The same for an event loop. Cancelling it withdraws what has not begun after some seconds; before, it goes on unheard."""
        try:
            futures = [asyncio.wrap_future(future) for _, _, future in self._asked]
            for one in futures:  # looked at, whenever it comes, so that asyncio does not complain
                one.add_done_callback(lambda done: done.cancelled() or done.exception())
            _, others = await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            if others:
                await asyncio.wait(others, timeout=_OTHERS)
            return self._results(timeout)
        except BaseException:
            self._withdraw()
            raise

    def _results(self, timeout: float) -> list[Any]:
        errors = [
            in_our_words(place, error)
            for place, _, future in self._asked
            if future.done() and (error := future.exception(0)) is not None
        ]
        if errors:
            raise next((error for error in errors if isinstance(error, _ActorLost)), errors[0])
        late = [str(place) for place, _, future in self._asked if not future.done()]
        if late:
            raise DeadlineExceeded(
                f"{self._what} did not finish within {timeout:g} s; no answer from {'; '.join(late)}. Is the actor busy with "
                "another call? Its calls run one after the other"
            )
        return [future.result(0) for _, _, future in self._asked]

    def _withdraw(self) -> None:
        if time.monotonic() - self._since < _UNDER_WAY:
            return
        for _, ref, future in self._asked:
            if not future.done() and ray.is_initialized():
                ray.cancel(ref)


class _ActorLost(PeerLost):
    """An actor's own death, and not another rank's report of it."""


def in_our_words(place: Place, error: BaseException) -> BaseException:
    """What an actor raised, or an error of this package for its death; errors of a user's own code stay as Ray gives them."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, WeightSyncError) else error
    if isinstance(error, RayActorError):
        return _ActorLost(f"the actor of {place} is gone: {' '.join(str(error).split())[:400]}")
    if isinstance(error, TaskCancelledError | concurrent.futures.CancelledError):
        return Aborted(f"the call to {place} was cancelled")
    if isinstance(error, RayError):
        return PeerLost(f"Ray could not reach {place}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    return error
