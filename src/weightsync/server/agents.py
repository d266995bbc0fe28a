"""The agents' socket: one connection a rank, from its Hello to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, cast

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import CloseCode

from weightsync.config import ServerSettings
from weightsync.coordinator.agent_messages import answer_agent, rank_of
from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.coordinator.ranks import AdapterRank, EngineRank, TrainerRank
from weightsync.deadline import within
from weightsync.errors import PeerLost, ProtocolError, WeightSyncError, readable, to_wire
from weightsync.protocol.calls import Calls
from weightsync.protocol.endpoint import FRAME_LIMIT_HEADER, SUBPROTOCOL
from weightsync.protocol.messages import Body, Confirmed, Frame, Hello, Refused, Welcome, decode, encode
from weightsync.server.problems import problem

_log = logging.getLogger(__name__)

ADAPTERS = "weightsync.limits"
"""The key of a connection's scope under which the names of adapters are to which its token is limited."""

_REASON_BYTES = 120  # RFC 6455: a close frame carries at most 123 bytes of reason
_LIMITED_PART = 8  # of the places for agents, that one limited token may take
_RETURN_SECONDS = 1.0  # for calls whose answers have arrived when their agent leaves


class AgentSockets:
    """All agents' connections of one coordinator. A peer that gets here has presented the token."""

    def __init__(self, coordinator: Coordinator, settings: ServerSettings) -> None:
        self._coordinator, self._settings = coordinator, settings
        self._connections: dict[asyncio.Task[None], WebSocket] = {}
        self._limited = Counter[str]()
        """Connections with each token, by the patterns to which it is limited."""
        self._welcomed: set[_Connection] = set()
        self._closing: str | None = None

    async def endpoint(self, socket: WebSocket) -> None:
        """Serve one connection. The subprotocol, the number of agents and the Hello's time are checked before anything else."""
        limits = self._settings.limits
        if SUBPROTOCOL not in socket.scope["subprotocols"]:
            offered = ", ".join(socket.scope["subprotocols"]) or "nothing"
            message = f"this coordinator speaks {SUBPROTOCOL}, the agent offers {offered}: install the same weightsync on both"
            await socket.send_denial_response(problem(HTTPStatus.UPGRADE_REQUIRED, "ProtocolError", message))
            return
        if self._closing is not None or len(self._connections) >= limits.agents:
            why = self._closing or f"{limits.agents} agents are connected already (WEIGHTSYNC_AGENTS)"
            await socket.send_denial_response(problem(HTTPStatus.SERVICE_UNAVAILABLE, "MembershipError", why))
            return
        adapters = socket.scope.get(ADAPTERS, "")
        if adapters and self._limited[adapters] >= max(limits.agents // _LIMITED_PART, 1):
            message = f"{self._limited[adapters]} agents with the token for {adapters} are connected already"
            await socket.send_denial_response(problem(HTTPStatus.SERVICE_UNAVAILABLE, "MembershipError", message))
            return
        task = cast("asyncio.Task[None]", asyncio.current_task())  # every connection is served by one
        self._connections[task] = socket
        self._limited[adapters] += 1
        try:
            await socket.accept(SUBPROTOCOL, [(FRAME_LIMIT_HEADER.lower().encode(), str(limits.frame_bytes).encode())])
            await self._greet(socket)
        except (WebSocketDisconnect, PeerLost):
            return  # before it was welcomed: it was never registered
        finally:
            del self._connections[task]
            self._limited[adapters] -= 1
            self._limited += Counter()  # forgets what is zero

    async def aclose(self, reason: str) -> None:
        """Close every connection with ``reason`` and take no new one; returns when all have ended. Safe twice.

        Answers that are under way are sent first, so that a caller learns more than that its connection closed.
        """
        self._closing = reason
        async with _at_most(self._settings.shutdown_seconds):
            for connection in list(self._welcomed):
                await connection.calls.drained()
        tasks = list(self._connections)
        for socket in list(self._connections.values()):
            await _close(socket, CloseCode.GOING_AWAY, reason)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._settings.shutdown_seconds)
            for task in late:
                task.cancel()

    async def _greet(self, socket: WebSocket) -> None:
        limit = self._settings.limits.hello_seconds
        try:
            hello, run = await _first_frame(socket, limit), self._coordinator.settings.run
            # An agent that names no run takes the coordinator's.
            hello = msgspec.structs.replace(hello, run=hello.run or run)
            # A large layout takes a while to check.
            rank = await asyncio.to_thread(rank_of, hello, run, socket.scope.get(ADAPTERS, ""))
            connection = _Connection(self._coordinator, socket, rank, self._settings.limits.frame_bytes)
            if isinstance(rank, AdapterRank):
                self._coordinator.loras.join(connection)
                welcome = Welcome(rank.member, run)
            elif isinstance(rank, TrainerRank):
                welcome = Welcome(rank.member, run, last=self._coordinator.join_trainer(connection))
            else:
                welcome = Welcome(rank.member, run, refusal=self._coordinator.join_engine(connection))
            link = self._coordinator.link_of(rank.member)
        except WeightSyncError as error:
            await self._refuse(socket, error)
            return
        _log.info("%s joined from %s (process %d)", rank.member, hello.host.name, hello.pid)
        reason = "its connection closed"
        try:
            self._welcomed.add(connection)
            await connection.welcome(msgspec.structs.replace(welcome, credential=link.credential, count=link.count))
            reason = await connection.read(link)
        except PeerLost as error:
            reason = str(error)
        except asyncio.CancelledError:
            if connection.dismissed is None:
                raise
            reason = connection.dismissed
            _log.warning("%s: closing the connection of process %d on %s: %s", rank.member, hello.pid, hello.host.name, reason)
            async with _at_most(limit):
                await _close(socket, CloseCode.POLICY_VIOLATION, reason)
        finally:
            self._welcomed.discard(connection)
            reason = self._closing or reason
            connection.calls.close(PeerLost(f"{rank.member} is gone: {reason}"))
            self._coordinator.leave(connection, reason, connection.said_goodbye)
            _log.info("%s left: %s", rank.member, reason)

    async def _refuse(self, socket: WebSocket, error: WeightSyncError) -> None:
        _log.warning("refused an agent: %s", readable(str(error)))
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.send_bytes(encode(Refused(*to_wire(error))))
        await _close(socket, CloseCode.POLICY_VIOLATION, str(error))


