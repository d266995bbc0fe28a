"""Named points of a round at which a test can hold a process, to kill or stop it exactly there.

In normal use :func:`reached` only reads one global. Only ``tests.faults`` installs a gate, in its own processes. No variable, flag
or message can install a gate in a serving process.
"""

from __future__ import annotations

from collections.abc import Callable

_gate: Callable[[str], None] | None = None


def install(gate: Callable[[str], None]) -> None:
    """Call ``gate`` with the name of every point that this process reaches from now on. It may block and must not raise."""
    global _gate
    _gate = gate


def reached(name: str) -> None:
    """Report that this process is at point ``name``."""
    if _gate is not None:
        _gate(name)
