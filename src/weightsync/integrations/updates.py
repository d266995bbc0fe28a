"""Updates by a framework's trainer ranks: whether all replicas took the version, and walks that another rank holds up."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice
from traceback import walk_stack
from typing import Any, TypeVar

import torch

from weightsync.daemon_threads import in_daemon_thread
from weightsync.errors import DeadlineExceeded, RoundFailed, few
from weightsync.protocol.messages import RoundResult

GRACE = 5.0
"""Seconds that a wait may exceed the update's own timeout, so that a more specific error can arrive first."""
T = TypeVar("T")


def calling(fits: Callable[[Any], bool], most: int | None = None) -> Any:  # noqa: ANN401 - a framework's
    """Return the nearest object with a method that is calling and that ``fits``, up to ``most`` frames up; ``None`` without one.

    For what frameworks call without a reference to the caller.
    """
    frames = islice(walk_stack(inspect.currentframe()), most)
    return next((own for frame, _ in frames if fits(own := frame.f_locals.get("self"))), None)


def check_reached(result: RoundResult, replicas: str, wanted: int | Sequence[str]) -> None:
    """Check that so many replicas, or those of the names ``wanted``, have the version, whatever the coordinator requires.

    Raises:
        RoundFailed: Some have not. The message has their errors.
    """
    if isinstance(wanted, int):
        count, reached = wanted, len(result.updated)
        failures = [f"{replica.name}: {replica.error}" for replica in result.missed]
    else:
        errors = {replica.name: replica.error for replica in result.replicas}
        failures = [f"{name}: {errors.get(name, 'it has left')}" for name in wanted if errors.get(name, "") is not None]
        count, reached = len(wanted), len(wanted) - len(failures)
    if reached < count:
        reasons = few(failures, joint="; ") or "the others have left"
        raise RoundFailed(f"version {result.version} reached {reached} of {count} {replicas} ({reasons})")


def walk_on(weights: Iterable[object]) -> None:
    """Walk ``weights`` to their end, because the other ranks gather to the end."""
    deque(weights, maxlen=0)


def overdue_walk(walk: Future[T], rank: str, seconds: float) -> T:
    """Return the result of a ``walk`` of weights (:func:`in_thread`) for which a wait timed out, if it has ended after all.

    Raises:
        DeadlineExceeded: It goes on, for example because another rank never takes part: it is a collective.
        Exception: The walk raised it.
    """
    if walk.done():  # with its own timeout, or in this very moment
        return walk.result()
    raise DeadlineExceeded(
        f"{rank} did not walk its weights within {seconds:g} s. Their walk is a collective: another rank does not take part in it, "
        "or the model's own gather hangs"
    )


def in_thread(work: Callable[[], T], name: str = "weightsync-walk") -> Future[T]:
    """Run ``work`` in a daemon thread, on this thread's device and without gradients. The process can end while it hangs."""
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> T:
        if device is not None:
            torch.accelerator.set_device_index(device)
        with torch.no_grad():
            return work()

    return in_daemon_thread(run, name)
