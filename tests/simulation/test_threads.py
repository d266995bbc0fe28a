"""Holds that simulated threads behave as threads do, and what happens where one of them really waits, or greenlet is missing."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.simulation.threads import Event, Lock, Thread, Threads
from tests.virtual_time import run


def test_threads_wait_for_each_other_in_virtual_time() -> None:
    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), list[str]()
        world, lock, event = Threads(loop, lambda: None), Lock(), Event()

        def note(name: str) -> None:
            seen.append(f"{name} at {loop.time():g}")

        def first() -> None:
            with lock:
                world.sleep(2.0)
            note("first")
            event.wait(10.0)
            note("first again")

        def second() -> None:
            with lock:
                note("second")
            world.sleep(1.0)
            event.set()

        for body in (first, second):
            Thread(body).start()
        await asyncio.sleep(20.0)
        assert not world.crashed
        assert not any(thread.alive for thread in world.all)
        return seen

    assert run(main()) == ["first at 2", "second at 2", "first again at 3"]


def test_a_simulated_thread_is_not_the_loops_thread() -> None:
    """Code that looks whether it may block asks for the running loop."""

    async def main() -> list[asyncio.AbstractEventLoop | None]:
        seen: list[asyncio.AbstractEventLoop | None] = []
        world = Threads(asyncio.get_running_loop(), lambda: None)

        def body() -> None:
            seen.append(asyncio._get_running_loop())
            world.sleep(1.0)
            seen.append(asyncio._get_running_loop())

        Thread(body).start()
        await asyncio.sleep(0.5)
        assert asyncio.get_running_loop() is world.loop
        await asyncio.sleep(1.0)
        return seen

    assert run(main()) == [None, None]


def test_a_thread_of_a_dead_process_is_unwound() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        world = Threads(asyncio.get_running_loop(), lambda: None)

        def body() -> None:
            try:
                world.sleep(100.0)
                seen.append("woke up")
            finally:
                seen.append("unwound")

        thread = Thread(body)
        thread.start()
        await asyncio.sleep(1.0)
        thread.kill()
        await asyncio.sleep(0.0)
        assert not thread.is_alive()
        return seen

    assert run(main()) == ["unwound"]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)


def test_a_real_wait_ends_the_process_and_says_where() -> None:
    done = _python(
        "import threading\n"
        "from tests.simulation import main\n"
        "def really_waits(seed): threading.Event().wait()\n"
        "main._REAL_SECONDS, main.run_schedule = 0.5, really_waits\n"
        "main.run_many([1])\n"
    )
    assert done.returncode == 1
    assert "really_waits" in done.stderr


def test_without_greenlet_it_says_how_to_install_it() -> None:
    done = _python("import sys\nsys.modules['greenlet'] = None\nimport tests.simulation.main")
    assert done.returncode == 1
    assert "the simulation needs greenlet: pip install '.[test]'" in done.stderr
