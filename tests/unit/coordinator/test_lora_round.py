"""Which replicas an adapter goes to, and what becomes of a call to drop one whose caller has given up waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from weightsync.coordinator.lora_round import takes
from weightsync.coordinator.rank_handle import RankHandle, drop
from weightsync.errors import PeerLost
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.messages import Done


def base(number: int) -> Version:
    return Version("run", number, "0" * 32, f"{number:016x}")


@pytest.mark.parametrize(
    ("mode", "late", "taken"),
    [("keep", False, [3]), ("keep", True, [3, 4]), ("refuse", False, [3]), ("refuse", True, [3])],
)
def test_an_adapter_goes_to_its_base_and_late_to_a_later_one_never_to_an_earlier_one(
    mode: Literal["keep", "refuse"], late: bool, taken: list[int]
) -> None:
    spec = AdapterSpec("alice/math", LoraConfig(2, 4.0), base(3), mode)
    replicas: dict[int, Any] = {number: SimpleNamespace(state="loaded", version=base(number)) for number in (2, 3, 4)}
    assert [number for number, replica in replicas.items() if takes(replica, spec, late=late)] == taken
    assert not takes(SimpleNamespace(state="dirty", version=None), spec, late=late)  # type: ignore[arg-type]


class _Busy:
    """A rank that answers when it is told to."""

    def __init__(self) -> None:
        self.rank = SimpleNamespace(member="r0/0", hello=SimpleNamespace(serving=None, loras=(), refuted=""))
        self.free, self.withdrawn, self.dropped = asyncio.Event(), False, False

    async def call(self, message: object, timeout: float) -> Done:
        try:
            await asyncio.wait_for(self.free.wait(), timeout)
        except asyncio.CancelledError:
            self.withdrawn = True
            raise
        self.dropped = True
        return Done()


async def test_a_rank_that_is_busy_drops_versions_when_it_comes_to_it() -> None:
    busy = _Busy()
    errors = await drop({"r0/0": RankHandle[Any](busy)}, "alice/math", (1,), 0.01)  # type: ignore[arg-type]
    assert errors == ["r0/0 did not drop versions of alice/math: no answer within 0.01 s"]
    busy.free.set()
    await asyncio.sleep(0.01)
    assert busy.dropped and not busy.withdrawn


async def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    busy = _Busy()
    handle = RankHandle[Any](busy)  # type: ignore[arg-type]
    asking = asyncio.ensure_future(drop({"r0/0": handle}, "alice/math", (1,), 30))
    await asyncio.sleep(0.01)
    handle.sever("killed")
    assert str(PeerLost("r0/0 is gone: killed")) in (await asking)[0]
    assert await drop({}, "alice/math", (1,), 1) == []
