"""What can go wrong, and where: names that the census counts, and the draw of what goes wrong in one act of a schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.points import ENGINE_ALONE_POINTS, ENGINE_REPAIR_POINTS, ENGINE_TOGETHER_POINTS, STREAM_POINTS
from tests.simulation.transfer import CORRUPTIONS

__all__ = [
    "ALL_FAULTS", "ALL_STATES", "CORRUPTING", "KILLS", "SOURCE_CRASH", "SOURCE_LIE", "SOURCE_POINTS", "STREAM_FAULTS", "Fault",
    "Pending", "draw_faults", "in_a_stream", "source_fault",
]  # fmt: skip

LOADER_DROP = "dropped by the loader"
CORRUPTING = (*CORRUPTIONS, LOADER_DROP)

_EVERYWHERE = tuple(f"engine.received.{call}" for call in ("prepare", "quarantine", "checksources"))
_ONLY_ALONE = ENGINE_ALONE_POINTS
_ONLY_TOGETHER = ENGINE_TOGETHER_POINTS

GATES = frozenset(
    {*_EVERYWHERE, *_ONLY_ALONE, *_ONLY_TOGETHER, "engine.pausing", "engine.received.place", "trainer.received.place"}
)
"""Points of :mod:`weightsync.failpoints` at which a call has arrived, and nothing has changed yet."""

POINTS = {
    "engine": (
        *("connect", "begin", "read", "pause", "load", "finish", "flush", "resume"),
        *(*_EVERYWHERE, *_ONLY_ALONE, *_ONLY_TOGETHER, "engine.pausing"),
    ),
    "trainer": ("place", "trainer.received.place"),
}
"""Moments inside a rank at which something may happen to it."""

SOURCE_POINTS = ("place", "engine.received.place")
"""Moments inside an engine rank that serves its weights to others."""

SOURCE_CRASH = "source crash"
SOURCE_LIE = "source lies"
SOURCE_FAULTS = (SOURCE_CRASH, "source driven by another front", SOURCE_LIE)
"""What happens to an engine rank while another reads from it. One that lies lets others read other bytes until it places anew."""

_KINDS = ("slow", "hang", "fail", "crash", "disconnect", "coordinator crash")


def _kinds(point: str) -> tuple[str, ...]:
    return tuple(kind for kind in _KINDS if kind != "fail") if point in GATES else _KINDS


TIMED = (
    "engine crash",
    "trainer crash",
    "coordinator crash",
    "coordinator shutdown",
    "connection reset",
    "connection lost without a word",
    "partition",
    "slow wire",
    "duplicated frames",
    "stall",
    "clock of a process jumps",
    "clock of the machine jumps",
    "wall clock jumps back",
    "trainer rank absent",
    "trainer ranks differ",
    "publisher in a hurry",
    "replica joins",
    "second process of a rank",
    "seeding asked for",
)
"""What happens at a moment of virtual time, whatever runs then."""

KILLS = (
    *(f"crash in {point}" for names in (*POINTS.values(), SOURCE_POINTS) for point in names),
    "engine crash",
    "trainer crash",
    "coordinator crash",
    SOURCE_CRASH,
)

ALL_FAULTS = tuple(
    dict.fromkeys(
        [
            *(f"{kind} in {point}" for names in (*POINTS.values(), SOURCE_POINTS) for point in names for kind in _kinds(point)),
            *(f"lost in {point}" for point in ("connect", "begin", "read")),
            "refused in flush",
            *(f"{kind} in read" for kind in CORRUPTIONS),
            f"{LOADER_DROP} in load",
            *(name for name in TIMED if name != "duplicated frames"),
            "duplicated frame",
            "trainer rank blinks while ranks gather",
            *SOURCE_FAULTS,
        ]
    )
)

_STREAM_KINDS = {"trainer": _KINDS[:2] + _KINDS[3:], "engine": _KINDS[:2] + _KINDS[3:], "round": ("coordinator crash",)}
STREAM_FAULTS = tuple(f"{kind} in {point}" for point in STREAM_POINTS for kind in _STREAM_KINDS[point.partition(".")[0]])
"""What goes wrong in rounds whose source is a stream, and in no other."""

ALL_STATES = (
    *(f"replica {state}" for state in ("registered", "loaded", "updating", "dirty", "lost")),
    *(f"phase {phase}" for phase in ("agree", "stage", "pause", "move", "verify", "commit", "revert", "quarantine")),
    *("updated by changes", "kept its version after a failed update"),
    "round ok",
    "round not ok",
    "round without a version",
    "replica failed alone",
    "replica left out: lost",
    "replica left out: refused",
    "seeding round ok",
    "seeding round cancelled",
    "rank reports a version to a new coordinator",
    "rank reports a version to a coordinator that had lost it",
    "publication asked for again",
    "publish returned",
    "publish raised RoundFailed",
    "publish raised DeadlineExceeded",
    "publish raised VersionError",
    "publish with a snapshot",
    "quarantine outside of a round",
    "agent refused",
    "fed by a replica",
    "fed by a replica while seeding",
    "a source was refuted",
    "delivery direct",
    "delivery streamed",
    "verified installed",
    "verified received",
    "read again while it served",
)


@dataclass(frozen=True)
class Fault:
    """``name`` of :data:`TIMED`, ``at`` seconds after the act began; ``member`` where one is meant."""

    name: str
    at: float
    member: str
    seconds: float


@dataclass(frozen=True)
class Pending:
    """What happens to ``member`` when it next reaches ``point``."""

    member: str
    point: str
    kind: str
    seconds: float


def _at_a_point(draw: random.Random, engines: dict[str, str], trainers: list[str]) -> Pending:
    """``engines``: member to kind."""
    if draw.random() < 0.15:
        place = draw.choice(POINTS["trainer"])
        return Pending(draw.choice(trainers), place, draw.choice(_kinds(place)), draw.uniform(0.3, 30.0))
    member = draw.choice(list(engines))
    kind_of_engine = engines[member]
    alone = sum(other.rpartition("/")[0] == member.rpartition("/")[0] for other in engines) == 1
    if draw.random() < 0.3:
        corruptions = CORRUPTING if kind_of_engine == "whole" else CORRUPTIONS
        kind = draw.choice(corruptions)
        return Pending(member, "load" if kind == LOADER_DROP else "read", kind, 0.0)
    never = {*(_ONLY_TOGETHER if alone else _ONLY_ALONE), "load" if kind_of_engine == "direct" else ""}
    point = draw.choice([point for point in POINTS["engine"] if point not in never])
    kinds = [*_kinds(point)]
    if point in GATES:
        kinds += ["disconnect", "disconnect"]  # what a rank says of itself then is what these points are for
    if point in ("connect", "begin", "read"):
        kinds.append("lost")
    if point == "flush":
        kinds.append("refused")
    kind = draw.choice(kinds)
    seconds = draw.choice([draw.uniform(0.05, 2.0), draw.uniform(2.0, 12.0)]) if kind == "slow" else draw.uniform(12.0, 45.0)
    return Pending(member, point, kind, seconds)


def source_fault(draw: random.Random, members: list[str]) -> Pending:
    """Something that goes wrong with an engine rank while it is a source."""
    point = draw.choice((*SOURCE_POINTS, "source", "source"))
    if point == "source":
        return Pending(draw.choice(members), point, draw.choice(SOURCE_FAULTS), 0.0)
    return Pending(draw.choice(members), point, draw.choice(_kinds(point)), draw.uniform(0.3, 30.0))


def draw_faults(draw: random.Random, engines: dict[str, str], trainers: list[str]) -> tuple[list[Fault], list[Pending]]:
    """What goes wrong in one act: nothing, or up to four things."""
    timed: list[Fault] = []
    pending: list[Pending] = []
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        if draw.random() < 0.6:
            one = _at_a_point(draw, engines, trainers)
            pending.append(one)
            if one.point in ENGINE_REPAIR_POINTS:  # which only a rank gets to whose round failed
                pending.append(Pending(one.member, "finish", "fail", 0.0))
            continue
        name = draw.choice(TIMED)
        members = trainers if name.startswith("trainer") else [*engines, *trainers] if draw.random() < 0.7 else list(engines)
        if name in ("engine crash", "second process of a rank"):
            members = list(engines)
        # Most of a round is over within a tenth of a second; what comes later meets a slow one, or none.
        at = draw.choice((0.0, draw.uniform(0.0, 0.03), draw.uniform(0.0, 0.12), draw.uniform(0.0, 5.0)))
        timed.append(Fault(name, at, draw.choice(members), draw.uniform(0.5, 25.0)))
    return timed, pending


def in_a_stream(draw: random.Random, planned: Pending) -> Pending:
    """What happens instead of ``planned`` where the source is a stream: mostly something that happens only there."""
    if draw.random() < 0.3:
        return planned
    point = draw.choice(STREAM_POINTS)
    who = point.partition(".")[0]
    member = "coordinator" if who == "round" else planned.member
    if who != "round" and (who == "trainer") is not member.startswith("trainer"):
        return planned
    return Pending(member, point, draw.choice(_STREAM_KINDS[who]), planned.seconds or draw.uniform(0.05, 20.0))
