"""Holds that a signal handler's exception in ``in_use()`` leaves an engine free: rounds pause it, and it is used again."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from weightsync.engines.module import ModuleAdapter
from weightsync.engines.vllm.attaching import _Gate

SECONDS = 20.0
INTERRUPTIONS = 40


class Interrupted(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before, tracer = signal.signal(signal.SIGVTALRM, interrupt), sys.gettrace()
    sys.settrace(None)  # an exception inside of coverage's tracer leaves its lock taken, and every later test would wait for it
    yield
    sys.settrace(tracer)
    signal.signal(signal.SIGVTALRM, before)


def use(engine: Any) -> Any:
    return engine.in_use(SECONDS) if isinstance(engine, ModuleAdapter) else engine.used(SECONDS)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("make", [lambda: ModuleAdapter(torch.nn.Linear(1, 1)), lambda: _Gate(None)], ids=["module", "vllm"])  # type: ignore[arg-type]
def test_an_interrupted_use_is_over(make: Any) -> None:
    engine, draw = make(), random.Random(5)
    with ThreadPoolExecutor(1) as rounds:
        for _ in range(INTERRUPTIONS):
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, draw.uniform(1e-4, 4e-3))
                while True:
                    with use(engine):
                        pass
            except Interrupted:
                pass
            paused = rounds.submit(engine.pause, "wait", SECONDS / 4)
            try:
                paused.result(SECONDS / 2)
            except TimeoutError:
                engine._changed.release()  # this thread holds it, and the other one waits for it
                raise
            engine.resume(SECONDS) if isinstance(engine, _Gate) else engine.resume()
