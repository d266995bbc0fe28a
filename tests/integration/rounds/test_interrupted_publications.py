"""What people do to a training script: interrupt ``publish`` at any point, publish again, and change the weights in between.

An exception is raised in the thread that publishes at a random place where CPython runs signal handlers, in weightsync or what it
calls: at the begin of a Python function, after a call of a function in C, and at the end of a loop's body.
"""

from __future__ import annotations

import dis
import random
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import pytest
import torch

from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import DeadlineExceeded, WeightSyncError
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:Exception ignored", "ignore:coroutine"),  # what was interrupted before it was sent
]

SECONDS = 20.0
ROUNDS = 40
PLACES = {"publish": 32, "publish_async": 36, "publish_stream": 100}  # of one publication, about
INSIDE = (
    "weightsync/trainer/", "weightsync/protocol/connection.py", "weightsync/outcome.py", "contextlib.py", "threading.py",
    "concurrent/futures/",
)  # fmt: skip
HANDLED_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD")


class Interrupt(BaseException):
    """Ctrl-C."""


def interrupted(call: Callable[[], object], after: int) -> bool:
    """Run ``call``, and raise at place number ``after`` of it. Returns whether it came to that."""
    left = [after]
    before: list[tuple[FrameType, str] | None] = [None]  # the instruction before this one, unless Python code ran in between

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event in ("call", "exception"):  # after a call that raised no handler runs
            before[0] = None
        if event == "call":
            if not any(part in frame.f_code.co_filename for part in INSIDE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            handles = before[0] is not None and before[0][0] is frame and before[0][1].startswith(HANDLED_AFTER)
            before[0] = frame, dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left[0] -= handles
            if handles and left[0] == 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    own = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    except RuntimeError as error:
        # A condition of the standard library releases its lock before its try: the interrupted wait ends with the lock free,
        # and with this error of the with statement around it.
        assert isinstance(error.__context__, Interrupt) and "un-acquired lock" in str(error), error
        return True
    finally:
        sys.settrace(own)
        before[0] = None
    return False


def served(adapter: ModuleAdapter, timeout: float = SECONDS) -> tuple[str | None, set[float]]:
    """Label and values of the engine's weights."""
    with adapter.in_use(timeout) as version:
        values = {value for parameter in adapter.module.parameters() for value in parameter.flatten().tolist()}
        return (None if version is None else str(version)), values


def served_between(adapter: ModuleAdapter) -> tuple[str | None, set[float]]:
    """The same after any publication: the interrupted move of a stream leaves the engine paused until the next one."""
    try:
        return served(adapter, 0.5)
    except DeadlineExceeded:
        return None, set()


@pytest.mark.parametrize("way", ["publish", "publish_async", "publish_stream"])
def test_an_interrupted_publication_leaves_the_next_one_whole(way: str, seed: int) -> None:
    policy, target = ([torch.nn.Linear(16, 16, bias=False) for _ in range(3)] for _ in range(2))
    module, adapter = torch.nn.Sequential(*policy), ModuleAdapter(torch.nn.Sequential(*target))
    source: Any = Stream(window_bytes=4096) if way == "publish_stream" else module
    choose, of = random.Random(seed), dict[str, float]()
    with ExitStack() as owned:
        trainer = owned.enter_context(Trainer(source))
        owned.enter_context(Engine(adapter, "engine", trainer.coordinator))
        trainer.wait_for_replicas(1, timeout=SECONDS)

        def publish() -> Any:
            if way == "publish":
                return trainer.publish(timeout=SECONDS)
            if way == "publish_async":
                return trainer.publish_async(timeout=SECONDS)
            return trainer.publish_stream(module.state_dict().items(), timeout=SECONDS)

        hit = 0
        for step in range(ROUNDS):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(float(step))
            if interrupted(publish, choose.randint(1, PLACES[way])):
                hit += 1
                with torch.no_grad():  # trained on: whatever is still placed would be of two steps
                    for parameter in module.parameters():
                        parameter.fill_(step + 0.5)
            if step % 4 == 3:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.fill_(step + 0.75)
                ended = publish()
                label = str((ended.result(SECONDS) if way == "publish_async" else ended).version)
                assert served(adapter) == (label, {step + 0.75})
            label_now, values = served_between(adapter)
            if label_now is not None:
                assert len(values) == 1, f"{label_now} is a mixture"
                assert of.setdefault(label_now, *values) == next(iter(values)), f"{label_now} has two meanings"
        assert hit > ROUNDS // 5


def test_publications_of_two_threads_and_in_the_background_take_turns() -> None:
    module, adapter = torch.nn.Linear(16, 16, bias=False), ModuleAdapter(torch.nn.Linear(16, 16, bias=False))
    with ExitStack() as owned:
        trainer = owned.enter_context(Trainer(module))
        owned.enter_context(Engine(adapter, "engine", trainer.coordinator))
        trainer.wait_for_replicas(1, timeout=SECONDS)
        futures = []
        for step in range(4):
            with torch.no_grad():
                module.weight.fill_(float(step))
            futures.append(trainer.publish_async(timeout=SECONDS))
        assert [future.result(SECONDS).version.number for future in futures] == [0, 1, 2, 3]
        assert served(adapter)[1] == {3.0}
        errors: list[WeightSyncError] = []

        def publish() -> None:
            try:
                trainer.publish(timeout=SECONDS)
            except WeightSyncError as error:
                errors.append(error)

        threads = [threading.Thread(target=publish) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not errors
        assert trainer.last_version == 6
