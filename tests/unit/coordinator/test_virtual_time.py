"""Holds that the virtual clock of these tests jumps, and that it refuses to hide a wait without a deadline or real blocking."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.simulation import clock
from tests.virtual_time import run


def test_hours_pass_at_once_and_in_order() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def note(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(f"{name} at {asyncio.get_running_loop().time():g}")

        await asyncio.gather(note("late", 7200), note("early", 60))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.get_running_loop().create_future()
        return seen

    started = time.monotonic()
    assert run(main()) == ["early at 60", "late at 7200"]
    assert time.monotonic() - started < 5


def test_a_wait_without_a_deadline_is_an_error() -> None:
    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="no timer is left"):
        run(main())


def test_real_blocking_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_BLOCKING_SECONDS", 0.5)

    async def blocked() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="blocked the event loop"):
        run(blocked())
