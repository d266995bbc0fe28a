"""Results and traces of the last rounds."""

from __future__ import annotations

from collections import deque

from weightsync.coordinator.round_trace import RoundTracer
from weightsync.protocol.messages import RoundResult

_MOST_RESULTS = 1 << 14
_MOST_RANKS = 1 << 14


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
            while len(self.traces) > 1 and sum(past.size for past in self.traces) > _MOST_RANKS:
                self.traces.popleft()
