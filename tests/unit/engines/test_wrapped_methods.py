"""Methods of other packages' classes with code around them, and an engine of vLLM's that may be deleted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from weightsync.engines.vllm.attaching import _Gate
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import Aborted


class Theirs:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, more: int) -> int:
        """Add to the number."""
        return self.number + more


def test_a_method_is_wrapped_once_and_gets_all_arguments() -> None:
    class Own(Theirs):
        """Changed here alone."""

    def doubled(add: Any, self: Own, *args: Any, **kwargs: Any) -> int:
        return 2 * int(add(self, *args, **kwargs))

    for _ in range(2):
        wrap_once(Own, "add", doubled)
    own = Own(1)
    assert (own.add(2), own.add(more=3), Theirs(1).add(2)) == (6, 8, 3)
    assert Own.add.__doc__ == "Add to the number."


def test_a_method_that_is_not_there_is_not_made() -> None:
    wrap_once(Theirs, "subtract", lambda method, *args: None)
    wrap_once(None, "add", lambda method, *args: None)
    assert not hasattr(Theirs, "subtract")


class Engine:
    """What is used of vLLM's ``LLMEngine``."""

    label = ""

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        return []

    def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
        return True

    def set_weight_version(self, version: str) -> None:
        self.label = version


def test_an_engine_that_was_deleted_is_an_error_of_every_step() -> None:
    engine = Engine()
    gate = _Gate(weakref.proxy(engine))
    gate.install(1)
    gate.label("run@1", 1)
    assert (engine.label, gate.version, gate.flush(1)) == ("run@1", "run@1", True)
    del engine
    gc.collect()
    for step in (lambda: gate.install(1), lambda: gate.flush(1), lambda: gate.label("run@2", 1)):
        with pytest.raises(Aborted, match="this vLLM engine was deleted"):
            step()
