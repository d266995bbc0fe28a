"""Named points of a round at which a test may hold a process, to kill or stop it exactly there.

In normal use :func:`reached` is a look at one global. Only :mod:`tests.faults` installs a gate, in processes of its own: there
is no variable, flag or message by which a gate could be put into a process that serves.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "COORDINATOR_POINTS",
    "ENGINE_ALONE_POINTS",
    "ENGINE_POINTS",
    "ENGINE_REPAIR_POINTS",
    "ENGINE_TOGETHER_POINTS",
    "TRAINER_POINTS",
    "UPDATE_POINTS",
    "install",
    "reached",
]

TRAINER_POINTS = (
    "trainer.publish",
    "trainer.received.place",
    "trainer.place",
    "trainer.placing",
    "trainer.placed",
    "trainer.published",
)
ENGINE_POINTS = (
    "engine.received.prepare",
    "engine.prepared",
    "engine.pausing",
    "engine.pause",
    "engine.move",
    "engine.group",
    "engine.moved",
    "engine.finish",
    "engine.flush",
    "engine.committed",
    "engine.resume",
    "engine.resumed",
)
"""Of every engine rank. At ``engine.received.*``, a call has arrived and nothing has changed yet."""
ENGINE_ALONE_POINTS = ("engine.received.update",)
"""Of the only rank of a replica."""
ENGINE_TOGETHER_POINTS = ("engine.received.pause", "engine.received.move", "engine.received.commit", "engine.received.resume")
"""Of a rank that is not the only one."""
ENGINE_REPAIR_POINTS = ("engine.received.quarantine", "engine.received.checksources")
"""Of a rank whose round failed, then and when it is re-seeded."""
COORDINATOR_POINTS = (
    "round.start",
    "round.agreed",
    "round.placed",
    "round.paused",
    "round.moved",
    "round.verified",
    "round.committed",
    "round.resumed",
    "round.end",
)

UPDATE_POINTS = (
    "rank.join",
    "updates.begin",
    "rank.pause",
    "rank.paused",
    "updates.bucket",
    "rank.receive",
    "rank.arrived",
    "rank.load",
    "rank.answer",
    "updates.commit",
    "rank.verify",
    "updates.verified",
    "rank.finish",
    "rank.flush",
    "updates.finished",
    "rank.resume",
    "rank.resumed",
    "updates.destroy",
    "rank.leave",
)
"""Of an update from outside (``adapters.disaggregated``): the server's front, and its engine ranks. Two more are reached only when
something failed: ``updates.abort`` and ``rank.quarantine``."""

_gate: Callable[[str], None] | None = None


def install(gate: Callable[[str], None]) -> None:
    """Call ``gate`` with the name of every point that this process reaches from now on. It may block, and must not raise."""
    global _gate
    _gate = gate


def reached(name: str) -> None:
    """This process is at point ``name``."""
    if _gate is not None:
        _gate(name)
