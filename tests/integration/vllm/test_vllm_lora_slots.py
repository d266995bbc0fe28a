"""Slots of vLLM's workers: a version that one rank only registered is dropped on all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.model import Version

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LABEL = "alice/math@1"


class Owner:
    """The process that owns the engine: its names, and a way to the ranks."""

    def __init__(self) -> None:
        from weightsync.engines.vllm.served_loras import ServedLoras

        self.ranks: list[Any] = []
        self._served = ServedLoras(SimpleNamespace(generate=None, encode=None, collective_rpc=self._ask))

    async def _ask(self, method: str, args: tuple[str, int]) -> None:
        assert method == "weightsync_drop_lora"
        for rank in self.ranks:
            rank.forget(*args)

    def add_lora(self, label: str, timeout: float) -> None:
        """Names are not asked for here."""

    def drop_lora(self, label: str, timeout: float) -> None:
        assert timeout > 0
        asyncio.run(self._served.drop(label))


@pytest.mark.parametrize("registered", [0, 1])
def test_a_version_that_one_rank_only_registered_is_dropped_on_all(registered: int) -> None:
    from weightsync.engines.vllm.loras import WorkerLoras

    owner = Owner()
    for controls in (owner, None):
        rank: Any = object.__new__(WorkerLoras)
        rank._held, rank._registered, rank._controls = {}, set(), controls
        rank._held[LABEL] = SimpleNamespace(model=torch.nn.Module(), unread=None)
        owner.ranks.append(rank)
    owner.ranks[registered].register(Version("alice/math", 1, "", ""))
    for rank in owner.ranks:
        rank.drop(LABEL)
    assert [list(rank.labels()) for rank in owner.ranks] == [[], []]


def test_what_could_not_be_freed_is_freed_by_its_number_with_the_next_call() -> None:
    from weightsync.engines.vllm.served_loras import ServedLoras

    freed: list[tuple[str, int]] = []

    async def ask(method: str, args: tuple[str, int]) -> None:
        freed.append(args)
        if len(freed) == 1:
            raise RuntimeError("a worker did not answer")

    async def add(request: Any) -> None:
        """Take it."""

    async def served() -> None:
        loras = ServedLoras(SimpleNamespace(generate=None, encode=None, collective_rpc=ask, add_lora=add))
        await loras.add(LABEL)
        with pytest.raises(RuntimeError):
            await loras.drop(LABEL)
        assert not loras.requests
        await loras.drop(LABEL)

    asyncio.run(served())
    assert freed[0] == freed[1]
    assert freed[0][1] > 0
