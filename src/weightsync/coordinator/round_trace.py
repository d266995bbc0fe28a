"""Collects what the processes of a round did while it runs, and aligns the clocks of all ranks; and the last rounds of a run.

What a rank sends is only kept during the round. At its end one pass over it finds what was slowest; the trace itself is built when
somebody asks for it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from msgspec import structs

from weightsync.coordinator.ranks import PublishingRank
from weightsync.coordinator.round_context import RoundContext
from weightsync.model import RoundTrace, SlowestSpan, Track
from weightsync.protocol.messages import RoundResult
from weightsync.spans import PHASES, Span, SpanRecorder

_MOST_RANKS = 1 << 14  # a round of more is not traced beyond them
_MOST_CALLS = 1 << 12  # of one rank
_MOST_RESULTS = 1 << 14  # of replicas, in all rounds that are kept
_MOST_TRACED = 1 << 14  # ranks, in all traces that are kept
_MOST_OWN = 1 << 16
_OWN = ("plan", "sum", "verify", "wait")
"""What the coordinator does or waits for itself; its other spans are phases of replicas, which contain those of ranks."""
_PHASES = frozenset(PHASES)


@dataclass
class _Rank:
    """What one rank answered in a round.

    The offset of its clock is taken from the call that was under way for the shortest time besides being handled: the two messages
    took ``delay`` seconds together, and however that is divided between them, the offset is wrong by half of it at most.
    """

    offset: float = 0.0
    delay: float = math.inf
    calls: list[tuple[float, float, tuple[Span, ...]]] = field(default_factory=list)
    """When a call was received and answered, and what the rank did meanwhile, on the rank's clock."""
    unanswered: list[Span] = field(default_factory=list)
    """On the coordinator's clock."""

    def spans(self) -> Iterator[Span]:
        """Iterate over what the rank can have done during its calls: it may be broken, or lie."""
        for received, answered, spans in self.calls:
            for span in spans:
                within = received <= span.start and span.seconds >= 0 and span.start + span.seconds <= answered
                # Parts that were added up may be longer than the whole by what rounding makes of it.
                if within and 0 <= span.busy <= span.seconds + 1e-6 and _nameable(span):
                    yield span


def _nameable(span: Span) -> bool:
    return span.name in _PHASES and span.nbytes >= 0 and span.source.isprintable()


