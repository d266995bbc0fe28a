"""Slots of vLLM's workers, and names in the process that owns the engine: what is dropped, and what may not be taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.errors import ConfigurationError
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


async def _take(request: Any) -> None:
    """Let all workers take it."""


async def _ask(method: str, args: tuple[str, int]) -> None:
    """Let all workers free it."""


def test_a_name_of_vllms_own_models_is_refused_and_stays_what_it_is() -> None:
    from weightsync.engines.vllm.served_loras import ServedLoras

    async def served() -> None:
        loras = ServedLoras(SimpleNamespace(generate=None, encode=None, collective_rpc=_ask, add_lora=_take))
        loras.models |= {"org/model"}
        own = loras.requests["carol/own"] = SimpleNamespace(lora_name="carol/own", lora_path="/adapters/own")
        for label in ("org/model@1", "carol/own@1"):
            with pytest.raises(ConfigurationError, match="choose another name"):
                await loras.add(label)
            await loras.drop(label)
        assert loras.requests == {"carol/own": own}
        await loras.add(LABEL)
        assert loras.requests.keys() == {"carol/own", "alice/math", LABEL}

    asyncio.run(served())


def test_what_vllms_own_route_unloaded_is_dropped_all_the_same() -> None:
    from weightsync.engines.vllm.served_loras import ServedLoras

    async def served() -> None:
        loras = ServedLoras(SimpleNamespace(generate=None, encode=None, collective_rpc=_ask, add_lora=_take))
        await loras.add(LABEL)
        del loras.requests[LABEL]
        await loras.drop(LABEL)
        assert not loras.requests and not loras.live

    asyncio.run(served())


def test_a_request_whose_version_was_retired_since_its_name_was_looked_up_is_an_error_of_its_client() -> None:
    from weightsync.engines.vllm.served_loras import ServedLoras

    async def generate(*, lora_request: Any = None) -> AsyncIterator[int]:
        yield 1

    async def served() -> None:
        engine: Any = SimpleNamespace(generate=generate, encode=None, collective_rpc=_ask, add_lora=_take)
        loras = ServedLoras(engine)
        await loras.add(LABEL)
        looked_up = loras.requests["alice/math"]
        assert [token async for token in engine.generate(lora_request=looked_up)] == [1]
        await loras.drop(LABEL)
        with pytest.raises(ValueError, match="is not served any more"):  # any other error ends the connection, with a traceback
            [token async for token in engine.generate(lora_request=looked_up)]

    asyncio.run(served())
