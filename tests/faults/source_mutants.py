"""Bugs of reading from replicas, to be put back one at a time: the cases of :mod:`tests.faults.sources` must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.faults.fork_mutants import replaced

from weightsync.coordinator import round as protocol
from weightsync.coordinator.replicas import Replica
from weightsync.engine.engine_role import EngineRole
from weightsync.planning.coverage import Coverage

__all__ = ["SOURCE_MUTANTS"]


def _not_compared() -> AbstractContextManager[None]:
    return replaced((Coverage, "check", lambda *_: None), (EngineRole, "_holds", lambda *_: True))


def _no_half() -> AbstractContextManager[None]:
    return replaced((protocol, "_half", lambda deadline: deadline))


def _never_blamed() -> AbstractContextManager[None]:
    readable = property(lambda replica: replica.routable and all(link.rank.source for link in replica.links.values()))
    return replaced((Replica, "readable", readable))


SOURCE_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "what was read from a replica is not compared": _not_compared,
    "a source that hangs gets the whole round": _no_half,
    "a source that lied is offered again": _never_blamed,
}
