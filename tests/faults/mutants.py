"""Bugs that the campaign must notice, put back one at a time in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from weightsync.engine import session
from weightsync.engine.session import EngineSession, State, Ticket
from weightsync.errors import ProtocolError
from weightsync.transports.broadcast.process_groups import ProcessGroup

__all__ = ["UPDATE_MUTANTS", "planted"]

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]


def _check_state_alone(self: EngineSession, call: Ticket, *states: State) -> None:
    """Any update will do, and what was verified takes more buckets."""
    if states and ("paused" if self.state == "written" else self.state) not in {
        "paused" if one == "written" else one for one in states
    }:
        raise ProtocolError(f"this engine rank is {self.state}")


def _load_and_believe(load: Load, name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    load(iter(tensors))


_close = ProcessGroup.close


def _close_what_is_idle(self: ProcessGroup) -> None:
    """A group that carries a bucket stays open, and the bucket is taken."""
    if not self._lock.locked():
        _close(self)


UPDATE_MUTANTS: dict[str, tuple[object, str, object]] = {
    "a bucket's update is not compared": (EngineSession, "check", _check_state_alone),
    "what a loader took is not looked at": (session, "load_all", _load_and_believe),
    "a closed group's bucket is taken": (ProcessGroup, "close", _close_what_is_idle),
}
"""Of updates from outside."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant one; ``None``: nothing."""
    if name is None:
        yield
        return
    owner, attribute, bug = UPDATE_MUTANTS[name]
    with patch.object(owner, attribute, bug):
        yield
