"""Requests take a share of the event loop's time: those beyond it wait, in order.

An answer that is long in the making is given again for a while; a short one never.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.types import Message, Receive, Scope, Send

from weightsync.server import allowance, loop_share
from weightsync.server.loop_share import LoopShare, Snapshot

COST = 0.01


class Clock:
    """Time in which work costs time of the processor, and sleep only time."""

    def __init__(self) -> None:
        self.now, self.worked = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.worked

    def work(self, seconds: float) -> None:
        self.now, self.worked = self.now + seconds, self.worked + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, sleep = Clock(), asyncio.sleep

    async def wait(seconds: float) -> None:
        clock.now += seconds
        await sleep(0)

    monkeypatch.setattr(loop_share, "time", clock)
    monkeypatch.setattr(allowance, "time", clock)
    monkeypatch.setattr("weightsync.server.loop_share.asyncio.sleep", wait)
    return clock


async def receive() -> Message:
    return {}


async def send(message: Message) -> None:
    pass


def shared(clock: Clock, served: list[str], waits: float = 0.0) -> LoopShare:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        clock.work(COST)
        served.append(scope["path"])
        clock.now += waits
        await receive()

    return LoopShare(app, share=0.1, ahead=1.0, uncounted=frozenset({"/free"}))


async def ask(share: LoopShare, path: str) -> None:
    await share({"type": "http", "path": path}, receive, send)


async def test_many_requests_take_a_tenth_in_the_long_run(clock: Clock) -> None:
    served: list[str] = []
    share, began = shared(clock, served), clock.now
    for _ in range(10):
        await ask(share, "/at-once")
    assert clock.now - began == pytest.approx(10 * COST)
    for _ in range(200):
        await ask(share, "/later")
    assert clock.worked / (clock.now - began) == pytest.approx(0.1, rel=0.1)


async def test_those_that_wait_are_served_in_order_and_some_never_wait(clock: Clock) -> None:
    served: list[str] = []
    share = shared(clock, served)
    share._allowance.take(1.0)
    names = [f"/{number}" for number in range(20)]
    waiting = [asyncio.ensure_future(ask(share, name)) for name in names]
    began = clock.now
    await ask(share, "/free")
    assert (served, clock.now) == (["/free"], began + COST)
    await asyncio.gather(*waiting)
    assert served[1:] == names


async def test_waiting_is_not_charged(clock: Clock) -> None:
    share = shared(clock, [], waits=60.0)
    await ask(share, "/long")
    before = clock.now
    for _ in range(50):
        await ask(share, "/next")
    assert clock.now - before == pytest.approx(50 * (COST + 60))


async def test_what_the_application_raises_and_its_cancellation_pass_through() -> None:
    entered, ended = asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wrong":
            raise ValueError("wrong")
        try:
            entered.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    share = LoopShare(app, share=0.1, ahead=1.0, uncounted=frozenset())
    with pytest.raises(ValueError, match="wrong"):
        await ask(share, "/wrong")
    task = asyncio.ensure_future(ask(share, "/endless"))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


class MakingClock:
    """Both clocks: ``make`` takes ``cost`` seconds of each."""

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.made = 100.0, cost, 0

    monotonic = thread_time = lambda self: self.now

    def make(self) -> bytes:
        self.made += 1
        self.now += self.cost
        return b"%d" % self.made


@pytest.mark.parametrize(("cost", "made"), [(0.005, 50), (0.05, 10)])
def test_all_that_ask_take_a_tenth_of_the_loop_at_most(monkeypatch: pytest.MonkeyPatch, cost: float, made: int) -> None:
    clock = MakingClock(cost)
    monkeypatch.setattr(loop_share, "time", clock)
    snapshot = Snapshot(clock.make)
    for _ in range(50):
        snapshot.get()
        clock.now += 0.1
    assert made - 2 <= clock.made <= made


def test_a_short_answer_is_always_new() -> None:
    numbers = iter(range(1000))
    snapshot = Snapshot(lambda: b"%d" % next(numbers))
    began = time.monotonic()
    assert [snapshot.get() for _ in range(1000)] == [b"%d" % number for number in range(1000)]
    assert time.monotonic() - began < 5


def test_a_long_answer_is_new_when_what_it_is_of_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had published asked for the status at once, and got the one from before the round."""
    clock, rounds = MakingClock(0.05), [object()]
    monkeypatch.setattr(loop_share, "time", clock)
    snapshot = Snapshot(clock.make, lambda: rounds[-1])
    assert [snapshot.get(), snapshot.get()] == [b"1", b"1"]
    rounds.append(object())
    assert [snapshot.get(), snapshot.get()] == [b"2", b"2"]
