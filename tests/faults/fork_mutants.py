"""Bugs of forked children, to be put back one at a time: the cases of :mod:`tests.faults.forked` must find each of them.

Each puts its bug into this process, for what is made within its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from weightsync import forks

__all__ = ["MUTANTS", "replaced"]


@contextmanager
def replaced(*replacements: tuple[Any, str, object]) -> Iterator[None]:
    """Set attributes (object, name, value) in the block."""
    before = [(where, name, where.__dict__[name]) for where, name, _ in replacements]
    for where, name, value in replacements:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def _nothing(*_: object) -> None:
    pass


def _closed_by_a_child() -> AbstractContextManager[None]:
    return replaced((forks.Origin, "elsewhere", False), (forks, "give_up_memory", _nothing))


def _connection_kept() -> AbstractContextManager[None]:
    return replaced((forks._Selector, "_after_fork", _nothing))


def _memory_kept() -> AbstractContextManager[None]:
    return replaced((forks, "give_up_memory", _nothing), (forks, "silence_file", _nothing))


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a forked child's close empties the region": _closed_by_a_child,
    "a forked child keeps the control connection": _connection_kept,
    "a forked child keeps the shared memory": _memory_kept,
}
