"""What one connection can have the coordinator parse is bounded, in all and in each turn of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import h11
import pytest
from tests.integration.server.service_support import RawAgent, engine_hello, frame, pump
from websockets.server import ServerProtocol

from weightsync.config import ClientSettings, Limits, ServerSettings
from weightsync.coordinator.status import Status
from weightsync.protocol.messages import Welcome, encode
from weightsync.server.server import BackgroundServer
from weightsync.server.watch import Watch

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

CHALLENGE = "/v1/challenge?nonce=" + "0" * 32
TINY_CHUNKS = b"1\r\na\r\n" * 20_000
TINY_FRAMES = frame(2) * 40_000


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=5.0)) as server:
        yield server


@contextlib.contextmanager
def counted(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> Iterator[list[int]]:
    """How often the coordinator's side of a parser does something, in each turn of the loop."""
    turns, original = [0], getattr(kind, method)
    running = True

    def counting(self: h11.Connection | ServerProtocol, *args: object) -> object:
        if not isinstance(self, h11.Connection) or self.our_role is h11.SERVER:
            turns[-1] += 1
        return original(self, *args)

    loop = server._loop
    assert loop is not None

    def tick(loop: asyncio.AbstractEventLoop) -> None:
        turns.append(0)
        if running:
            loop.call_soon(tick, loop)

    monkeypatch.setattr(kind, method, counting)
    loop.call_soon_threadsafe(tick, loop)
    try:
        yield turns
    finally:
        running = False
        monkeypatch.undo()


def exchange(server: BackgroundServer, sent: bytes) -> bytes:
    """Send this at once. Returns everything that comes until the connection ends."""
    with socket.create_connection((server.address.host, server.address.port), timeout=5) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while more := sock.recv(1 << 16):
                answer += more
        return answer


