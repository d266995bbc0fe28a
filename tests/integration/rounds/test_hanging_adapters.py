"""An adapter that hangs is named with its method and for how long, holds up nobody for long, and heals by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

import weightsync
from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.engine import Engine
from weightsync.engine.engine_role import EngineRole
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import RoundFailed
from weightsync.model import PauseMode
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

SECONDS = 30.0


class Locked(ModuleAdapter):
    """Stops its scheduler by a lock, as one would write it, and remembers nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.lock = threading.Lock()
        self.fails = False

    def pause(self, mode: PauseMode, timeout: float) -> None:
        assert self.lock.acquire(timeout=timeout)
        super().pause(mode, timeout)

    def finish(self, version: weightsync.Version) -> None:
        if self.fails:
            raise RuntimeError("injected in finish")
        super().finish(version)

    def resume(self) -> None:
        super().resume()
        self.lock.release()


class Hanging(ModuleAdapter):
    """Hangs in ``pause``, whatever its timeout."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.hangs, self.may_go_on, self.resumed = False, threading.Event(), threading.Event()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        if self.hangs:
            assert self.may_go_on.wait(SECONDS)
        super().pause(mode, timeout)

    def resume(self) -> None:
        super().resume()
        self.resumed.set()


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def join(owned: ExitStack, adapter: ModuleAdapter) -> tuple[Trainer, Engine]:
    server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
    trainer = owned.enter_context(Trainer(torch.nn.Linear(4, 4), server.url, token=server.token))
    engine = owned.enter_context(Engine(adapter, "mine-0", server.url, token=server.token))
    return trainer, engine


def test_an_adapter_that_stops_its_engine_by_a_lock_survives_failed_rounds(owned: ExitStack) -> None:
    adapter = Locked(torch.nn.Linear(4, 4))
    trainer, engine = join(owned, adapter)
    trainer.publish(1, timeout=SECONDS)
    adapter.fails = True
    with pytest.raises(RoundFailed, match="injected in finish"):
        trainer.publish(2, timeout=SECONDS)
    adapter.fails = False  # in the middle of the second attempt, perhaps, which the publication cancels
    assert trainer.publish(3, timeout=SECONDS).ok
    assert engine.serving is not None
    assert engine.serving.number == 3


def test_who_hangs_in_which_call_for_how_long_is_said_and_it_heals_by_itself(
    owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineRole, "turn_seconds", 0.2)
    adapter = Hanging(torch.nn.Linear(4, 4))
    trainer, engine = join(owned, adapter)
    owned.callback(adapter.may_go_on.set)
    trainer.publish(1, timeout=SECONDS)
    adapter.hangs = True
    adapter.resumed.clear()
    with pytest.raises(RoundFailed, match=r"move: DeadlineExceeded: .*mine-0/0 is inside Hanging.pause\(\) for [0-9.]+ s"):
        trainer.publish(2, timeout=3.0)
    started = Deadline(SECONDS)
    with pytest.raises(RoundFailed, match=r"agree: DeadlineExceeded: .*mine-0/0 is inside Hanging.pause\(\) for [0-9.]+ s"):
        trainer.publish(3, timeout=SECONDS)
    assert started.remaining("failing quickly") > SECONDS - 5
    adapter.may_go_on.set()
    assert adapter.resumed.wait(SECONDS), "nothing is published any more"
    assert engine.serving is not None
    assert engine.serving.number == 3
