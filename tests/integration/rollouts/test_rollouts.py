"""Holds rollouts against a real coordinator: replicas and versions are pushed, a lost coordinator is found again; idle is idle."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.integration.server.service_support import engine_hello, fast, free_port, joined, trainer_hello
from tests.unit.rollouts.engines import Engine, Engines

from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.errors import AuthenticationError, CoordinatorUnreachable
from weightsync.model import Version
from weightsync.protocol.messages import Publish
from weightsync.server.server import BackgroundServer
from weightsync_rollouts import Generate, RolloutController, RolloutSettings, Sample, Sampling

SECONDS = 20.0


async def task(generate: Generate) -> Sample:
    return await generate([0], Sampling(max_tokens=2))


def controller(settings: ClientSettings, batch: int = 2) -> RolloutController[Sample]:
    engines = Engines({"replica": Engine(0)}, free=True)
    return RolloutController(
        RolloutSettings(batch=batch, max_staleness=0), engines, {"replica": "http://replica"}, coordinator=settings
    )


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not there():  # noqa: ASYNC110 - another process's news has no event here
            await asyncio.sleep(0.01)


async def test_replicas_and_versions_are_pushed(settings: ClientSettings) -> None:
    with ExitStack() as agents:
        trainer = await asyncio.to_thread(agents.enter_context, joined(settings, trainer_hello()))
        async with controller(settings) as rollouts:
            for _ in range(4):
                rollouts.submit(task)
            await asyncio.to_thread(agents.enter_context, joined(settings, engine_hello()))
            assert rollouts.counts().running == 0
            await asyncio.to_thread(trainer.link.call, Publish(0), SECONDS)
            assert len(await rollouts.batch(SECONDS)) == 2
            assert rollouts.counts().version == 0
            assert rollouts.counts().waiting == 2  # on-policy: the rest waits for the next version
            await asyncio.to_thread(trainer.link.call, Publish(1), SECONDS)
            assert len(await rollouts.batch(SECONDS)) == 2
            await asyncio.to_thread(agents.close)
            await until(lambda: not rollouts.replicas.routable)


async def test_a_coordinator_that_comes_back_is_found_again(runtime: None) -> None:
    port, token = free_port(), Secret("t" * 32)
    where = fast(Address("http", "127.0.0.1", port), token)
    wish = ServerSettings(port=port, token=token, run="run", heartbeat=0.3)
    serving = Version("run", 7, "", "0" * 16)
    first = BackgroundServer(wish)
    await asyncio.to_thread(first.start)
    try:
        async with controller(where) as rollouts:
            await asyncio.to_thread(first.stop)
            with ExitStack() as agents:
                await asyncio.to_thread(agents.enter_context, BackgroundServer(wish))
                await asyncio.to_thread(agents.enter_context, joined(where, trainer_hello(published=7)))
                hello = engine_hello(serving=serving)
                await asyncio.to_thread(agents.enter_context, joined(where, hello))
                await until(lambda: rollouts.counts().version == 7)
                await asyncio.to_thread(agents.close)
    finally:
        await asyncio.to_thread(first.stop)


async def test_no_coordinator_and_a_wrong_token(settings: ClientSettings, tmp_path: Path) -> None:
    nowhere = ClientSettings(coordinator=Address("http", "127.0.0.1", free_port()), timeouts=Timeouts(connect=0.3))
    with pytest.raises(CoordinatorUnreachable, match=nowhere.coordinator.url):
        async with controller(nowhere):
            pass
    with pytest.raises(AuthenticationError):
        async with controller(fast(settings.coordinator, Secret("wrong"))):
            pass


class _Counting(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        self.wakes += 1
        return found


def test_an_idle_controller_wakes_for_heartbeats_alone(settings: ClientSettings) -> None:
    selector = _Counting()

    async def idle() -> int:
        async with controller(settings):
            await asyncio.sleep(0.3)
            before = selector.wakes
            await asyncio.sleep(1.2)  # four heartbeats of 0.3 s
            return selector.wakes - before

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        # A heartbeat is read (one or two wakes), and the timer of its read timeout is set anew.
        assert runner.run(idle()) <= 20
