"""The event loop that all links of a process share: there while one of them is, and one of its own in a forked child."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from weightsync.protocol.event_loop import SharedLoop

pytestmark = pytest.mark.usefixtures("no_leaks")


def _answer(loop: asyncio.AbstractEventLoop) -> str:
    async def where() -> str:
        return threading.current_thread().name

    return asyncio.run_coroutine_threadsafe(where(), loop).result(10)


def test_the_first_borrower_starts_the_thread_and_the_last_ends_it() -> None:
    shared = SharedLoop()
    first = shared.borrow()
    assert shared.borrow() is first
    assert _answer(first) == "weightsync-links"
    assert shared.give_back(10)
    assert _answer(first) == "weightsync-links", "there is a borrower left"
    assert shared.give_back(10)
    assert first.is_closed()
    again = shared.borrow()
    assert again is not first
    assert _answer(again) == "weightsync-links"
    assert shared.give_back(10)


def test_the_last_borrower_may_be_on_the_loop_itself() -> None:
    shared = SharedLoop()
    loop = shared.borrow()
    ended = threading.Event()

    def watch(thread: threading.Thread) -> None:
        thread.join(10)
        ended.set()

    async def leave() -> bool:
        threading.Thread(target=watch, args=(threading.current_thread(),)).start()
        return shared.give_back(10)

    assert asyncio.run_coroutine_threadsafe(leave(), loop).result(10)
    assert ended.wait(10)
    assert loop.is_closed()


_FORKING = """
import asyncio, os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, for forking with threads: what is tried here
from weightsync.protocol.event_loop import shared_loop
async def ok():
    return 7
shared_loop.borrow()
child = os.fork()
if not child:
    os._exit(asyncio.run_coroutine_threadsafe(ok(), shared_loop.borrow()).result(10))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", _FORKING], timeout=60, check=False).returncode == 7
