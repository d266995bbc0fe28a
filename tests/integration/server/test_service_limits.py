"""What a stranger can take from a coordinator is bounded: connections, time, requests, log; agents and rounds go on."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.server.service_support import Agent, RawAgent, engine_hello, fast, frame, joined, pump, trainer_hello
from tests.processes import ChildProcess

from weightsync.config import ClientSettings, Limits, ServerSettings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.errors import Aborted
from weightsync.protocol.calls import Calls
from weightsync.protocol.messages import Frame, Progress, Publish, Published, RoundResult, Welcome, encode
from weightsync.protocol.tokens import bearer, generate
from weightsync.server import app, http_connection
from weightsync.server.client import Client
from weightsync.server.connections import Connections
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

LIMITS = Limits(unauthenticated=8, connections=40, requests=3, hello_seconds=1.0)
UPGRADE = (
    b"GET /v1/agents HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
REQUEST = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=0.3, limits=LIMITS)) as server:
        yield server


def connect(server: BackgroundServer, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=5, source_address=(host, 0))


def is_open(sock: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the server still has this connection, ``seconds`` from now at the latest."""
    sock.settimeout(max(seconds, 0.01))
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return True
    except OSError:
        return False


def until(condition: object, seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if condition():  # type: ignore[operator]
            return True
        threading.Event().wait(0.02)
    return False


def test_strangers_are_few_and_push_out_themselves(server: BackgroundServer) -> None:
    with contextlib.ExitStack() as held, joined(fast(server.address), engine_hello("a")) as agent:
        lonely = held.enter_context(connect(server, "127.0.0.2"))
        flood = [held.enter_context(connect(server, "127.0.0.3")) for _ in range(30)]
        assert until(lambda: sum(map(is_open, flood)) <= LIMITS.unauthenticated, 0.8)
        assert is_open(lonely), "a flood from elsewhere pushed out somebody who had just come"
        assert is_open(flood[-1])
        assert not is_open(flood[0])
        assert agent.link.connected


def test_a_stranger_who_says_nothing_or_too_slowly_is_sent_away(server: BackgroundServer) -> None:
    with connect(server) as mute, connect(server) as slow:
        started = time.monotonic()
        ended: dict[socket.socket, float] = {}
        while len(ended) < 2 and time.monotonic() - started < 10:
            with contextlib.suppress(OSError):
                slow.send(b"X")  # a header that never ends
            ended |= {sock: time.monotonic() - started for sock in (mute, slow) if sock not in ended and not is_open(sock)}
            threading.Event().wait(0.05)
        assert len(ended) == 2
        assert all(LIMITS.hello_seconds * 0.5 < seconds < LIMITS.hello_seconds + 3 for seconds in ended.values()), ended


def test_headers_that_are_too_long_are_not_kept(server: BackgroundServer) -> None:
    with connect(server) as sock:
        sock.sendall(REQUEST)
        with contextlib.suppress(OSError):
            for _ in range(64):
                sock.sendall(b"X-Long: " + b"y" * 1000 + b"\r\n")
        assert not is_open(sock, 0.5) or sock.recv(12).startswith(b"HTTP/1.1 4")


def test_each_answer_to_a_stranger_is_the_last_on_its_connection(server: BackgroundServer) -> None:
    for path in ("/healthz", "/", "/v1/status"):
        with httpx.Client(trust_env=False) as client:
            assert client.get(server.url + path).headers["connection"] == "close"
    with Client(ClientSettings(coordinator=server.address)) as known:
        assert known.status().run == "run"
        assert known.status().run == "run"  # on the same connection


def test_a_known_connection_stays_however_long_it_is_quiet(server: BackgroundServer) -> None:
    with connect(server) as sock:
        for wait in (LIMITS.hello_seconds + 0.5, 0.0):
            sock.sendall(REQUEST + f"Authorization: Bearer {server.token}\r\n\r\n".encode())
            with sock.makefile("rb") as answer:
                assert answer.readline().startswith(b"HTTP/1.1 200")
                (length,) = [int(line.split(b":")[1]) for line in iter(answer.readline, b"\r\n") if b"content-length" in line]
                assert b'"run":"run"' in answer.read(length)
            threading.Event().wait(wait)


def test_connections_are_counted_in_all(server: BackgroundServer) -> None:
    known = REQUEST + f"Authorization: Bearer {server.token}\r\n\r\n".encode()
    with contextlib.ExitStack() as held:
        opened = []
        for _ in range(LIMITS.connections + 5):
            sock = held.enter_context(connect(server))
            with contextlib.suppress(OSError):
                sock.sendall(known)
                sock.recv(10_000)
            opened.append(sock)
        assert until(lambda: sum(map(is_open, opened)) <= LIMITS.connections, 2)
        assert sum(map(is_open, opened)) > LIMITS.connections - 5


def test_requests_under_way_are_counted(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release = threading.Semaphore(0), threading.Event()

    async def slow(self: Coordinator, *_: object) -> RoundResult:
        import asyncio

        entered.release()
        await asyncio.to_thread(release.wait, 20)
        raise Aborted("enough")

    monkeypatch.setattr(Coordinator, "seed", slow)
    with httpx.Client(base_url=server.url, headers=bearer(server.secrets.operator), trust_env=False) as http:
        asking = [threading.Thread(target=lambda: http.post("/v1/rounds", timeout=30)) for _ in range(LIMITS.requests)]
        for thread in asking:
            thread.start()
        assert all(entered.acquire(timeout=10) for _ in asking)
        refused = http.get("/v1/status")
        assert (refused.status_code, "WEIGHTSYNC_REQUESTS" in refused.json()["message"]) == (503, True)
        assert http.get("/healthz").status_code == 200
        release.set()
        for thread in asking:
            thread.join(10)
        assert http.get("/v1/status").status_code == 200


def test_requests_that_do_not_get_on_make_room(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token, as many bodies that do not come, or answers that nobody takes, as there may be requests at one time."""
    monkeypatch.setattr(http_connection, "_BODY_SECONDS", 0.5)
    monkeypatch.setattr(http_connection, "_STALLED_SECONDS", 0.5)
    monkeypatch.setattr(app, "document", lambda *_: "x" * (16 << 20))  # more than the kernel's buffers hold
    known = f"Host: x\r\nAuthorization: {bearer(server.secrets.operator)['Authorization']}\r\n".encode()
    body = b"POST /v1/rounds HTTP/1.1\r\n" + known + b"Content-Length: 9\r\n\r\n{"
    answer = b"GET /v1/openapi.json HTTP/1.1\r\n" + known + b"\r\n"

    def status() -> int:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, trust_env=False) as http:
            return http.get("/v1/status").status_code

    for hold in (body, answer):
        with contextlib.ExitStack() as held:
            for _ in range(LIMITS.requests):
                held.enter_context(connect(server)).sendall(hold)
            assert until(lambda: status() == 503)
            assert until(lambda: status() == 200)


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Nothing is written to the log."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert not written.getvalue()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET /v1/agents HTTP/1.1\r\nUpgrade: websocket\r\n\r\n",
        *(UPGRADE + early for early in (b"\x89\x80abcd", b"\x88\x80abcd", b"\xff\xff\xff\xff", b"\x81\x84abcd\xff\xff\xff\xff")),
    ],
)
def test_garbage_leaves_nothing_in_the_log(server: BackgroundServer, garbage: bytes) -> None:
    with quiet_log(), connect(server) as sock:
        sock.sendall(garbage)
        is_open(sock, 0.2)
        if garbage.startswith(UPGRADE):
            assert sock.recv(64).startswith(b"HTTP/1.1 401")


def test_connections_that_are_reset_leave_nothing_in_the_log(server: BackgroundServer) -> None:
    with quiet_log():
        for _ in range(5):
            with connect(server) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with Client(ClientSettings(coordinator=server.address)) as known:
            assert known.status().run == "run"


def test_two_connections_from_one_port_are_two(runtime: None) -> None:
    """A peer's port may be connected to each address of this machine. Mixed up, they were counted for ever: a lasting lock-out."""
    limits = Limits(unauthenticated=2, hello_seconds=1.0)
    with BackgroundServer(ServerSettings(port=0, host="0.0.0.0", token=generate(), limits=limits)) as server:

        def twice() -> None:
            with socket.socket() as one, socket.socket() as other:
                for sock, where in ((one, "127.0.0.1"), (other, "127.0.0.2")):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind(("127.0.0.1", 0) if sock is one else one.getsockname())
                    sock.connect((where, server.address.port))
                is_open(other, 0.1)

        for _ in range(2):
            twice()
        with contextlib.ExitStack() as held:
            opened = [
                held.enter_context(socket.create_connection(("127.0.0.1", server.address.port), timeout=5))
                for _ in range(limits.unauthenticated)
            ]
            assert is_open(opened[-1], 0.2)
            assert all(map(is_open, opened))


FLOOD = """
import selectors, socket, sys, time
where, seconds = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
request = b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer wrong\\r\\n\\r\\n"
ends, made = time.monotonic() + seconds, 0
while time.monotonic() < ends:
    held = []
    for _ in range(32):
        try:
            sock = socket.create_connection(where, timeout=1)
            sock.sendall(request)
            held.append(sock)
            made += 1
        except OSError:
            pass
    for sock in held:
        sock.close()
print(made)
"""


def test_rounds_go_on_under_a_flood(server: BackgroundServer, tmp_path: Path) -> None:
    numbers = iter(range(1, 1000))

    def rounds(trainer: Agent, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            started = time.monotonic()
            answer = trainer.link.call(Publish(next(numbers)), 20)
            assert isinstance(answer, Published)
            assert answer.result.ok
            taken.append(time.monotonic() - started)
        return taken

    settings = fast(server.address)
    with joined(settings, engine_hello("a")) as engine, joined(settings, trainer_hello()) as trainer:
        rounds(trainer, 3)
        quiet = rounds(trainer, 15)
        with ChildProcess("-c", FLOOD, server.address.host, server.address.port, 3.0) as flood:
            threading.Event().wait(0.5)
            loud = rounds(trainer, 15)
            made = int(flood.output())
        assert engine.link.connected
        assert trainer.link.connected
        assert engine.losses.empty()
    extra = statistics.median(loud) - statistics.median(quiet)
    print(f"{made} connections; a round without bytes: {statistics.median(quiet):.4f} s, flooded {statistics.median(loud):.4f} s")
    assert made > 100, "this was no flood"
    assert extra < 1.0, "each round waits for strangers"  # measured: see docs/benchmarks/security.md


def test_a_hello_frame_beyond_the_limit_says_so(runtime: None) -> None:
    limits = Limits(frame_bytes=100_000)
    with BackgroundServer(ServerSettings(port=0, limits=limits)) as server, RawAgent(server.address, server.token) as raw:
        assert b"x-weightsync-frame-bytes: 100000" in raw.head.lower()


@pytest.mark.parametrize(("encrypted", "a_second"), [(False, 100), (True, 20)])
def test_fewer_strangers_are_taken_in_where_each_costs_a_handshake(
    encrypted: bool, a_second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("weightsync.server.allowance.time.monotonic", lambda: now[0])
    connections = Connections(Limits(unauthenticated=1), encrypted)
    while not connections.acquire():
        continue
    count = 0
    while now[0] < 10:
        wait = connections.acquire()
        count += not wait
        now[0] += max(wait, 1e-6)
    assert count == pytest.approx(10 * a_second, abs=2)


@pytest.mark.parametrize(
    ("first", "chunk"),
    [
        (b"", frame(9, b"x" * 125) * 400),
        (b"", frame(10, b"x") * 2000),
        (frame(2, b"\x80", whole=False), frame(0, b"", whole=False) * 2000),
        (frame(2, b"\x80", whole=False), frame(0, b"a", whole=False) * 2000),
    ],
    ids=["pings", "pongs", "empty fragments", "fragments of a byte"],
)
def test_frames_that_are_no_message_are_few(runtime: None, first: bytes, chunk: bytes) -> None:
    """With the token, one connection could keep the loop busy and fill the memory with frames that count for nothing."""
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=2.0)) as server:
        settings = ClientSettings(coordinator=server.address)
        with joined(settings, engine_hello("honest")) as honest, RawAgent(server.address, server.token) as agent:
            agent.say(encode(engine_hello("hog", session="hog-session")))
            assert isinstance(agent.frame(), Welcome)
            agent.socket.sendall(first)
            sent = pump(agent, chunk, seconds=8.0)
            assert 0 < sent < 16 << 20, "it was never cut off"
            with Client(settings) as client:
                assert [replica.name for replica in client.status().replicas if not replica.missing] == ["honest"]
            assert honest.link.connected


def test_messages_come_at_a_bounded_rate(runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token, one connection took most of a core with reports of its progress."""
    count = 0

    def counted(self: Calls, frame: Frame) -> None:
        nonlocal count
        count += isinstance(frame, Progress)
        feed(self, frame)

    feed = Calls.feed
    monkeypatch.setattr(Calls, "feed", counted)
    with (
        BackgroundServer(ServerSettings(port=0, run="run", heartbeat=2.0)) as server,
        RawAgent(server.address, server.token) as agent,
    ):
        agent.say(encode(engine_hello("hog", session="hog-session")))
        assert isinstance(agent.frame(), Welcome)
        started = time.monotonic()
        pump(agent, frame(2, encode(Progress(1))) * 2000, seconds=1.0)
        assert 256 < count < 512 + 600 * (time.monotonic() - started)
