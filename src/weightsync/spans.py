"""Where a round's time goes: each process records spans of its own clock, and only while a recorder is set.

The coordinator asks for spans with a round's calls, and every rank sends those of a call with its answer. Repeated spans of one
name and source are added up, so their number does not depend on the number of buckets. Without a recorder a span costs one look-up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

MOST_SPANS = 4096
"""Spans of one call at most. A recorder leaves out further ones."""
PHASES = (
    "wait", "maxima", "copy", "digest", "changes",  # a trainer rank places a version
    "connect", "map", "cover", "shards", "audit",  # an engine rank serves
    "pause", "begin", "wake_weights", "follow", "read", "load", "apply", "finish", "wake_cache", "flush", "resume",  # and is paused
)  # fmt: skip
"""Names of the spans of trainer and engine ranks."""
_Name = Annotated[str, msgspec.Meta(max_length=200)]
T = TypeVar("T")

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A duration in a message: neither NaN nor infinite nor negative."""
Clock = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""A time on some process's clock in a message: neither NaN nor infinite."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of a round at one process: from its first start to its last end.

    Attributes:
        name: What was done: ``pause``, ``read``, ``load``.
        start: When it started, on the clock of the process that recorded it.
        seconds: From the first start to the last end.
        busy: Sum of all parts, which is less than ``seconds`` if other work came in between.
        source: The trainer rank that was waited for; at the coordinator, the replica.
        transport: How bytes were read.
        nbytes: Bytes that were read.
    """

    name: _Name
    start: Clock
    seconds: Seconds
    busy: Seconds
    source: _Name = ""
    transport: _Name = ""
    nbytes: int = 0


class SpanRecorder:
    """Adds up spans by name and source, of ``most`` different ones. Any thread may add."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._most = most
        self._spans: dict[tuple[str, str], Span] = {}

    def add(self, name: str, start: float, end: float, source: str = "", transport: str = "", nbytes: int = 0) -> None:
        """Add what was done from ``start`` to ``end``."""
        key = name, source
        before = self._spans.get(key)
        if before is not None:
            start, seconds, busy = min(before.start, start), end - min(before.start, start), before.busy + end - start
            self._spans[key] = Span(name, start, seconds, busy, source, transport, before.nbytes + nbytes)
        elif len(self._spans) < self._most:
            self._spans[key] = Span(name, start, end - start, end - start, source, transport, nbytes)

    def spans(self) -> tuple[Span, ...]:
        """Return all spans, in the order in which they started."""
        return tuple(sorted(list(self._spans.values()), key=lambda recorded: recorded.start))


class Tracer(Protocol):
    """Follows the calls that a caller makes on other processes."""

    @property
    def parent(self) -> str:
        """W3C ``traceparent`` that the calls carry."""

    def answered(self, peer: str, sent: float, received: float, answered: float, arrived: float, spans: tuple[Span, ...]) -> None:
        """Note one answered call of ``peer``.

        Args:
            peer: Who answered.
            sent: When the call was sent, on the caller's clock.
            received: When it was received, on the peer's clock.
            answered: When it was answered, on the peer's clock.
            arrived: When the answer arrived, on the caller's clock.
            spans: What the peer did meanwhile, on its own clock.
        """

    def unanswered(self, peer: str, what: str, sent: float, until: float) -> None:
        """Note the call ``what`` that ``peer`` had not answered ``until`` it was withdrawn, both on the caller's clock."""


_tracer: ContextVar[Tracer | None] = ContextVar("weightsync_tracer", default=None)
_recorder: ContextVar[SpanRecorder | None] = ContextVar("weightsync_recorder", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


def now() -> float:
    """Return the time by the clock of all spans of this process."""
    return time.monotonic()


class _Within(Generic[T]):
    """A variable of the context has another value inside the block."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._before = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._before)


def recording(recorder: SpanRecorder | None) -> AbstractContextManager[None]:
    """Record the spans of the block, and of the tasks and calls that it starts, in ``recorder``; with ``None``, nowhere."""
    return _Within(_recorder, recorder)


def tracer() -> Tracer | None:
    """Return what follows the calls of the current task."""
    return _tracer.get()


def tracing(follower: Tracer | None) -> AbstractContextManager[None]:
    """Let ``follower`` follow the calls of the block and of the tasks that it starts."""
    return _Within(_tracer, follower)


def joining(parent: str) -> AbstractContextManager[None]:
    """Make spans that the engine's or trainer's own code records with OpenTelemetry in the block children of ``parent``.

    ``parent`` is a W3C ``traceparent``. Does nothing in a process that does not use OpenTelemetry.
    """
    return _joined(parent) if parent and "opentelemetry.context" in sys.modules else _NOTHING


@contextmanager
def _joined(parent: str) -> Iterator[None]:
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    before = context.attach(TraceContextTextMapPropagator().extract({"traceparent": parent}))
    try:
        yield
    finally:
        context.detach(before)


class _Timed:
    """Records how long the block takes; on a GPU also as an NVTX range."""

    def __init__(self, recorder: SpanRecorder, name: str, what: tuple[str, str, int]) -> None:
        self._recorder, self._name, self._what = recorder, name, what

    def __enter__(self) -> None:
        self._ranges = _nvtx()
        if self._ranges is not None:
            self._ranges.range_push(f"weightsync: {self._name}")
        self._started = now()

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._name, self._started, now(), *self._what)
        if self._ranges is not None:
            self._ranges.range_pop()


def _nvtx() -> Any:  # noqa: ANN401 - torch's module
    """Ranges that a profiler of NVIDIA's shows, in a process that uses a GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda.nvtx if torch is not None and torch.cuda.is_initialized() else None


def span(name: str, source: str = "", transport: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
    """Record the duration of the block, also if it raises."""
    recorder = _recorder.get()
    return _NOTHING if recorder is None else _Timed(recorder, name, (source, transport, nbytes))
