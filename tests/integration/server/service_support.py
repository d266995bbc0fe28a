"""Ranks without tensors for the tests of the service: what they say, and agents that answer like a trainer and an engine."""

from __future__ import annotations

import base64
import os
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from weightsync.config import Address, ClientSettings, Limits, Secret, ServerSettings, Timeouts
from weightsync.deadline import Deadline
from weightsync.model import Layout, Manifest, TensorSpec, Version
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.endpoint import AGENTS_PATH, SUBPROTOCOL
from weightsync.protocol.messages import (
    PROTOCOL,
    Body,
    Done,
    Frame,
    Hello,
    Host,
    Move,
    Moved,
    Offer,
    Place,
    Placed,
    Prepare,
    Prepared,
    Update,
    Updated,
    Welcome,
    decode,
    encode,
)
from weightsync.protocol.worker import received_for
from weightsync.server.server import BackgroundServer

HERE = Host("host", "memory")
MANIFEST = Manifest([TensorSpec("w", (2, 2), "float32")])
LAYOUT = Layout(
    MANIFEST,
    np.zeros(1, np.int32),
    np.zeros((1, 2), np.int64),
    np.full((1, 2), 2, np.int64),
    np.zeros(1, np.int32),
    np.zeros(1, np.int64),
    np.array([[8, 4]], np.int64),
    (16,),
)
DIGESTS = np.array([7], "<u8").tobytes()


SOON = 1.0
"""Seconds within which a call must fail once the other side is gone."""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime directory of this test's own, where coordinators leave their tokens."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    """A coordinator that notices things soon and takes three agents."""
    limits = Limits(agents=3, hello_seconds=0.5, frame_bytes=1 << 20)
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=0.3, limits=limits)) as server:
        yield server


@pytest.fixture
def settings(server: BackgroundServer) -> ClientSettings:
    """How its agents find it."""
    return fast(server.address)


def trainer_hello(
    rank: int = 0,
    world_size: int = 1,
    session: str = "trainer-session",
    run: str = "",
    published: int = -1,
    key: bytes = b"",
) -> Hello:
    """A trainer rank that holds the whole tensor."""
    return Hello(
        protocol=PROTOCOL,
        run=run,
        role="trainer",
        name="trainer",
        rank=rank,
        world_size=world_size,
        session=session,
        host=HERE,
        pid=1,
        manifest=MANIFEST.tensors,
        layout=LAYOUT.to_columns(),
        offers=(Offer("none", "nowhere", HERE),),
        key=key,
        published=published,
    )


def engine_hello(name: str = "replica", session: str = "engine-session", run: str = "", serving: Version | None = None) -> Hello:
    """An engine rank that holds the whole tensor."""
    return Hello(
        protocol=PROTOCOL,
        run=run,
        role="engine",
        name=name,
        rank=0,
        world_size=1,
        session=session,
        host=HERE,
        pid=1,
        manifest=MANIFEST.tensors,
        layout=LAYOUT.to_columns(),
        transports=("none",),
        serving=serving,
    )


_MOVED = Moved(16, DIGESTS, 0.0, 0.0, 0.0, "installed")


def obey(body: Body, timeout: float) -> Body:
    """Do as a rank does, without tensors: every answer that a round needs."""
    match body:
        case Place():
            return Placed(DIGESTS, 0.0)
        case Prepare(plan=plan):
            return Prepared(plan.digest, ("none",))
        case Move():
            return _MOVED
        case Update():
            return Updated(_MOVED, True, 0.0, 0.0)
        case _:
            return Done()


