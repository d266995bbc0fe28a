"""Wires between agents and the coordinator: frames arrive late, in order, perhaps twice, or never; ends learn of a loss late.

A :class:`Wire` looks to the agent's side like a connection of the ``websockets`` client, and to the service's side like Starlette's
``WebSocket``, so the real ends of both run on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosedError

from weightsync.protocol.endpoint import FRAME_LIMIT_HEADER, SUBPROTOCOL
from weightsync.protocol.messages import Answer, Cancel, Failure, Progress, decode

if TYPE_CHECKING:
    from tests.simulation.ranks import Process
    from tests.simulation.world import World

__all__ = ["Wire"]

_DUPLICABLE = (Answer, Failure, Cancel, Progress)
_FRAME_BYTES = 1 << 26
_NOBODYS = Context()
"""What is on a wire belongs to no process: it arrives whatever its sender does meanwhile."""
_MOST_FRAMES = 20_000  # in one direction; more is a loop of two sides that never stop talking


class _Inbox:
    """What has arrived at one end; ``None`` is the connection's end."""

    def __init__(self) -> None:
        self._items: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False

    def put(self, data: bytes | None) -> None:
        if self.closed:
            return
        self.closed = data is None
        self._items.append(data)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> bytes | None:
        while not self._items:
            if self.closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class Wire:
    """One connection of ``agent`` to ``server`` (the coordinator's process)."""

    def __init__(self, world: World, agent: Process, server: Process) -> None:
        self.world, self.agent, self.server = world, agent, server
        self.cut = False
        self.code = 1006
        """With which the connection ends, for who reads its end."""
        self.slow_until = 0.0
        self.silent_until = 0.0
        self._inboxes = {"agent": _Inbox(), "server": _Inbox()}
        self._last = {"agent": 0.0, "server": 0.0}
        self._sent = 0
        self.client = _Client(self)
        self.socket = _Socket(self)
        world.wires.append(self)

    def send(self, to: str, data: bytes) -> None:
        """Put a frame on the wire. A wire that is cut takes it and loses it, as a kernel's buffer does."""
        world = self.world
        self._sent += 1
        if self._sent > _MOST_FRAMES:
            raise RuntimeError("two ends of a wire never stop talking")
        if self.cut:
            return
        now = world.loop.time()
        delay = world.random.expovariate(1 / 0.002) + 0.0005
        if now < self.slow_until:
            delay += world.random.uniform(0.1, 2.0)
        sender, receiver = (self.agent, self.server) if to == "server" else (self.server, self.agent)
        at = max(now, sender.stalled_until, self.silent_until) + delay
        at = max(at, receiver.stalled_until, self._last[to] + 1e-6)
        copies = 1
        if world.duplicating and world.random.random() < 0.2 and isinstance(decode(data), _DUPLICABLE):
            copies = 2
            world.hit("duplicated frame", self.agent)
        for _ in range(copies):
            self._last[to] = at
            world.loop.call_at(at, self._deliver, to, data, context=_NOBODYS)
            at += 0.0001

    def _deliver(self, to: str, data: bytes) -> None:
        if not self.cut:
            self._inboxes[to].put(data)
            self.world.stepped()

    def end(self, to: str, after: float = 0.0) -> None:
        """Let one end learn, ``after`` seconds, that the connection is gone."""
        self.world.loop.call_later(after, self._inboxes[to].put, None, context=_NOBODYS)

    def lose(self, agent_after: float, server_after: float) -> None:
        """Nothing crosses from now on; each end learns of it in its own time."""
        if not self.cut:
            self.cut = True
            self.end("agent", agent_after)
            self.end("server", server_after)

    def close(self, by: str, code: int = 1006) -> None:
        """One end closes in good order, with a ``code`` for the other: what was sent before still arrives."""
        self.code = self.code if self.cut else code
        other = "server" if by == "agent" else "agent"
        self._inboxes[by].put(None)
        if not self.cut:
            at = max(self._last[other], self.world.loop.time()) + 0.002
            self.world.loop.call_at(at, self._inboxes[other].put, None, context=_NOBODYS)

    def closed(self, side: str) -> bool:
        """Whether this end knows that the connection is over."""
        return self._inboxes[side].closed

    async def get(self, side: str) -> bytes | None:
        """The next frame at this end; ``None`` when the connection is over."""
        return await self._inboxes[side].get()


class _Client:
    """The agent's end, as ``websockets`` has it."""

    subprotocol = SUBPROTOCOL

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.response = SimpleNamespace(headers={FRAME_LIMIT_HEADER: str(_FRAME_BYTES)})

    async def send(self, data: bytes) -> None:
        if self._wire.closed("agent"):
            raise ConnectionClosedError(None, None)
        self._wire.send("server", data)

    async def recv(self) -> bytes:
        data = await self._wire.get("agent")
        if data is None:
            raise ConnectionClosedError(None, None)
        return data

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self._wire.close("agent", code)


class _Socket:
    """The service's end, as Starlette has it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.scope = {"subprotocols": [SUBPROTOCOL]}

    async def accept(self, subprotocol: str, headers: Any) -> None:
        """Nothing to do: the wire stands."""

    async def receive(self) -> dict[str, object]:
        data = await self._wire.get("server")
        if data is None:
            return {"type": "websocket.disconnect", "code": self._wire.code, "reason": None}
        return {"type": "websocket.receive", "bytes": data}

    async def send_bytes(self, data: bytes) -> None:
        if self._wire.closed("server"):
            raise WebSocketDisconnect(1006)
        self._wire.send("agent", data)

    async def send_denial_response(self, response: object) -> None:
        self._wire.close("server")

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self._wire.close("server")


def connector(world: World, current: Callable[[], Process]) -> Callable[..., Any]:
    """What stands in for ``websockets.connect`` in :mod:`weightsync.protocol.dial`."""

    async def connect(url: str, **_: object) -> Any:
        process = current()
        await asyncio.sleep(world.random.uniform(0.0005, 0.003))
        coordinator = world.coordinator_of(process)
        if coordinator is None or world.loop.time() < process.unreachable_until:
            raise ConnectionRefusedError("nobody listens")
        wire = Wire(world, process, coordinator)
        process.wires.append(wire)
        coordinator.accept(wire)
        return wire.client

    return connect
