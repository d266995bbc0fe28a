"""What a round's messages cost alone: bare WebSockets, as many, in the same processes and threads, nothing done with them.

``python -m benchmarks.control_floor CONFIG`` is one process of agents' ends, each on a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from contextlib import ExitStack

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from weightsync_bench.peer import Peer

__all__ = ["EXCHANGES", "floor_seconds", "main"]

EXCHANGES = 1
"""Of a round, with each replica of one rank: the update."""
_FRAME = bytes(80)
_SECONDS = 60.0


def floor_seconds(count: int, processes: int, rounds: int) -> float:
    """The median time of :data:`EXCHANGES` messages to each of ``count`` echoes and back, each time to all at once."""
    return asyncio.run(_measure(count, processes, rounds))


async def _measure(count: int, processes: int, rounds: int) -> float:
    sockets: list[ServerConnection] = []
    complete = asyncio.Event()

    async def take(socket: ServerConnection) -> None:
        sockets.append(socket)
        if len(sockets) == count:
            complete.set()
        await socket.wait_closed()

    async with serve(take, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        with ExitStack() as owned:
            for rank in range(processes):
                config = {"role": "floor", "rank": rank, "count": count // processes, "port": port}
                owned.enter_context(Peer("benchmarks.control_floor", config))
            async with asyncio.timeout(_SECONDS):
                await complete.wait()
                taken = [await _round(sockets) for _ in range(rounds + 1)]
    return statistics.median(taken[1:])


async def _round(sockets: list[ServerConnection]) -> float:
    started = time.perf_counter()
    for _ in range(EXCHANGES):
        for socket in sockets:
            await socket.send(_FRAME)
        for socket in sockets:
            await socket.recv()
    return time.perf_counter() - started


async def _echo(port: int) -> None:
    async with connect(f"ws://127.0.0.1:{port}/", compression=None, ping_interval=None, proxy=None) as socket:
        try:
            while True:
                await socket.send(await socket.recv())
        except ConnectionClosed:
            return


def main() -> None:
    """Echo on ``count`` connections until standard input ends."""
    config = json.loads(sys.argv[1])
    for _ in range(config["count"]):
        threading.Thread(target=lambda: asyncio.run(_echo(config["port"])), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
