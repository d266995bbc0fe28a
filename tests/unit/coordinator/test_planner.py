"""Plans are made a few at a time, and a thread that nobody waits for any more ends and frees its place."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.unit.coordinator.contents import MANIFEST

from weightsync.coordinator import planner as planners
from weightsync.coordinator.planner import Planner
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.planning.limits import Stop


async def test_a_plan_whose_round_ended_is_stopped_and_its_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)
    running = 0

    def endless(manifest: Any, sources: Any, whose: str, stop: Stop) -> None:
        nonlocal running
        running += 1
        begun.release()
        try:
            while True:
                stop.check()
                threading.Event().wait(0.01)
        finally:
            running -= 1
            ended.release()

    monkeypatch.setattr(planners, "source_coverage", endless)
    monkeypatch.setattr(planners, "key_of", lambda trainers, engines: "key")
    planner = Planner()
    waiting = [asyncio.ensure_future(planner.cover(MANIFEST, {}, RoundDeadline(0.5))) for _ in range(8)]
    assert await asyncio.to_thread(begun.acquire, timeout=10)
    assert await asyncio.to_thread(begun.acquire, timeout=10)
    assert running == 2, "as many threads as replicas plan at once"
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}
    assert await asyncio.to_thread(ended.acquire, timeout=10)
    assert await asyncio.to_thread(ended.acquire, timeout=10)
    assert running == 0
    made: Any = object()
    monkeypatch.setattr(planners, "source_coverage", lambda manifest, sources, whose, stop: made)
    assert await planner.cover(MANIFEST, {}, RoundDeadline(5)) is made


async def test_a_cancelled_round_stops_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(manifest: Any, sources: Any, whose: str, stop: Stop) -> None:
        begun.set()
        try:
            while True:
                stop.check()
                threading.Event().wait(0.01)
        except Aborted:
            ended.set()
            raise

    monkeypatch.setattr(planners, "source_coverage", endless)
    waiting = asyncio.ensure_future(Planner().cover(MANIFEST, {}, RoundDeadline(60)))
    assert await asyncio.to_thread(begun.wait, 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(ended.wait, 10)
