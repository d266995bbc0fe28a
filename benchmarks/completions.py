"""How long a finished rollout takes to reach the trainer: through a real coordinator, at a steady rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import msgspec

from weightsync.config import Address, ClientSettings, Secret, ServerSettings
from weightsync.errors import ConfigurationError, DeadlineExceeded
from weightsync.server.server import BackgroundServer
from weightsync_bench.peer import Peer, serve
from weightsync_callbacks.mail import CompletionReceiver, CompletionSender

__all__ = ["CompletionCase", "completion_push_case"]

_RATE = 1000
_SECONDS = 3.0
_GOAL_SECONDS = 0.005
_LIMIT_SECONDS = 60.0
_START_SECONDS = 30.0


class CompletionCase(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from ``send`` to the signal at the trainer, at ``rate`` completions a second."""

    name: str
    seconds: float
    """The median."""
    goal_seconds: float
    p99_seconds: float
    rate: float
    """Completions a second, as they arrived."""
    floor: str
    floor_seconds: float


async def _measure(settings: ClientSettings) -> CompletionCase:
    sent: dict[str, float] = {}
    took: list[float] = []
    total = int(_RATE * _SECONDS)
    began = 0.0

    async def hear(receiver: CompletionReceiver) -> float:
        async for signal in receiver:
            now = time.perf_counter()
            if signal.id in sent:
                took.append(now - sent[signal.id])
            if len(took) == total:
                return now
            if signal.number % 256 == 0:
                await receiver.acknowledge(signal)
        raise DeadlineExceeded("the coordinator ended the stream")

    async with CompletionReceiver(settings) as receiver, CompletionSender(settings) as sender:
        hearing = asyncio.create_task(hear(receiver))
        sender.send({"tokens": [0]})  # both connections are made before the clock runs
        await asyncio.sleep(0.3)
        value = {"tokens": list(range(64))}
        began = time.perf_counter()
        for number in range(total):
            due = began + number / _RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            name = f"rollout-{number}"
            sent[name] = time.perf_counter()
            sender.send(value, name)
        ended = await asyncio.wait_for(hearing, _LIMIT_SECONDS)
    floors = []
    async with httpx.AsyncClient(base_url=settings.coordinator.url, trust_env=False) as http:
        for _ in range(50):
            start = time.perf_counter()
            await http.get("/healthz")
            floors.append(time.perf_counter() - start)
    took.sort()
    return CompletionCase(
        name=f"completion push, {_RATE} a second",
        seconds=took[len(took) // 2],
        goal_seconds=_GOAL_SECONDS,
        p99_seconds=took[int(len(took) * 0.99)],
        rate=total / (ended - began),
        floor="one GET /healthz",
        floor_seconds=sorted(floors)[len(floors) // 2],
    )


def completion_push_case() -> CompletionCase:
    """Measure with the coordinator in a process of its own; the sender and the trainer share one event loop, and one clock."""
    with Peer("benchmarks.completions", {"role": "coordinator", "rank": 0}) as coordinator:
        url, token = coordinator.hear(_START_SECONDS)
        return asyncio.run(_measure(ClientSettings(coordinator=Address.parse(url), token=Secret(token))))


def _no_command(name: str) -> Callable[..., object]:
    raise ConfigurationError(f"the coordinator of the benchmark knows no command {name!r}")


def _serve() -> None:
    with BackgroundServer(ServerSettings(port=0, mounts=("rollouts",))) as server:
        serve(_no_command, hello=(server.url, server.token))


if __name__ == "__main__":
    _serve()
