"""Names that are added while a timer runs wait for the same timer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.virtual_time import virtual

from weightsync.coordinator.postponed import Postponed


@virtual
async def test_one_timer_is_for_all_names_until_it_ends() -> None:
    calls: list[tuple[float, list[str]]] = []
    started = asyncio.get_running_loop().time()

    def work(names: Iterable[str]) -> None:
        calls.append((round(asyncio.get_running_loop().time() - started, 3), sorted(names)))

    postponed = Postponed(10.0, work)
    postponed.add(())
    await asyncio.sleep(20.0)
    postponed.add(["b"])
    await asyncio.sleep(6.0)
    postponed.add(["a", "b"])
    await asyncio.sleep(5.0)
    postponed.add(["a"])
    await asyncio.sleep(60.0)
    assert calls == [(30.0, ["a", "b"]), (41.0, ["a"])]