def fast(address: Address, token: Secret | None = None) -> ClientSettings:
    """Settings that notice things soon."""
    return ClientSettings(coordinator=address, token=token, timeouts=Timeouts(connect=5.0, heartbeat=0.3, reconnect=0.2))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Agent:
    """A link whose calls, welcomes and losses can be waited for."""

    def __init__(self, settings: ClientSettings, hello: Callable[[], Hello], handle: Callable[[Body, float], Body] = obey) -> None:
        self.bodies: queue.Queue[Body] = queue.Queue()
        self.welcomes: queue.Queue[Welcome] = queue.Queue()
        self.losses: queue.Queue[str] = queue.Queue()
        self.hellos = 0

        def said() -> Hello:
            self.hellos += 1
            return hello()

        def handled(body: Body, timeout: float) -> Body:
            self.bodies.put(body)
            return handle(body, timeout)

        self.link = CoordinatorConnection(
            settings,
            hello=said,
            receive=received_for(handled),
            on_welcome=self.welcomes.put,
            on_lost=self.losses.put,
            name=hello().name,
        )

    def wait_for(self, kind: type[Body], timeout: float = 10.0) -> Body:
        """The next body of this kind that arrives."""
        deadline = Deadline(timeout)
        while True:
            body = self.bodies.get(timeout=deadline.remaining(f"waiting for {kind}"))
            if isinstance(body, kind):
                return body


@contextmanager
def joined(settings: ClientSettings, hello: Hello, handle: Callable[[Body, float], Body] = obey) -> Iterator[Agent]:
    """A connected agent."""
    agent = Agent(settings, lambda: hello, handle)
    with agent.link:
        agent.link.connect()
        yield agent


class RawAgent:
    """A WebSocket client that does only what it is told: no pong, no close, any bytes at all."""

    def __init__(self, address: Address, token: str, subprotocol: str = SUBPROTOCOL) -> None:
        self.socket = socket.create_connection((address.host, address.port), timeout=10)
        key = base64.b64encode(os.urandom(16)).decode()
        offered = f"Sec-WebSocket-Protocol: {subprotocol}\r\n" if subprotocol else ""
        self.socket.sendall(
            f"GET {AGENTS_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            f"Sec-WebSocket-Version: 13\r\nAuthorization: Bearer {token}\r\n{offered}\r\n".encode()
        )
        self._rest = b""
        while b"\r\n\r\n" not in self._rest:
            self._rest += self._more()
        self.head, _, self._rest = self._rest.partition(b"\r\n\r\n")

    def _more(self) -> bytes:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError
        return data

    def __enter__(self) -> RawAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, frame: Frame | bytes, opcode: int = 2) -> None:
        """Send one frame, masked with zeros."""
        data = frame if isinstance(frame, bytes) else encode(frame)
        length = struct.pack("!BB", 0x80 | opcode, 0x80 | 127) + struct.pack("!Q", len(data))
        self.socket.sendall(length + b"\0\0\0\0" + data)

    def hear(self) -> tuple[int, bytes]:
        """Opcode and payload of the next WebSocket frame."""

        def take(count: int) -> bytes:
            while len(self._rest) < count:
                self._rest += self._more()
            taken, self._rest = self._rest[:count], self._rest[count:]
            return taken

        first, length = take(2)
        if length == 126:
            (length,) = struct.unpack("!H", take(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", take(8))
        return first & 15, take(length)

    def frame(self) -> Frame:
        """The next weightsync frame, past pings."""
        while True:
            opcode, payload = self.hear()
            if opcode == 2:
                return decode(payload)
            if opcode == 8:
                raise EOFError(payload)

    def close_code(self) -> int:
        """Of the close frame that comes next, past everything else."""
        while True:
            opcode, payload = self.hear()
            if opcode == 8:
                return int(struct.unpack("!H", payload[:2])[0])


def frame(opcode: int, payload: bytes = b"", whole: bool = True) -> bytes:
    """A short WebSocket frame of an agent, masked with zeros."""
    return bytes([0x80 * whole | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


def pump(agent: RawAgent, chunk: bytes, seconds: float) -> int:
    """Send this over and over, and read nothing; how many bytes were taken until the connection was cut, or the time was up."""
    agent.socket.settimeout(0.2)
    ends, sent = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        try:
            sent += agent.socket.send(chunk)
        except TimeoutError:
            continue
        except OSError:
            return sent
    return -sent
