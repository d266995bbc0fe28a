"""Holds that calls over a connection end: with the right answer, the other side's error, the deadline, or the connection's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.unit.coordinator.contents import MANIFEST, rows_layout
from tests.unit.coordinator.fakes import HOST, FakeEngine, World
from tests.virtual_time import virtual

from weightsync.coordinator.agent_messages import answer_agent, rank_of
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.errors import (
    ConfigurationError,
    DeadlineExceeded,
    LayoutError,
    LoadError,
    MembershipError,
    PeerLost,
    ProtocolError,
    VersionError,
    WeightSyncError,
)
from weightsync.model import Version
from weightsync.model.window import WindowPart
from weightsync.protocol.calls import Calls
from weightsync.protocol.messages import (
    PROTOCOL,
    Answer,
    Body,
    Call,
    Cancel,
    CheckSources,
    Commit,
    DigestUnderKey,
    Done,
    Failure,
    Frame,
    Hello,
    LetGo,
    Move,
    Moved,
    MoveWindow,
    Offer,
    OpenStream,
    Pause,
    PieceColumns,
    Place,
    Placed,
    PlaceWindow,
    PlanSlice,
    Prepare,
    Prepared,
    Progress,
    Publish,
    Published,
    Quarantine,
    Resume,
    Update,
    Updated,
    Welcome,
    WindowMoved,
    WindowPlaced,
    decode,
    encode,
)
from weightsync.spans import Span, span, tracing

Handle = Callable[[Body, float], Awaitable[Body]]


async def refuse(body: Body, timeout: float) -> Body:
    raise ProtocolError(f"nobody asks for {type(body).__name__} here")


def pair(left: Handle = refuse, right: Handle = refuse) -> tuple[Calls, Calls, list[Frame]]:
    """Two ends of a connection, through the real encoding; and what crossed it."""
    crossed: list[Frame] = []

    async def to_right(frame: Frame) -> None:
        crossed.append(frame)
        ends[1].feed(decode(encode(frame)))

    async def to_left(frame: Frame) -> None:
        crossed.append(frame)
        ends[0].feed(decode(encode(frame)))

    ends = (Calls(to_right, left), Calls(to_left, right))
    return (*ends, crossed)


@virtual
async def test_both_sides_ask_at_once_and_answers_find_their_askers() -> None:
    async def place(body: Body, timeout: float) -> Body:
        assert isinstance(body, Place)
        await asyncio.sleep(10 - body.number)
        return Placed(bytes([body.number]), timeout)

    left, right, _ = pair(place, place)
    asked = [end.call(Place(number), 60.0) for number in range(10) for end in (left, right)]
    for index, answer in enumerate(await asyncio.gather(*asked)):
        assert isinstance(answer, Placed)
        assert answer == Placed(bytes([index // 2]), 60.0)


class Followed:
    """Takes note of what it follows."""

    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def answered(self, peer: str, sent: float, received: float, answered: float, arrived: float, spans: tuple[Span, ...]) -> None:
        assert sent <= arrived
        assert received <= answered
        self.seen.append((peer, *(recorded.name for recorded in spans)))

    def unanswered(self, peer: str, what: str, sent: float, until: float) -> None:
        assert until - sent == pytest.approx(1.25)
        self.seen.append((peer, what, "unanswered"))


@virtual
async def test_a_call_is_followed_only_where_somebody_asks_and_its_answer_says_what_it_took() -> None:
    async def work(body: Body, timeout: float) -> Body:
        with span("pause"):
            if isinstance(body, Place):
                await asyncio.sleep(100)
            if isinstance(body, Move):
                raise LoadError("on purpose")
        return Done()

    left, _, crossed = pair(right=work)
    await left.call(Resume(), 1.0)
    assert crossed == [Call(1, 1.0, Resume()), Answer(1, Done())], "nothing is recorded, and nothing crosses"
    follower = Followed()
    with tracing(follower):
        await left.call(Resume(), 1.0)
        with pytest.raises(LoadError):
            await left.call(Move(1), 1.0)
        with pytest.raises(DeadlineExceeded):
            await left.call(Place(1), 1.0)
    await left.call(Resume(), 1.0)
    calls = [frame for frame in crossed if isinstance(frame, Call)]
    assert [frame.trace for frame in calls] == ["", *3 * [follower.parent], ""]
    assert follower.seen[:2] == [("", "pause"), ("", "pause")], "also of a call that failed"


@virtual
async def test_a_call_that_is_never_answered_is_followed_to_its_end() -> None:
    async def send(frame: Frame) -> None:
        pass

    follower = Followed()
    with tracing(follower), pytest.raises(DeadlineExceeded):
        await Calls(send, refuse, peer="mine-0/1").call(Resume(), 1.0)
    assert follower.seen == [("mine-0/1", "Resume", "unanswered")]


@virtual
async def test_errors_cross_by_kind_and_text() -> None:
    errors: list[Exception] = [LoadError("no such tensor"), ZeroDivisionError("oops"), TimeoutError("slow")]

    async def fail(body: Body, timeout: float) -> Body:
        raise errors.pop(0)

    left, _, _ = pair(right=fail)
    with pytest.raises(LoadError, match="no such tensor"):
        await left.call(Resume(), 1.0)
    with pytest.raises(WeightSyncError, match="ZeroDivisionError: oops"):
        await left.call(Resume(), 1.0)
    with pytest.raises(DeadlineExceeded, match="slow"):
        await left.call(Resume(), 1.0)


@virtual
async def test_a_call_that_times_out_is_withdrawn() -> None:
    ended: list[str] = []

    async def hang(body: Body, timeout: float) -> Body:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return Done()

    left, right, crossed = pair(right=hang)
    with pytest.raises(DeadlineExceeded, match="within 5 s"):
        await left.call(Resume(), 5.0)
    asking = asyncio.ensure_future(left.call(Resume(), 50.0))
    await asyncio.sleep(1)
    asking.cancel()
    await asyncio.wait([asking], timeout=1)
    await asyncio.sleep(0)
    assert asking.cancelled()
    assert ended == ["cancelled", "cancelled"]
    assert Cancel(2) in crossed
    assert not any(isinstance(frame, Answer) for frame in crossed)
    assert not right._handlers
    assert not left._waiting


@virtual
async def test_a_handler_that_is_late_fails_the_call_by_itself() -> None:
    async def hang(body: Body, timeout: float) -> Body:
        await asyncio.sleep(1000)
        return Done()

    sent: list[Frame] = []

    async def send(frame: Frame) -> None:
        sent.append(frame)

    calls = Calls(send, hang)
    calls.feed(Call(7, 2.0, Resume()))
    await asyncio.sleep(3)
    assert sent == [Failure(7, "DeadlineExceeded", "Resume did not finish within 2 s")]


@virtual
async def test_closing_fails_everybody_at_once() -> None:
    async def hang(body: Body, timeout: float) -> Body:
        await asyncio.sleep(1000)
        return Done()

    left, right, _ = pair(hang, hang)
    asked = [asyncio.ensure_future(end.call(Resume(), 600.0)) for end in (left, right, left)]
    await asyncio.sleep(1)
    left.close(PeerLost("the wire was cut"))
    left.close()
    right.close()
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(error, PeerLost)
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)
    with pytest.raises(PeerLost, match="cut"):
        await left.call(Resume(), 1.0)
    left.feed(Answer(1, Done()))
    await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_calls_are_drained_when_their_answers_are_sent() -> None:
    sent: list[Frame] = []

    async def slowly(frame: Frame) -> None:
        await asyncio.sleep(1)
        sent.append(frame)

    async def handle(body: Body, timeout: float) -> Body:
        return Done()

    calls = Calls(slowly, handle)
    calls.feed(Call(1, 5.0, Resume()))
    await asyncio.sleep(0.5)  # it is handled, and its answer on the way
    await calls.drained()
    calls.close()
    assert sent == [Answer(1, Done())]


@virtual
async def test_calls_whose_answers_arrived_have_returned_before_a_connection_is_given_up() -> None:
    async def wire(frame: Frame) -> None:
        pass

    calls = Calls(wire, refuse)
    called = asyncio.ensure_future(calls.call(Resume(), 5.0))
    handed_on: list[Body] = []
    called.add_done_callback(lambda done: handed_on.append(done.result()))
    waiting = asyncio.ensure_future(calls.call(Resume(), 5.0))
    await asyncio.sleep(0.1)
    calls.feed(Answer(1, Done()))
    assert not called.done()
    await calls.returned()
    assert called.done()
    assert handed_on == [Done()]
    assert not waiting.done()
    await calls.returned()  # nothing to wait for
    calls.close()
    with pytest.raises(PeerLost):
        await waiting


@virtual
async def test_a_wire_that_hangs_or_breaks() -> None:
    async def never(frame: Frame) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlineExceeded):
        await Calls(never, refuse).call(Resume(), 5.0)

    async def broken(frame: Frame) -> None:
        raise ConnectionResetError("reset by peer")

    with pytest.raises(PeerLost, match="reset by peer"):
        await Calls(broken, refuse).call(Resume(), 5.0)
    await asyncio.sleep(100)


@virtual
async def test_what_does_not_belong_is_refused_or_ignored() -> None:
    seen: list[int] = []

    async def send(frame: Frame) -> None:
        return

    calls = Calls(send, refuse, seen.append)
    calls.feed(Answer(99, Done()))
    calls.feed(Failure(99, "PeerLost", "?"))
    calls.feed(Cancel(99))
    calls.feed(Progress(12))
    assert seen == [12]
    with pytest.raises(ProtocolError, match="nbytes"):
        decode(encode(Progress(-1)))
    for frame in (Welcome("m", "r"), Call(1, float("nan"), Resume()), Call(1, -1.0, Resume())):
        with pytest.raises(ProtocolError):
            calls.feed(frame)
    calls.feed(Call(5, 1.0, Resume()))
    with pytest.raises(ProtocolError, match="already running"):
        calls.feed(Call(5, 1.0, Resume()))
    with pytest.raises(ProtocolError, match="concurrent calls"):
        for number in range(100):
            calls.feed(Call(100 + number, 1.0, Resume()))
    calls.close()
    await asyncio.sleep(0.1)


# Ranks behind a connection.


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "protocol": PROTOCOL,
        "run": "test",
        "role": "engine",
        "name": "r",
        "rank": 0,
        "world_size": 1,
        "session": "s",
        "host": HOST,
        "pid": 1,
        "manifest": MANIFEST.tensors,
        "layout": rows_layout(MANIFEST, 0, 1).to_columns(),
        "transports": ("memory",),
    }
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_hello_becomes_a_rank() -> None:
    rank = rank_of(hello(), "test")
    assert rank.member == "r/0"
    assert rank.manifest == MANIFEST
    trainer = rank_of(hello(role="trainer", name="trainer", offers=(Offer("memory", "x", HOST),), published=3), "test")
    assert (trainer.member, trainer.hello.published) == ("trainer/0", 3)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"protocol": PROTOCOL + 1}, ProtocolError, "install the same weightsync"),
        ({"run": "other"}, MembershipError, "'other'"),
        ({"name": "a/b"}, ProtocolError, "printable"),
        ({"name": ""}, ProtocolError, "printable"),
        ({"session": "x\n"}, ProtocolError, "session"),
        ({"name": "trainer"}, MembershipError, "role engine"),
        ({"role": "trainer"}, MembershipError, "role trainer"),
        ({"rank": 1}, ProtocolError, "rank 1 of 1"),
        ({"rank": -1}, ProtocolError, "rank -1"),
        ({"world_size": 1 << 40}, ProtocolError, "rank 0 of"),
        ({"bucket_bytes": -1}, ProtocolError, "buckets"),
        ({"role": "trainer", "name": "trainer"}, ConfigurationError, "transport offer"),
        ({"manifest": MANIFEST.tensors * 2}, ConfigurationError, "twice"),
        ({"manifest": MANIFEST.tensors[:1]}, LayoutError, "tensors that are not in the manifest"),
    ],
)
def test_a_hello_that_is_wrong_says_why(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rank_of(hello(**changes), "test")


def plan_slice() -> PlanSlice:
    pieces = PieceColumns(0, 2, b"", b"", b"", b"", b"", b"", b"")
    return PlanSlice("digest", "direct", "", (), rows_layout(MANIFEST, 0, 1).to_columns(), pieces, 28)


def handle_of(rank: TrainerRank | EngineRank, calls: Calls) -> RankHandle[Any]:
    node: Any = SimpleNamespace(rank=rank, call=calls.call, notify=calls.notify, dismiss=lambda _: None)
    return RankHandle(node)


@virtual
async def test_answers_of_the_wrong_kind_or_size_are_refused() -> None:
    offers = (Offer("memory", "x", HOST),)
    engine, serving = rank_of(hello(), "test"), rank_of(hello(source_layout=hello().layout, offers=offers), "test")
    trainer = rank_of(hello(role="trainer", name="trainer", offers=offers), "test")
    version = Version("test", 1, "", "")
    digests = np.arange(len(rows_layout(MANIFEST, 0, 1)), dtype="<u8").tobytes()
    moved = Moved(28, digests, 0, 0, 0, "installed")
    window = WindowPlaced((WindowPart("a", (2,), "uint8", 0),), 2, 0, 1, digests[:8])
    opening = OpenStream("k", (), 64)

    async def says(rank: TrainerRank | EngineRank, answer: Body, message: Body, kind: type[Body]) -> Body:
        async def handle(body: Body, timeout: float) -> Body:
            return answer

        return await handle_of(rank, pair(right=handle)[0]).ask(message, kind, 1.0)

    right: list[tuple[TrainerRank | EngineRank, Body, Body]] = [
        (trainer, Placed(digests, 0), Place(1, 1, 1)),
        (trainer, Placed(digests, 0), DigestUnderKey(1, 1, b"key")),
        (serving, Placed(digests, 0), Place(1, 1)),
        (trainer, window, PlaceWindow(1, 1, 0, 0, 64)),
        (engine, Prepared("digest", ()), Prepare(plan_slice())),
        (engine, Prepared("k", ()), opening),
        (engine, WindowMoved(digests[:8]), MoveWindow(0, 0, window)),
        (engine, moved, Move(1)),
        (engine, Updated(moved, True, 0, 0), Update(version, "abort")),
        *((engine, Done(), body) for body in (Pause("abort"), Commit(version), Resume(), Quarantine("why"), CheckSources(1))),
        (engine, Done(), LetGo()),
    ]
    for rank, answer, message in right:
        assert await says(rank, answer, message, type(answer)) == answer
        other: Body = Done() if not isinstance(answer, Done) else moved
        with pytest.raises(ProtocolError, match=f"{rank.member} answered {type(message).__name__} with {type(other).__name__}"):
            await says(rank, other, message, type(answer))
    wrong: list[tuple[TrainerRank | EngineRank, Body, Body, str]] = [
        (trainer, Placed(digests[:-1], 0), Place(1, 1, 1), "trainer/0 sent .* bytes of digests"),
        (trainer, Placed(digests + b"12345678", 0), DigestUnderKey(1, 1, b"key"), "trainer/0 sent .* bytes of digests"),
        (serving, Placed(b"", 0), Place(1, 1), "r/0 sent 0 bytes of digests"),
        (trainer, structs.replace(window, digests=b""), PlaceWindow(1, 1, 0, 0, 64), "described a window of 2 bytes wrongly"),
        (trainer, structs.replace(window, nbytes=65), PlaceWindow(1, 1, 0, 0, 64), "described a window of 65 bytes wrongly"),
        (engine, WindowMoved(digests[:9]), MoveWindow(0, 0, window), "9 bytes of digests, expected 8 for each of 1 tensors"),
        (engine, Prepared("digest", ("x",)), Prepare(plan_slice()), "transports for 0 sources"),
        (engine, Prepared("digest", ("x",)), opening, "transports for 0 sources"),
        (engine, Prepared("\x1b", ()), opening, "not printable"),
    ]
    for rank, answer, message, why in wrong:
        with pytest.raises(ProtocolError, match=why):
            await says(rank, answer, message, type(answer))


@virtual
async def test_a_round_over_connections() -> None:
    """The coordinator's side of two connections, with agents that drive the fakes at the other end."""
    world = World()
    world.add_trainers(1)  # stays in-process
    engine = world.add_engine("r", 0, 1)
    engine.disconnect()
    fake = FakeEngine(engine)

    near, _, _ = pair(right=fake.call)
    node = handle_of(fake.rank, near).node
    world.coordinator.join_engine(node)
    engine.connected = True
    trainer = rank_of(hello(role="trainer", name="trainer", offers=(Offer("memory", "x", HOST),)), "test")
    server = answer_agent(world.coordinator, trainer)
    published = await server(Publish(1), 60.0)
    assert isinstance(published, Published)
    assert published.result.ok, published.result
    with pytest.raises(VersionError):
        await server(Publish(1), 60.0)
    with pytest.raises(ProtocolError, match="may not send"):
        await server(Resume(), 60.0)
    with pytest.raises(ProtocolError, match="may not send"):
        await answer_agent(world.coordinator, fake.rank)(Publish(2), 60.0)
    world.check()
    # the wire is cut in the middle of a move
    world.delays["r/0", "move"] = 50.0
    asking = asyncio.ensure_future(server(Publish(2), 60.0))
    await asyncio.sleep(5.0)
    near.close(PeerLost("cut"))
    world.coordinator.leave(node)
    published = await asking
    assert isinstance(published, Published)
    assert asyncio.get_running_loop().time() < 6.0
    assert published.result.replicas[0].state == "lost"
    await world.coordinator.aclose()
