"""Traces of rounds: clocks are aligned by round trips, and what a rank cannot have done is left out."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.virtual_time import virtual

from weightsync.coordinator.round_trace import RoundTracer
from weightsync.model import RoundTrace, SlowestSpan
from weightsync.spans import Span, SpanRecorder, recording, span

ROUND: Any = SimpleNamespace(round=3, number=7, epoch=1, seeding=False, trainers={}, replicas=(), readable=())


def started() -> RoundTracer:
    return RoundTracer("run", ROUND)


def finished(tracer: RoundTracer) -> RoundTrace:
    tracer.end(None)
    return tracer.trace


async def exchange(tracer: RoundTracer, there: float, back: float, offset: float, name: str = "pause", busy: float = 0.5) -> None:
    """One call of a rank whose clock is ``offset`` ahead: it works ``busy`` seconds, the messages take ``there`` and ``back``."""
    loop = asyncio.get_running_loop()
    sent = loop.time()
    await asyncio.sleep(there)
    received = loop.time() + offset
    await asyncio.sleep(busy)
    answered = loop.time() + offset
    await asyncio.sleep(back)
    tracer.answered("r/0", sent, received, answered, loop.time(), (Span(name, received, busy, busy),))


@pytest.mark.parametrize("offset", [0.0, 5000.0, -5000.0])
@virtual
async def test_clocks_are_aligned_by_the_fastest_round_trip(offset: float) -> None:
    tracer = started()
    await exchange(tracer, 0.25, 0.03125, offset)
    await exchange(tracer, 0.002, 0.001, offset, "resume")
    await exchange(tracer, 0.125, 0.125, offset, "flush")
    [track] = [track for track in finished(tracer).tracks if track.member == "r/0"]
    assert abs(track.clock_offset - offset) <= track.clock_error + 1e-9
    assert track.clock_error == pytest.approx(0.0015)
    starts = {recorded.name: recorded.start for recorded in track.spans}
    assert starts["pause"] == pytest.approx(0.25, abs=track.clock_error)
    assert starts["resume"] == pytest.approx(0.25 + 0.5 + 0.03125 + 0.002, abs=track.clock_error)


@virtual
async def test_what_a_rank_cannot_have_done_is_left_out() -> None:
    tracer = started()
    loop = asyncio.get_running_loop()
    sent = loop.time()
    await asyncio.sleep(1.0)
    spans = (
        Span("pause", 10.25, 0.5, 0.5),
        Span("pause", 10.25, 5.0, 5.0),  # longer than the call
        Span("pause", 9.0, 0.5, 0.5),  # before it
        Span("pause", 10.25, -1.0, 0.0),
        Span("pause", math.nan, 0.5, 0.5),
        Span("pause", 10.25, math.inf, 0.5),
        Span("nonsense", 10.25, 0.5, 0.5),
        Span("read", 10.25, 0.5, 0.5, "\x1b[31m"),
        Span("read", 10.25, 0.5, 0.5, "trainer/0", "none", 5),
        Span("read", 10.25, 0.5, 0.5, "trainer/0", "tcp", -5),
    )
    tracer.answered("r/0", sent, 10.0, 11.0, loop.time(), spans)
    tracer.answered("liar/0", sent, 10.0, 1e6, loop.time(), spans)
    tracer.answered("liar/0", sent, 10.0, 9.0, loop.time(), spans)
    tracer.answered("liar/0", sent, math.nan, math.nan, loop.time(), spans)
    tracks = {track.member: track for track in finished(tracer).tracks}
    assert [recorded.seconds for recorded in tracks["r/0"].spans] == [0.5]
    assert not tracks["liar/0"].spans
    assert tracks["liar/0"].clock_error == 0.0


@virtual
async def test_the_slowest_phase_is_that_of_a_rank_and_a_call_without_an_answer_counts() -> None:
    tracer = started()
    await exchange(tracer, 0.001, 0.001, 0.0)
    tracer.recorder.add("move", 0.0, 0.502, "r")
    tracer.recorder.add("verify", 0.502, 0.752, "r")
    trace = finished(tracer)
    assert trace.slowest() == SlowestSpan("r/0", "pause", 0.5)
    assert tracer.slowest_span == trace.slowest()
    assert tracer.slowest_by_phase["verify"] == SlowestSpan("coordinator", "verify", 0.25, "r")
    assert [(track.member, track.party) for track in trace.tracks] == [
        ("coordinator", "coordinator"), ("r/0", "engine"), ("r", "replica"),
    ]  # fmt: skip
    hung = started()
    hung.unanswered("hung/0", "Pause", 0.0, 30.0)
    assert str(finished(hung).slowest()) == "Pause unanswered at hung/0, 30000 ms"


def test_spans_of_one_name_and_source_are_added_up() -> None:
    recorder = SpanRecorder(most=2)
    recorder.add("read", 1.0, 2.0, "a", "tcp", 5)
    recorder.add("read", 4.0, 4.5, "a", "tcp", 6)
    recorder.add("read", 0.5, 0.75, "b", "tcp", 7)
    recorder.add("read", 0.0, 9.0, "too many", "tcp", 7)
    assert recorder.spans() == (Span("read", 0.5, 0.25, 0.25, "b", "tcp", 7), Span("read", 1.0, 3.5, 1.5, "a", "tcp", 11))


def test_without_a_recorder_nothing_is_recorded_and_an_error_is_recorded_too() -> None:
    with span("pause"):
        pass
    recorder = SpanRecorder()
    with recording(recorder), pytest.raises(ValueError, match="told"), span("pause"):
        raise ValueError("told to")
    with span("pause"):
        pass
    assert [recorded.name for recorded in recorder.spans()] == ["pause"]