def head(request: str, *lines: str) -> bytes:
    return "\r\n".join([f"{request} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", [CHALLENGE, "/healthz", "/"])
@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", f"Content-Length: {len(TINY_CHUNKS)}"])
def test_the_body_of_a_stranger_is_not_parsed(
    server: BackgroundServer, monkeypatch: pytest.MonkeyPatch, method: str, path: str, framing: str
) -> None:
    """Sixteen connections with chunks of a byte, read and dropped without a turn for others, stopped every round."""
    with counted(server, monkeypatch, h11.Connection, "next_event") as turns:
        answer = exchange(server, head(f"{method} {path}", framing) + TINY_CHUNKS)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1
    assert sum(turns) <= 2


def test_who_has_the_token_sends_no_chunks_either(server: BackgroundServer) -> None:
    known = f"Authorization: Bearer {server.token}"
    chunked = "Transfer-Encoding: chunked"
    assert exchange(server, head("POST /v1/rounds", known, chunked) + TINY_CHUNKS).startswith(b"HTTP/1.1 411")
    both = exchange(server, head("POST /v1/rounds", known, "Content-Length: 5", chunked) + b"0\r\n\r\n" + head("GET /v1/status"))
    assert both.startswith(b"HTTP/1.1 400")
    assert both.count(b"HTTP/1.1") == 1, "a request was hidden in the body of another"


def test_a_body_that_is_not_wanted_ends_the_connection_if_it_is_long(server: BackgroundServer) -> None:
    known = f"Authorization: Bearer {server.token}"
    short = head("POST /v1/nothing", known, "Content-Length: 70000") + b"x" * 70_000
    answer = exchange(server, short + head("POST /v1/nothing", known, f"Content-Length: {1 << 40}") + b"x" * (8 << 20))
    assert answer.count(b"HTTP/1.1 404") == 2


@pytest.mark.parametrize("lines", [200, 15_000])
def test_a_head_is_measured_before_it_is_parsed(server: BackgroundServer, lines: int) -> None:
    """One of 64 KiB, in one packet, took 40 ms: a hundred connections a second were all of the loop."""
    assert exchange(server, head("GET /healthz", *["a:"] * lines)).startswith(b"HTTP/1.1 431")
    assert exchange(server, head("GET /healthz", *["a:"] * 100)).startswith(b"HTTP/1.1 200")


def test_requests_that_come_together_leave_turns_to_others(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    request = head("GET /v1/nothing", f"Authorization: Bearer {server.token}")
    last = head("GET /v1/nothing", f"Authorization: Bearer {server.token}", "Connection: close")
    with counted(server, monkeypatch, h11.Connection, "next_event") as turns:
        assert exchange(server, request * 50 + last).count(b"HTTP/1.1 404") == 51
    assert max(turns) <= 3


@contextlib.contextmanager
def welcomed(server: BackgroundServer) -> Iterator[RawAgent]:
    with RawAgent(server.address, server.token) as agent:
        agent.say(encode(engine_hello("hog")))
        assert isinstance(agent.frame(), Welcome)
        yield agent


@pytest.mark.parametrize("join", [welcomed, lambda server: RawAgent(server.address, server.token)], ids=["joined", "no Hello"])
def test_a_socket_that_is_being_closed_is_not_parsed_for_long(
    server: BackgroundServer,
    monkeypatch: pytest.MonkeyPatch,
    join: Callable[[BackgroundServer], contextlib.AbstractContextManager[RawAgent]],
) -> None:
    """After an invalid message one connection took a whole core for ten seconds, by frames that nobody counted."""
    with counted(server, monkeypatch, ServerProtocol, "recv_frame") as turns, join(server) as agent:
        agent.say(b"no message")
        assert pump(agent, TINY_FRAMES, seconds=5.0) > 0, "it was never cut off"
    assert sum(turns) < 1000
    assert max(turns) <= 200


def test_frames_are_parsed_a_few_at_a_time(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 KiB of frames of 6 bytes were parsed in one go, and all of them kept."""
    with counted(server, monkeypatch, ServerProtocol, "recv_frame") as turns, welcomed(server) as agent:
        pump(agent, frame(10) * 40_000, seconds=5.0)
    assert sum(turns) > 4000
    assert max(turns) <= 200


@pytest.fixture
def four_places(runtime: None) -> Iterator[BackgroundServer]:
    limits = Limits(event_streams=4, hello_seconds=2.0)
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=0.5, limits=limits)) as server:
        yield server


@contextlib.contextmanager
def reader_of_events(server: BackgroundServer, host: str) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection from ``host`` that has asked for events, and how it was answered."""
    where = server.address.host, server.address.port
    with socket.create_connection(where, timeout=5, source_address=(host, 0)) as sock:
        sock.sendall(head("GET /v1/events", f"Authorization: Bearer {server.token}"))
        yield sock, sock.recv(12)


def test_a_reader_of_events_from_elsewhere_takes_the_place_of_one_of_many(four_places: BackgroundServer) -> None:
    """64 idle connections of one thief kept events from every rollout controller."""
    with contextlib.ExitStack() as held:
        places = [held.enter_context(reader_of_events(four_places, "127.0.0.2")) for _ in range(4)]
        assert [answer for _, answer in places] == [b"HTTP/1.1 200"] * 4
        assert held.enter_context(reader_of_events(four_places, "127.0.0.2"))[1] == b"HTTP/1.1 503"
        others = [held.enter_context(reader_of_events(four_places, "127.0.0.3")) for _ in range(3)]
        assert [answer for _, answer in others] == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503"]
        for sock, _ in places[:2]:
            last = b""
            while not last.endswith(b"0\r\n\r\n"):  # the empty chunk; the connection stays for another request
                more = sock.recv(1 << 16)
                assert more, last
                last += more
        for sock, _ in places[2:]:
            sock.settimeout(5)
            assert sock.recv(1 << 16)  # a heartbeat


async def test_a_controller_without_events_sees_the_status(four_places: BackgroundServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(4):
            assert held.enter_context(reader_of_events(four_places, "127.0.0.1"))[1] == b"HTTP/1.1 200"
        seen: list[Status] = []
        watch = Watch(ClientSettings(coordinator=four_places.address), seen.append, lambda name: None)
        try:
            await watch.started(10)
            assert seen[0].run == "run"
        finally:
            await watch.aclose()
