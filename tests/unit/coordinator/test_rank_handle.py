"""What becomes of a rank's calls when its connection ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.coordinator.rank_handle import RankHandle
from weightsync.errors import PeerLost


@pytest.fixture
def handle() -> RankHandle[Any]:
    return RankHandle(
        SimpleNamespace(rank=SimpleNamespace(member="a/0", hello=SimpleNamespace(serving=None, loras=(), refuted="")))
    )


async def test_an_answer_that_arrived_with_the_goodbye_counts(handle: RankHandle[Any]) -> None:
    """The call has returned in this very turn of the loop: nobody could look at its result yet."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call() -> str:
        return await answer

    outcome = handle.start(call())
    await asyncio.sleep(0)
    answer.set_result("committed")
    asyncio.get_running_loop().call_soon(handle.sever, "its process closed it")  # after the call, before what follows it
    assert await outcome == "committed"


async def test_a_call_that_waits_fails_at_once(handle: RankHandle[Any]) -> None:
    outcome = handle.start(asyncio.sleep(60, "never"))
    await asyncio.sleep(0)
    handle.sever("killed")
    with pytest.raises(PeerLost, match="a/0 is gone: killed"):
        await outcome
