"""A network between engine ranks and all others that can be cut, healed and slowed, anywhere: every byte passes this process.

Owners and the coordinator listen on one loopback address; engine ranks know them by another, with the same ports, which is the
relay's. What :mod:`tests.faults.network` does with a cable, this does with connections: it needs no rights and no kernel
module, and unlike a cable it can also break connections while the network goes on.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weightsync.deadline import Deadline

__all__ = ["Relay"]

_CHUNK = 64 << 10
_DELAY = 0.02
_LOST, _AGAIN = 0.05, 0.2  # one chunk in twenty is late, as if it had been lost and sent again
_SECONDS = 10.0
_RESET = struct.pack("ii", 1, 0)


class Relay:
    """Passes connections from :attr:`known_as` on to :attr:`host`, port by port. Its own thread; all methods from another one."""

    namespace: None = None
    host = "127.0.0.1"
    """Where the parties listen."""
    known_as = "127.0.0.9"
    """What engine ranks are told instead."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._how: str | None = None
        self._random = random.Random(1)
        self._servers: dict[int, asyncio.Server] = {}
        self._ends: set[asyncio.StreamWriter] = set()
        self._carriers: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightsync-relay", daemon=True)

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Relay]:
        """Running inside."""
        relay = cls()
        relay._thread.start()
        try:
            yield relay
        finally:
            asyncio.run_coroutine_threadsafe(relay._end(), relay._loop).result(_SECONDS)
            relay._loop.call_soon_threadsafe(relay._loop.stop)
            relay._thread.join(_SECONDS)
            relay._loop.close()

    def free_port(self) -> int:
        """A port for a party, which from now on is passed on to."""
        deadline = Deadline(_SECONDS)
        while True:
            with socket.create_server((self.host, 0)) as found:
                port: int = found.getsockname()[1]
            try:
                asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result(deadline.remaining("finding a port"))
            except OSError:
                continue  # taken at the other address
            return port

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def drop(self) -> None:
        """Break every connection there is; new ones are passed on as before."""
        self._loop.call_soon_threadsafe(self._reset)

    def heal(self) -> None:
        """Everything arrives, what was held up included, and at once."""
        self._how = None
        self._loop.call_soon_threadsafe(self._flows.set)

    def impair(self, how: str) -> None:
        """``delay`` everything by 20 ms, or hold up a twentieth by 200 ms (``loss``)."""
        self._how = how

    async def _listen(self, port: int) -> None:
        async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._pass(port, reader, writer)

        self._servers[port] = await asyncio.start_server(passed, self.known_as, port, limit=_CHUNK)

    async def _pass(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        try:
            await self._flows.wait()
            try:
                behind, beyond = await asyncio.open_connection(self.host, port, limit=_CHUNK)
            except OSError:
                return
            self._ends.add(beyond)
            try:
                both = [asyncio.ensure_future(self._carry(*way)) for way in ((reader, beyond), (behind, writer))]
                self._carriers.update(both)
                await asyncio.wait(both)
                self._carriers.difference_update(both)
            finally:
                self._ends.discard(beyond)
                beyond.close()
        finally:
            self._ends.discard(writer)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._how == "delay":
                    await asyncio.sleep(_DELAY)
                elif self._how == "loss" and self._random.random() < _LOST:
                    await asyncio.sleep(_AGAIN)
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            await self._flows.wait()
            if writer.can_write_eof():
                writer.write_eof()
            return
        writer.transport.abort()  # one side broke off: so does the other

    def _reset(self) -> None:
        for end in list(self._ends):
            sock = end.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.transport.abort()

    async def _end(self) -> None:
        self._flows.set()
        for server in self._servers.values():
            server.close()
        self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_SECONDS)
