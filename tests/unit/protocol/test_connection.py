"""When a rank that refused a call connects again: after what hangs, on the connection of that call, and without a goodbye.

And what a call that failed leaves behind: nothing.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from websockets.frames import CloseCode

from weightsync.config import Address, ClientSettings
from weightsync.errors import DeadlineExceeded, StaleSource
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import Body, Done, Quarantine, Resume
from weightsync.protocol.worker import IncomingCall

pytestmark = pytest.mark.usefixtures("no_leaks")

SECONDS = 10.0


class Socket:
    """A connection that only notes how it is closed."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    async def close(self, code: int, reason: str) -> None:
        self.codes.append(code)


@dataclass
class Received:
    """A call that ends when ``goes_on`` is set, and that is refused when it did not get its turn soon."""

    goes_on: threading.Event
    begun: threading.Event = field(default_factory=threading.Event)
    turn_seconds: float = 0.02
    yields: bool = False
    beside: bool = False

    def run(self, timeout: float) -> Body:
        self.begun.set()
        assert self.goes_on.wait(SECONDS)
        return Done()

    def withdraw(self) -> str:
        return "it hangs"


class Rank:
    """A link without a coordinator: the test gives it its connection and its calls."""

    def __init__(self) -> None:
        self.calls: list[Received] = []
        settings = ClientSettings(coordinator=Address.parse("http://127.0.0.1:1"))
        self.link: Any = CoordinatorConnection(settings, hello=lambda: pytest.fail("nobody connects"), receive=self.receive)

    def receive(self, body: Body) -> IncomingCall:
        call = self.calls[-1]
        return IncomingCall(body, call.run, call.withdraw, call.turn_seconds, yields=call.yields, beside=call.beside)

    def connect(self) -> Socket:
        self.link._socket = Socket()
        socket: Socket = self.link._socket
        return socket

    def call(self, goes_on: threading.Event, body: Body | None = None, *, beside: bool = False) -> asyncio.Task[Body]:
        self.calls.append(Received(goes_on, beside=beside))
        return asyncio.ensure_future(self.link._dispatch(body or Resume(), SECONDS))

    async def hang(self) -> threading.Event:
        """Hang in a call that nobody waits for any more, as after its deadline; returns what ends it."""
        goes_on = threading.Event()
        call = self.call(goes_on)
        await asyncio.sleep(0)
        await asyncio.to_thread(self.calls[-1].begun.wait, SECONDS)
        call.cancel()
        await asyncio.wait([call])
        return goes_on

    async def refuse(self) -> None:
        with pytest.raises(DeadlineExceeded, match="did not get its turn"):
            await self.call(threading.Event())

    async def drain(self) -> None:
        """Wait until it has decided whether to connect again."""
        await asyncio.wait_for(self.link._returning, SECONDS)


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    rank = Rank()
    yield rank
    for call in rank.calls:
        call.goes_on.set()
    await asyncio.to_thread(rank.link.close)


async def test_it_connects_again_when_what_hangs_has_ended(rank: Rank) -> None:
    socket, hanging = rank.connect(), await rank.hang()
    await rank.refuse()
    assert socket.codes == []
    hanging.set()
    await rank.drain()
    assert socket.codes == [CloseCode.SERVICE_RESTART]


async def test_a_call_that_yields_to_others_is_refused_without_a_consequence(rank: Rank) -> None:
    socket, hanging = rank.connect(), await rank.hang()
    refused = rank.call(threading.Event())
    rank.calls[-1].yields = True
    with pytest.raises(DeadlineExceeded, match="did not get its turn"):
        await refused
    hanging.set()
    assert rank.link._returning is None
    assert socket.codes == []


async def test_calls_beside_rounds_end_no_connection(rank: Rank) -> None:
    """What a tenant lets hang would end the rounds of others."""
    socket, hanging = rank.connect(), threading.Event()
    call = rank.call(hanging, beside=True)
    await asyncio.to_thread(rank.calls[-1].begun.wait, SECONDS)
    with pytest.raises(DeadlineExceeded, match="did not get its turn"):
        await rank.call(threading.Event(), beside=True)
    hanging.set()
    assert await call == Done()
    assert rank.link._returning is None
    assert socket.codes == []


async def test_another_connection_is_left_alone(rank: Rank) -> None:
    old, hanging = rank.connect(), await rank.hang()
    await rank.refuse()
    new = rank.connect()
    hanging.set()
    await rank.drain()
    assert (old.codes, new.codes) == ([], [])


