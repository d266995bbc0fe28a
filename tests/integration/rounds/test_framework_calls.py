"""A framework's call of its engine and the publication that it lets in: if one fails, the other ends at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.unit.engines.test_owner_call import Called

from weightsync.engine.engine import Engine
from weightsync.errors import Aborted, RoundFailed, VersionError
from weightsync.integrations.engine_calls import Answers, EngineCalls
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

SECONDS = 30.0
AT_ONCE = 8.0


class Framework:
    """Owns an engine, and calls it."""

    def __init__(self, trainer: Trainer, engine: Engine, adapter: Called) -> None:
        self.trainer, self.engine, self.adapter = trainer, engine, adapter
        self.calls = EngineCalls(self._called)
        self.late, self.fault = 0.0, list[Exception]()
        self.ended: BaseException | None = None

    def _called(self, method: str, arguments: dict[str, Any]) -> Answers:
        if self.fault:
            raise self.fault.pop()
        threading.Event().wait(self.late)
        try:
            self.adapter.call.serve(arguments["number"], arguments["epoch"], arguments["timeout"], arguments["call"])
        except BaseException as error:
            self.ended = error
            raise
        return None

    def publish(self, number: int) -> None:
        self.calls.publish(lambda: self.trainer.publish(number, timeout=SECONDS), number, timeout=SECONDS)


@pytest.fixture
def framework(server: BackgroundServer) -> Iterator[Framework]:
    with ExitStack() as owned:
        adapter = Called(torch.nn.Linear(8, 8))
        trainer = owned.enter_context(Trainer(torch.nn.Linear(8, 8), server.url, token=server.token))
        engine = owned.enter_context(Engine(adapter, "r", server.url, token=server.token))
        trainer.wait_for_replicas(1)
        made = Framework(trainer, engine, adapter)
        made.publish(5)
        yield made


def test_a_call_that_fails_at_once_ends_the_publication_because_of_it(framework: Framework) -> None:
    framework.fault = [ConnectionError("the engine's process is gone")]
    started = time.monotonic()
    with pytest.raises(RoundFailed, match="process is gone") as caught:
        framework.publish(6)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert time.monotonic() - started < AT_ONCE
    framework.late = 0.5  # its pause comes before the call, and nothing refuses it
    framework.publish(7)
    assert framework.engine.serving is not None and framework.engine.serving.number == 7


@pytest.mark.parametrize("late", [0.0, 0.5], ids=["waits", "comes later"])
def test_a_publication_that_fails_before_a_round_ends_the_call(framework: Framework, late: float) -> None:
    framework.late = late
    started = time.monotonic()
    with pytest.raises(VersionError, match="last one is 5") as caught:
        framework.publish(4)
    assert time.monotonic() - started < AT_ONCE
    assert isinstance(framework.ended, Aborted) and "The engine keeps its weights" in str(framework.ended)
    assert "last one is 5" in caught.value.__notes__[0]
    framework.publish(6)
    assert framework.engine.serving is not None and framework.engine.serving.number == 6


def test_a_refusal_that_comes_late_does_not_end_the_next_attempt(framework: Framework) -> None:
    """A load fails. The engine is seeded again, which waits for the framework's next call: the first call's end is no reason."""
    adapter, called = framework.adapter, list[int]()
    ended, serve = adapter.call.ended, adapter.call.serve
    pauses = threading.Semaphore(0)

    def noted(number: int | None, epoch: int | None, timeout: float, name: int = 0) -> float:
        called.append(name)
        return serve(number, epoch, timeout, name)

    adapter.call.serve = noted  # type: ignore[method-assign]
    adapter.call.ended = lambda *_: None  # type: ignore[method-assign]  # what the coordinator says is still on its way
    pause = adapter.pause
    adapter.pause = lambda mode, timeout: (pauses.release(), pause(mode, timeout))[1]  # type: ignore[method-assign, func-returns-value]
    adapter.fault = ValueError("no room")
    with pytest.raises(RoundFailed):
        framework.publish(6)
    adapter.fault = None
    assert all(pauses.acquire(timeout=SECONDS) for _ in range(2)), "the engine is seeded again"
    ended(called[0], "the framework's call of its engine failed: no room", refuse=True)
    threading.Event().wait(0.3)
    framework.calls.update(6, timeout=AT_ONCE)
    assert framework.engine.serving is not None and framework.engine.serving.number == 6
