"""Engines without a network, for the tests of the controller: they say what a test scripts, and remember what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from weightsync.coordinator.status import ReplicaStatus, Status
from weightsync.errors import PeerLost
from weightsync_rollouts import Chunk, Sampling

STOP = 99


class Engine:
    """One replica: makes the tokens 1, 2, 3... after a prompt, each with ``version``, one at a time as ``permits`` allow."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.permits = asyncio.Semaphore(0)
        self.asked: list[tuple[list[int], int]] = []
        self.cancelled = 0
        self.dead = False
        self.running = self.made = 0
        self.abort = asyncio.Event()


class Engines:
    """A :class:`~weightsync_rollouts.Generation` over several engines, by URL."""

    def __init__(self, engines: dict[str, Engine], *, free: bool = False) -> None:
        self.engines, self.free = engines, free

    async def stream(self, url: str, prompt: Sequence[int], budget: int, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        engine = self.engines[url.removeprefix("http://")]
        engine.asked.append((list(prompt), budget))
        engine.running += 1
        try:
            for number in range(budget):
                if engine.dead:
                    raise PeerLost(f"{url} is dead")
                if not self.free:
                    permit, abort = asyncio.create_task(engine.permits.acquire()), asyncio.create_task(engine.abort.wait())
                    try:
                        await asyncio.wait([permit, abort], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        permit.cancel()
                        abort.cancel()
                    if engine.dead:
                        raise PeerLost(f"{url} died")
                    if engine.abort.is_set():
                        yield Chunk(finish_reason="abort")
                        return
                token = len(prompt) + number
                engine.made += 1
                yield Chunk((token,), (-0.5 * token,), (engine.version,))
            yield Chunk(finish_reason="length")
        except (asyncio.CancelledError, GeneratorExit):
            engine.cancelled += 1
            raise
        finally:
            engine.running -= 1

    async def aclose(self) -> None:
        pass


def status(last: int, epoch: int = 1, **replicas: int | tuple[int, int] | None) -> Status:
    """A coordinator at version ``last``; a replica with a version is loaded, one without is updating.

    A version is a number of ``epoch``, or an epoch and a number.
    """
    served = {name: (epoch, found) if isinstance(found, int) else found or (None, None) for name, found in replicas.items()}
    return Status(
        run="run", last=last, version=None, busy=False, trainer_world_size=1, trainer=(), rounds=(),
        replicas=tuple(
            ReplicaStatus(
                name=name, state="loaded" if version is not None else "updating", routable=version is not None, version=version,
                digest=None, staleness=None, since=0.0, world_size=1, missing=(), ranks=(), adapter="", error=None, phases={},
                epoch=of,
            )
            for name, (of, version) in served.items()
        ),
        epoch=epoch,
    )  # fmt: skip
