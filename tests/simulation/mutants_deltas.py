"""Bugs planted in rounds that move only what changed.

That a rank compares neither the base nor its own parameters is no mutant, and neither are lists that leave out what changed in one
of several versions. The digests of what it predicts are compared with the new version's, so it gets all bytes, and nothing wrong
comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.simulation.installation import replaced

from weightsync.engine.fill.staged_changes import StagedChanges

__all__ = ["DELTA_MUTANTS"]


def _undo_left_out() -> AbstractContextManager[None]:
    return replaced((StagedChanges, "revert", lambda staged, deadline: None))


DELTA_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {"words that were replaced are not put back": _undo_left_out}
"""Name to what plants it for as long as a ``with`` block runs."""
