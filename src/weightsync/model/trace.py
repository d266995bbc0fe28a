"""Trace of a round: what every process did when, on one clock."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.spans import Seconds, Span

_WHOLE_MILLISECONDS = 0.01  # from here on without decimals


def milliseconds(seconds: float) -> str:
    """Format a duration for display: ``0.4 ms``, ``12345 ms``."""
    return f"{1000 * seconds:.{1 if seconds < _WHOLE_MILLISECONDS else 0}f} ms"


class SlowestSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The longest phase of a round and the rank that spent it."""

    rank: str
    """Member name of the rank, such as ``vllm-0/1``; ``coordinator`` for the coordinator."""
    phase: str
    seconds: Seconds
    source: str = ""
    """The trainer rank that it waited for, or the replica that the coordinator worked for."""

    def __str__(self) -> str:
        return f"{self.phase} at {self.rank}{f' of {self.source}' if self.source else ''}, {milliseconds(self.seconds)}"


class Track(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of one process. Their starts are seconds since the round's start, on the coordinator's clock."""

    member: str
    party: Literal["coordinator", "trainer", "engine", "replica"]
    """``replica`` for the phases of a replica as the coordinator sees them, which contain those of its ranks."""
    spans: tuple[Span, ...]
    clock_offset: float = 0.0
    """The process's clock less the coordinator's, in seconds: what was subtracted from its times."""
    clock_error: float = 0.0
    """The offset may be wrong by as much, in seconds: half of the fastest round trip, less what the process took to answer."""


class RoundTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every process did in one round."""

    trace_id: str
    """Id of the W3C trace that the round's calls carried."""
    span_id: str
    """Id of the round's own span in that trace."""
    run: str
    round: int
    number: int
    epoch: int
    seeding: bool
    started: float
    """Time of the start by the coordinator's clock, in seconds since the Unix epoch."""
    seconds: float
    tracks: tuple[Track, ...]
    error: str | None = None

    def slowest(self) -> SlowestSpan | None:
        """Return the longest phase of any process; ``None`` if nothing was recorded."""
        spans = ((span, track.member) for track in self.tracks if track.party != "replica" for span in track.spans)
        longest = max(spans, key=lambda pair: pair[0].busy, default=None)
        return None if longest is None else SlowestSpan(longest[1], longest[0].name, longest[0].busy, longest[0].source)
