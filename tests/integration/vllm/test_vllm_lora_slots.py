"""Slots of vLLM's workers, and names in the process that owns the engine: what is dropped, and what may not be taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.engines.module_loras import manifest_of_tensors
from weightsync.errors import ConfigurationError
from weightsync.external import VersionedRequests
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LABEL = "alice/math@1"


class Owner:
    """The process that owns the engine: its names, and a way to the ranks."""

    def __init__(self) -> None:
        from weightsync.engines.vllm.served_loras import ServedLoras

        self.ranks: list[Any] = []
        self._served = ServedLoras(SimpleNamespace(generate=None, encode=None, collective_rpc=self._ask, add_lora=_take))

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


@pytest.mark.parametrize(
    ("name", "number", "refused"),
    [("alice/math@1", 7, True), ("alice/math", 7, True), ("carol/own", None, True), ("carol/own", 7, False)],
)
def test_another_client_cannot_load_an_adapter_in_the_place_of_a_version(name: str, number: int | None, refused: bool) -> None:
    """vLLM's route loads it under the id that it finds by the name: a request for the label was answered by other weights."""
    from weightsync.engines.vllm.served_loras import ServedLoras

    taken: list[str] = []

    async def take(request: Any) -> None:
        taken.append(request.lora_name)

    async def generate(*, lora_request: Any = None) -> AsyncIterator[str]:
        yield lora_request.lora_name

    async def served() -> None:
        engine: Any = SimpleNamespace(generate=generate, encode=None, collective_rpc=_ask, add_lora=take)
        loras = ServedLoras(engine)
        await loras.add(LABEL)
        own = loras.live[LABEL].lora_int_id
        other = SimpleNamespace(lora_name=name, lora_int_id=number or own, lora_path="/adapters/own", load_inplace=True)
        if not refused:
            await engine.add_lora(other)
            assert [token async for token in engine.generate(lora_request=other)] == [name]
            return
        with pytest.raises(ValueError, match="weightsync serves alice/math@1 here"):
            await engine.add_lora(other)
        with pytest.raises(ValueError, match="weightsync serves alice/math@1 here"):
            [token async for token in engine.generate(lora_request=other)]

    asyncio.run(served())
    assert taken == [LABEL] + ["carol/own"] * (not refused)


@pytest.mark.parametrize("retired", ["looked up", "between calls"])
def test_a_request_keeps_its_version_from_its_name_to_its_end(retired: str) -> None:
    from weightsync.engines.vllm.served_loras import ServedLoras

    freed: list[str] = []

    async def ask(method: str, args: tuple[str, int]) -> None:
        freed.append(args[0])

    async def generate(*, lora_request: Any = None) -> AsyncIterator[str]:
        assert lora_request.lora_name not in freed
        yield lora_request.lora_name

    async def served() -> list[str]:
        engine: Any = SimpleNamespace(generate=generate, encode=None, collective_rpc=ask, add_lora=_take)
        loras, seen = ServedLoras(engine), list[str]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            looked_up = loras.requests["alice/math"]
            for call in range(3):  # as for a beam search, or an agent's turns
                if call == (retired == "between calls"):
                    await loras.add("alice/math@2")
                    await loras.drop(LABEL)
                    assert not freed
                seen.extend([token async for token in engine.generate(lora_request=looked_up)])

        await loras.add(LABEL)
        middleware = VersionedRequests(app, lambda: "run@1", lambda: loras.live)
        await middleware({"type": "http", "path": "/", "headers": []}, _nothing, _nothing)  # type: ignore[arg-type]
        await asyncio.gather(*loras._freeing)
        return seen

    assert asyncio.run(served()) == [LABEL] * 3
    assert freed == [LABEL]


async def _nothing(*message: Any) -> None:
    """ASGI's other side."""


@pytest.mark.parametrize(("number", "alpha"), [(7e4, 1.0), (2e4, 4.0)])
def test_numbers_that_the_dtype_of_vllms_adapters_does_not_hold_are_refused(number: float, alpha: float) -> None:
    from weightsync.engines.vllm.loras import WorkerLoras, _Arrangement

    tensors = {"base_model.model.q.lora_A.weight": torch.ones(1, 8), "base_model.model.q.lora_B.weight": torch.ones(8, 1)}
    tensors["base_model.model.q.lora_B.weight"][3] = number
    manifest = manifest_of_tensors(tensors)
    rank: Any = object.__new__(WorkerLoras)
    rank._config, rank._held, rank._manager = SimpleNamespace(lora_dtype=torch.float16), {}, None
    rank._arranged = _Arrangement(manifest, {manifest[1].name: "q"}, [[spec] for spec in manifest], {})
    with pytest.raises(ConfigurationError, match="alice/math@1 has numbers that are infinite in float16"):
        rank.stage(LABEL, AdapterSpec("alice/math", LoraConfig(1, alpha)), tensors)
    assert not rank._held
