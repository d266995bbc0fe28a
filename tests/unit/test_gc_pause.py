"""Holds that collection is held off for as long as asked, in this process alone, and never against the program's own wish."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest
from tests.virtual_time import virtual

from weightsync.gc_pause import collecting_later, gc_paused


class Cycle:
    def __init__(self) -> None:
        self.me = self


def collects() -> bool:
    """Whether Python collects by itself."""
    before = gc.get_stats()[0]["collections"]
    kept = [Cycle() for _ in range(5000)]
    del kept
    return bool(gc.get_stats()[0]["collections"] > before)


def test_collection_waits_and_goes_on() -> None:
    assert collects()
    with gc_paused(), gc_paused():
        assert not collects()
    assert collects()


def test_what_the_program_turned_off_stays_off() -> None:
    try:
        with gc_paused():
            gc.disable()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_thresholds_that_the_program_set_meanwhile_stay() -> None:
    before = gc.get_threshold()
    try:
        with gc_paused():
            gc.set_threshold(1234, 11, 12)
        assert gc.get_threshold()[0] == 1234
    finally:
        gc.set_threshold(*before)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on, of a fork beside threads
def test_a_forked_child_collects() -> None:
    with gc_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if collects() else 1)
        assert not collects()
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert collects()


@virtual
async def test_it_is_held_for_a_moment_only() -> None:
    with collecting_later(1.0):
        assert not collects()
        await asyncio.sleep(2.0)
        assert collects()
    with collecting_later(1.0):
        assert not collects()
    assert collects()