@contextlib.asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    """Give up quietly after ``seconds``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield


class _Connection:
    """A rank whose agent has joined, as the coordinator sees it: a :class:`~weightsync.coordinator.ranks.RankNode`."""

    def __init__(self, coordinator: Coordinator, socket: WebSocket, rank: TrainerRank | EngineRank, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._coordinator, self._socket, self._member = coordinator, socket, rank.member
        self.rank: Any = rank
        self._answer = answer_agent(coordinator, rank)
        self.calls = Calls(self.send, self.handle, self.progress, peer=rank.member)
        self.call, self.notify = self.calls.call, self.calls.notify
        self._welcomed = asyncio.Event()
        self._task = asyncio.current_task()
        self.dismissed: str | None = None
        """Why this connection is being ended by the coordinator; nothing that still comes over it counts."""
        self.said_goodbye = False
        """Whether the agent closed the connection on purpose, as its ``close()`` does."""

    async def welcome(self, frame: Welcome) -> None:
        """Joining may have started a round already; its calls wait until the agent has read this."""
        await self._put(frame)
        self._welcomed.set()

    def dismiss(self, reason: str) -> None:
        """Another connection took this one's place, or it was revoked: close it, with this reason."""
        if self.dismissed is None and self._task is not None:
            self.dismissed = reason
            self._task.cancel()

    async def handle(self, body: Body, timeout: float) -> Body:
        """What the agent asks of the coordinator."""
        if self.dismissed is not None:
            raise PeerLost(f"{self._member}: {self.dismissed}")
        return await self._answer(body, timeout)

    async def send(self, frame: Frame) -> None:
        """Raises :class:`~weightsync.errors.PeerLost` if the agent is gone."""
        await self._welcomed.wait()  # a call's own deadline bounds this
        await self._put(frame)

    async def _put(self, frame: Frame) -> None:
        try:
            data = encode(frame)
            if len(data) > self._most_bytes:  # the agent would end its connection
                raise ProtocolError(
                    f"a message to {self._member} has {len(data):,} bytes, and {self._most_bytes:,} are allowed "
                    "(WEIGHTSYNC_FRAME_BYTES, on both sides)"
                )
            await self._socket.send_bytes(data)
        except (WebSocketDisconnect, RuntimeError) as error:  # RuntimeError: Starlette's word for a socket that is closed here
            raise PeerLost(f"{self._member} is gone: {str(error) or 'its connection closed'}") from None

    def progress(self, nbytes: int) -> None:
        """The agent reports bytes in place."""
        if isinstance(self.rank, EngineRank) and self.dismissed is None:
            self._coordinator.progress(self.rank, nbytes)

    async def read(self, link: RankHandle[Any]) -> str:
        """Feed frames to the calls until the connection ends, and say why it did."""
        try:
            while True:
                frame = await _receive(self._socket)
                link.confirmed = True
                if not isinstance(frame, Confirmed):
                    self.calls.feed(frame)
        except WebSocketDisconnect as gone:
            self.said_goodbye = gone.code == CloseCode.NORMAL_CLOSURE
            async with _at_most(_RETURN_SECONDS):
                await self.calls.returned()  # an answer may have arrived together with the end of the connection
            return readable(gone.reason or "", _REASON_BYTES) or "it disappeared: killed, crashed, hung or cut off from the network"
        except ProtocolError as error:
            _log.warning("%s: %s", self._member, error)
            await _close(self._socket, CloseCode.PROTOCOL_ERROR, str(error))
            return f"it broke the protocol: {error}"


async def _first_frame(socket: WebSocket, limit: float) -> Hello:
    async with within(limit, lambda: f"no Hello within {limit:g} s of connecting"):
        hello = await _receive(socket)
    if not isinstance(hello, Hello):
        raise ProtocolError(f"an agent says Hello first, not {type(hello).__name__}")
    return hello


async def _receive(socket: WebSocket) -> Frame:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", CloseCode.ABNORMAL_CLOSURE), message.get("reason"))
    data = message.get("bytes")
    if data is None:
        raise ProtocolError("a text frame; weightsync frames are binary")
    return decode(data)


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):  # it may have gone by itself
        await socket.close(code, reason.encode()[:_REASON_BYTES].decode("utf-8", "ignore"))
