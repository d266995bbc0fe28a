"""Concurrent calls to several actors, one for each rank, for code with or without an event loop, with errors of this package."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from weightsync.closing import OnFailure
from weightsync.daemon_threads import in_daemon_thread
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, PeerLost, WeightSyncError


@dataclass(frozen=True)
class Access:
    """URL and token of the coordinator."""

    url: str
    token: str | None = field(repr=False)


@dataclass(frozen=True)
class RankPlace:
    """Rank of an actor, in the trainer (``replica`` is ``None``) or in a replica."""

    replica: str | None
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{'the trainer' if self.replica is None else f'replica {self.replica!r}'}, rank {self.rank}"


def handles(workers: object) -> tuple[Any, ...]:
    """Return the actors of a worker group in rank order.

    Args:
        workers: A sequence of handles, one handle, or an object with an attribute ``workers`` that is a sequence of handles.

    Raises:
        ConfigurationError: It is none of these.
    """
    if isinstance(workers, ray.actor.ActorHandle):
        return (workers,)
    members = getattr(workers, "workers", workers)
    actors = tuple(members) if isinstance(members, Sequence) else ()
    if not actors or not all(isinstance(actor, ray.actor.ActorHandle) for actor in actors):
        raise ConfigurationError(
            f"{type(workers).__name__} is not a worker group: pass the handles of its actors in rank order, or an object that "
            "has them as `workers`"
        )
    return actors


def call(actor: Any, function: Callable[..., object], *arguments: object, retries: int = 0) -> Any:  # noqa: ANN401 - Ray's types
    """Run ``function(worker, *arguments)`` in an actor of any class.

    Args:
        actor: The actor's handle.
        function: Runs in the actor, with the actor's object.
        arguments: Further arguments.
        retries: How often Ray repeats the call if the actor was restarted.

    Returns:
        Ray's reference to the result.
    """
    return actor.__ray_call__.options(max_task_retries=retries).remote(function, *arguments)


_OTHERS = 0.5
"""Seconds that other calls may still answer after one failed, because their errors may be closer to the cause."""
_UNDER_WAY = 2.0
"""Seconds after which a call has certainly reached its actor. If one is cancelled earlier, the actor may wait half a minute for it
and then drop the calls after it (Ray 2.60: "timed out waiting for seq_no")."""


class ActorCalls:
    """Running calls, one for each place. Call either :meth:`wait` or ``await`` :meth:`join`, once."""

    def __init__(self, what: str, calls: Sequence[tuple[RankPlace | str, Any]]) -> None:
        self._what, self._since = what, time.monotonic()
        self._calls = [(place, ref, ref.future()) for place, ref in calls]

    def wait(self, timeout: float) -> list[Any]:
        """Wait for all results and return them in order.

        Calls that have not started are withdrawn if this raises.

        Raises:
            PeerLost: An actor died. This error takes precedence over what other ranks raised.
            DeadlineExceeded: ``timeout`` seconds passed.
            Exception: The error of the first rank that failed.
        """
        with OnFailure(self._withdraw):
            futures = [future for _, _, future in self._calls]
            if concurrent.futures.wait(futures, timeout, concurrent.futures.FIRST_EXCEPTION).not_done:
                concurrent.futures.wait(futures, _OTHERS)
            return self._results(timeout)

    async def join(self, timeout: float) -> list[Any]:
        """Do the same on an event loop. Cancellation withdraws calls that have not started; started calls run on."""
        with OnFailure(self._withdraw):
            return await asyncio.wrap_future(in_daemon_thread(lambda: self.wait(timeout), "weightsync-actors"))

    def _results(self, timeout: float) -> list[Any]:
        errors = [
            as_own_error(place, error)
            for place, _, future in self._calls
            if future.done() and (error := future.exception(0)) is not None
        ]
        if errors:
            raise next((error for error in errors if isinstance(error, _ActorLost)), errors[0])
        late = [str(place) for place, _, future in self._calls if not future.done()]
        if late:
            raise DeadlineExceeded(
                f"{self._what} did not finish within {timeout:g} s; no answer from {'; '.join(late)}. The actor may be busy with "
                "another call, because its calls run one after the other"
            )
        return [future.result(0) for _, _, future in self._calls]

    def _withdraw(self) -> None:
        if time.monotonic() - self._since < _UNDER_WAY:
            return
        for _, ref, future in self._calls:
            if not future.done() and ray.is_initialized():
                ray.cancel(ref)


class _ActorLost(PeerLost):
    """The death of an actor itself, not another rank's report of it."""


def as_own_error(place: RankPlace | str, error: BaseException) -> BaseException:
    """Convert Ray's errors to errors of this package. Errors of the user's code are returned unchanged."""
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
