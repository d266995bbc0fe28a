"""Connections that are cancelled while they close."""

from __future__ import annotations

import asyncio

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from weightsync.protocol.dial import hang_up

SECONDS = 10.0


def test_a_connection_is_dropped_if_closing_it_is_cancelled() -> None:
    async def run() -> None:
        paused, over = asyncio.Event(), asyncio.Event()

        async def deaf(peer: ServerConnection) -> None:
            peer.transport.pause_reading()  # the close frame is never answered
            paused.set()
            await over.wait()
            peer.transport.abort()

        async with serve(deaf, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            socket = await connect(f"ws://127.0.0.1:{port}", proxy=None, close_timeout=SECONDS)
            await paused.wait()
            closing = asyncio.create_task(hang_up(socket))
            await asyncio.wait([closing], timeout=0.05)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert socket.transport.is_closing()
            over.set()

    asyncio.run(asyncio.wait_for(run(), SECONDS))