class RoundTracer:
    """Follows the calls of one round, see :class:`weightsync.spans.Tracer`. Used on the coordinator's event loop."""

    def __init__(self, run: str, context: RoundContext) -> None:
        self._trace_id, self._span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.parent = f"00-{self._trace_id}-{self._span_id}-01"
        self.recorder = SpanRecorder(_MOST_OWN)
        """Records the coordinator's spans. Sources of these are replicas."""
        self.slowest: dict[tuple[str, str], SlowestSpan] = {}
        """Slowest rank by party and phase."""
        self.reads: dict[str, tuple[int, float]] = {}
        """Bytes by transport, and the longest time that a rank read by it."""
        self.round = context.round
        self._run, self._number, self._epoch, self._seeding = run, context.number, context.epoch, context.seeding
        self._trainers = frozenset(context.trainers)
        ranks: list[PublishingRank | None] = [link.rank for link in context.trainers.values()]
        for replica in (*context.replicas, *context.readable):
            ranks += [link.rank.source for link in replica.links.values()]
        self._schemes = {offer.scheme for rank in ranks if rank is not None for offer in rank.hello.offers}
        self._started, self._wall = asyncio.get_running_loop().time(), time.time()
        self._ranks: dict[str, _Rank] = {}
        self._seconds = 0.0
        self._error: str | None = None

    def answered(self, peer: str, sent: float, received: float, answered: float, arrived: float, spans: tuple[Span, ...]) -> None:
        """Note one answered call of a rank. One with times that cannot be is left out."""
        rank, handled, elapsed = self._rank(peer), answered - received, arrived - sent
        if rank is None or not (math.isfinite(received) and 0 <= handled <= elapsed):
            return
        if elapsed - handled < rank.delay:
            rank.delay = elapsed - handled
            rank.offset = ((received - sent) + (answered - arrived)) / 2
        if len(rank.calls) < _MOST_CALLS:
            rank.calls.append((received, answered, spans))

    def unanswered(self, peer: str, what: str, sent: float, until: float) -> None:
        """Note a call that a rank did not answer."""
        rank = self._rank(peer)
        if rank is not None:
            rank.unanswered.append(Span(f"{what} unanswered", sent, until - sent, until - sent))

    def _rank(self, peer: str) -> _Rank | None:
        rank = self._ranks.get(peer)
        if rank is None and len(self._ranks) < _MOST_RANKS:
            rank = self._ranks[peer] = _Rank()
        return rank

    def end(self, error: str | None) -> None:
        """End the round: set :attr:`slowest` and :attr:`reads`."""
        self._seconds, self._error = asyncio.get_running_loop().time() - self._started, error
        self._add_times("coordinator", "coordinator", (span for span in self.recorder.spans() if span.name in _OWN))
        for member, rank in self._ranks.items():
            self._add_times(self._party(member), member, rank.spans())
            self._add_times(self._party(member), member, rank.unanswered)

    def _add_times(self, party: str, member: str, spans: Iterable[Span]) -> None:
        busy, reading = dict[tuple[str, str], float](), dict[str, float]()
        for span in spans:  # a phase may take several calls, as windows of a stream do
            busy[span.name, span.source] = busy.get((span.name, span.source), 0.0) + span.busy
            if span.transport in self._schemes:
                reading[span.transport] = reading.get(span.transport, 0.0) + span.busy
                nbytes, longest = self.reads.get(span.transport, (0, 0.0))
                self.reads[span.transport] = nbytes + span.nbytes, max(longest, reading[span.transport])
        for (name, source), seconds in busy.items():
            slowest = self.slowest.get((party, name))
            if slowest is None or seconds > slowest.seconds:
                self.slowest[party, name] = SlowestSpan(member, name, seconds, source)

    def _party(self, member: str) -> Literal["trainer", "engine"]:
        return "trainer" if member in self._trainers else "engine"

    @property
    def size(self) -> int:
        """Number of ranks that answered."""
        return len(self._ranks)

    @property
    def slowest_by_phase(self) -> dict[str, SlowestSpan]:
        """Slowest process by phase, of any party."""
        return {slowest.phase: slowest for slowest in sorted(self.slowest.values(), key=lambda slowest: slowest.seconds)}

    @property
    def slowest_span(self) -> SlowestSpan | None:
        """The longest phase of any process; ``None`` if nothing was recorded."""
        return max(self.slowest.values(), key=lambda slowest: slowest.seconds, default=None)

    @cached_property
    def trace(self) -> RoundTrace:
        """The trace of the round, which has ended."""
        own, phases = list[Span](), dict[str, list[Span]]()
        for span in self.recorder.spans():
            (own if span.name in _OWN else phases.setdefault(span.source, [])).append(span)
        tracks = [Track("coordinator", "coordinator", self._shifted(own))]
        for member, rank in sorted(self._ranks.items()):
            spans = (span for span in rank.spans() if not span.transport or span.transport in self._schemes)
            tracks.append(
                Track(
                    member, self._party(member), self._shifted(spans, rank.offset) + self._shifted(rank.unanswered),
                    rank.offset, rank.delay / 2 if math.isfinite(rank.delay) else 0.0,
                )
            )  # fmt: skip
        tracks += [Track(replica, "replica", self._shifted(spans)) for replica, spans in sorted(phases.items())]
        return RoundTrace(
            trace_id=self._trace_id, span_id=self._span_id, run=self._run, round=self.round, number=self._number, epoch=self._epoch,
            seeding=self._seeding, started=self._wall, seconds=self._seconds, tracks=tuple(tracks), error=self._error,
        )  # fmt: skip

    def _shifted(self, spans: Iterable[Span], offset: float = 0.0) -> tuple[Span, ...]:
        shifted = (structs.replace(span, start=span.start - offset - self._started) for span in spans)
        return tuple(sorted(shifted, key=lambda span: span.start))


class PastRounds:
    """Results and traces of so many rounds at most, newest last. Old ones go earlier if they are of very many replicas or ranks."""

    def __init__(self, results: int, traces: int) -> None:
        self.results: deque[RoundResult] = deque(maxlen=results)
        self.traces: deque[RoundTracer] = deque(maxlen=traces)
        self.failure: tuple[int, str, float] | None = None
        """Number, error and end of the last round, if it ended without a result."""

    def traced(self, number: int) -> RoundTracer | None:
        """Return what was traced of a round; ``None`` if nothing was or the round is too long ago."""
        return next((past for past in reversed(self.traces) if past.round == number), None)

    def keep(self, result: RoundResult) -> None:
        """Keep the result of a round."""
        self.results.append(result)
        self.failure = None
        while len(self.results) > 1 and sum(len(past.replicas) for past in self.results) > _MOST_RESULTS:
            self.results.popleft()

    def keep_trace(self, tracer: RoundTracer | None, error: str | None) -> None:
        """Keep what was traced of a round that has ended."""
        if tracer is not None:
            tracer.end(error)
            self.traces.append(tracer)
            while len(self.traces) > 1 and sum(past.size for past in self.traces) > _MOST_TRACED:
                self.traces.popleft()