async def test_another_connection_over_which_a_call_was_refused_too_is_made_anew(rank: Rank) -> None:
    old, hanging = rank.connect(), await rank.hang()
    await rank.refuse()
    new = rank.connect()
    await rank.refuse()
    hanging.set()
    await rank.drain()
    assert (old.codes, new.codes) == ([], [CloseCode.SERVICE_RESTART])


async def test_a_quarantine_is_answered_before_it_connects_again(rank: Rank) -> None:
    socket, hanging = rank.connect(), await rank.hang()
    await rank.refuse()
    quarantined = threading.Event()
    quarantine = rank.call(quarantined, Quarantine("a round failed"))
    await asyncio.sleep(0)
    hanging.set()
    await asyncio.wait([rank.link._returning], timeout=0.1)
    assert socket.codes == []
    quarantined.set()
    await rank.drain()
    assert socket.codes == [CloseCode.SERVICE_RESTART]
    assert await quarantine == Done()


async def test_a_call_that_is_under_way_again_is_not_interrupted(rank: Rank) -> None:
    socket, hanging = rank.connect(), await rank.hang()
    await rank.refuse()
    again = threading.Event()
    call = rank.call(again)
    rank.calls[-1].turn_seconds = SECONDS
    await asyncio.sleep(0)
    hanging.set()
    await rank.drain()
    again.set()
    assert await call == Done()
    assert socket.codes == []


async def test_a_call_that_failed_keeps_nothing_of_what_it_was_about(rank: Rank) -> None:
    """Its error refers to frames, and these to mappings: a cycle would hold them until the garbage collector comes by."""

    class Mapping:
        pass

    mappings: list[weakref.ref[Mapping]] = []

    class Failing(Received):
        def run(self, timeout: float) -> Body:
            mapping = Mapping()
            mappings.append(weakref.ref(mapping))
            raise StaleSource("the source was taken")

    rank.calls.append(Failing(threading.Event()))
    rank.calls[-1].turn_seconds = SECONDS
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(StaleSource):
            await rank.link._dispatch(Resume(), SECONDS)
        await asyncio.sleep(0)  # callbacks of the call
        [mapping] = mappings
        for _ in range(100):  # its thread lets go of the error right after it has answered
            if mapping() is None:
                break
            await asyncio.sleep(0.01)
        assert mapping() is None
    finally:
        gc.enable()


async def test_an_error_of_a_signal_handler_is_not_taken_for_a_closed_link(rank: Rank) -> None:
    """It comes in the middle of handing the call over: the call runs already, and cannot be closed."""
    running, asked = threading.Event(), list[Any]()

    async def ask(body: Body, deadline: object) -> Body:
        running.set()
        return Done()

    real = asyncio.get_running_loop()

    def interrupted(*work: Any) -> None:
        real.call_soon_threadsafe(*work)
        if not asked:
            asked.append(work)
            assert running.wait(SECONDS)
            raise RuntimeError("watchdog: this takes too long")

    rank.link._loop = cast(Any, SimpleNamespace(call_soon_threadsafe=interrupted, is_closed=lambda: False))
    rank.link._ask = ask
    try:
        with pytest.raises(RuntimeError, match="watchdog"):
            await asyncio.to_thread(rank.link.call, Resume(), SECONDS)
        assert not rank.link._asked
    finally:
        rank.link._loop = None


async def test_the_newest_progress_of_a_connection_is_reported_a_few_times_a_second(rank: Rank) -> None:
    link, sent = rank.link, list[int]()
    last = asyncio.Event()

    async def send(frame: Any) -> None:
        sent.append(frame.nbytes)
        if frame.nbytes == 53:
            last.set()

    link._loop = asyncio.get_running_loop()
    link.progress(1)  # of an earlier connection
    await asyncio.sleep(0)
    reporting = asyncio.ensure_future(link._report_progress(send))
    try:
        await asyncio.sleep(0)
        await asyncio.to_thread(link.progress, 2)
        for nbytes in range(3, 54):
            link.progress(nbytes)
            await asyncio.sleep(0)
        await asyncio.wait_for(last.wait(), SECONDS)
        assert 1 not in sent and len(sent) <= 4
    finally:
        reporting.cancel()
        link._loop = None
