"""Engines that serve their weights feed other engines over the real service and real transports, without a trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.fork_server import FORK_SERVER, Child
from tests.unit.tensors.test_digest import forged

from weightsync import failpoints
from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.coordinator.events import RoundEnded
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, DeadlineExceeded
from weightsync.model import Manifest, TensorSpec
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.tensors.digest import PUBLIC, digest_box
from weightsync.tensors.shards import Shard, shard
from weightsync.trainer.trainer import Trainer
from weightsync.transports import registry

SECONDS = 20.0
ROWS = 6

pytestmark = pytest.mark.usefixtures("no_leaks")


class Run:
    """A coordinator, and agents that are closed at the end."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self._stack = stack
        self.server = stack.enter_context(BackgroundServer(ServerSettings.load({}, port=0, **settings)))

    def trainer(self, state: torch.nn.Module, **options: Any) -> Trainer:
        return self._stack.enter_context(Trainer(state, self.server.url, token=self.server.token, **options))

    def engine(self, adapter: EngineAdapter, name: str, **options: Any) -> Engine:
        return self._stack.enter_context(Engine(adapter, name, self.server.url, token=self.server.token, **options))

    def process(self, name: str) -> Child:
        """An engine that serves its weights, in a process of its own."""
        child = Child("tests.integration.rounds.serving_engine", json.dumps([self.server.url, self.server.token, name]))
        self._stack.callback(child.close)
        return child


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    FORK_SERVER.start()


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def linear(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(40, ROWS)


def same(one: torch.nn.Linear, other: torch.nn.Linear) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp", "nixl"])
def test_a_late_joiner_is_seeded_by_an_engine_when_the_trainer_is_gone(run: Run, transport: str, delivery: str) -> None:
    if reason := registry.transport(transport).unavailable():
        pytest.skip(reason)
    source, target = linear(1), linear(2)
    trainer = run.trainer(source, transports=[transport])
    run.engine(ModuleAdapter(linear(3)), "a", transports=[transport], delivery=delivery, serve_weights=True)
    version = trainer.publish(7, timeout=SECONDS).version
    trainer.close()
    late = run.engine(ModuleAdapter(target), "late", transports=[transport], delivery=delivery)
    assert late.wait_for_version(7, SECONDS) == version
    assert same(source, target)


class Half(EngineAdapter):
    """Holds half of the rows of :func:`linear`'s weight."""

    name = "half"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.weight, self.bias = torch.zeros(ROWS // 2, 40), torch.zeros(ROWS)

    def manifest(self) -> Manifest:
        return Manifest((TensorSpec("weight", (ROWS, 40), "float32"), TensorSpec("bias", (ROWS,), "float32")))

    def shards(self) -> Sequence[Shard]:
        half = shard("weight", self.weight, (ROWS, 40), (self._rank * ROWS // 2, 0))
        return [half, shard("bias", self.bias, (ROWS,), (0,))]


def test_ranks_of_a_replica_feed_a_replica_of_other_ranks_and_are_fed_by_it(run: Run) -> None:
    source, whole = linear(1), linear(2)
    trainer = run.trainer(source)
    for rank in range(2):
        run.engine(Half(rank), "halves", rank=rank, world_size=2, serve_weights=True)
    trainer.publish(1, timeout=SECONDS)
    trainer.close()
    run.engine(ModuleAdapter(whole), "whole", serve_weights=True).wait_for_version(1, SECONDS)
    assert same(source, whole)
    adapters = [Half(0), Half(1)]
    engines = [run.engine(adapters[rank], "again", rank=rank, world_size=2) for rank in range(2)]
    for engine in engines:
        engine.wait_for_version(1, SECONDS)
    assert torch.equal(torch.cat([adapter.weight for adapter in adapters]), source.weight)


def test_a_publication_reaches_replicas_in_waves(run: Run) -> None:
    with ExitStack() as stack:
        waves = Run(stack, fan_out=1)
        source, targets = linear(1), [linear(seed) for seed in range(2, 6)]
        trainer = waves.trainer(source, transports=["tcp"])
        for number, target in enumerate(targets):
            waves.engine(ModuleAdapter(target), f"r{number}", transports=["tcp"], serve_weights=True)
        for number in (1, 2):
            with torch.no_grad():
                source.weight.add_(1.0)
            result = trainer.publish(number, timeout=SECONDS)
            assert len(result.updated) == 4
            assert all(same(source, target) for target in targets)
            assert all(replica.source for replica in result.replicas)


def test_an_engine_in_another_process_feeds_a_joiner_and_its_death_is_noticed(run: Run) -> None:
    source, target = linear(1), linear(2)
    child = run.process("a")
    trainer = run.trainer(source)
    trainer.wait_for_replicas(1, SECONDS)
    version = trainer.publish(3, timeout=SECONDS).version
    trainer.close()
    assert run.engine(ModuleAdapter(target), "late").wait_for_version(3, SECONDS) == version
    assert same(source, target)
    child.kill()
    assert not child.output.read()
    another = run.engine(ModuleAdapter(linear(4)), "too late")
    with pytest.raises(DeadlineExceeded):
        another.wait_for_version(3, 0.5)


def test_a_source_killed_while_it_is_read_is_replaced_by_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, reading = linear(1), linear(2), list[str]()
    child = run.process("a")
    trainer = run.trainer(source, transports=["tcp"])
    run.engine(ModuleAdapter(linear(3)), "b", serve_weights=True)
    trainer.wait_for_replicas(2, SECONDS)
    version = trainer.publish(3, timeout=SECONDS).version
    trainer.close()

    def gate(name: str) -> None:
        if name == "engine.move" and not reading:
            reading.append(name)
            child.kill()
            child.output.read()

    monkeypatch.setattr(failpoints, "_gate", gate)
    assert run.engine(ModuleAdapter(target), "late").wait_for_version(3, SECONDS) == version
    assert same(source, target)
    assert reading
    monkeypatch.setattr(failpoints, "_gate", None)
    with Client(ClientSettings.load({}, coordinator=run.server.url, token=Secret(run.server.token))) as client:
        (late,) = client.status().rounds[-1].replicas
    assert (late.name, late.source, late.error) == ("late", "b", None)


class Loads(ModuleAdapter):
    """Says nothing of where its parameters are."""

    no_shards = "a test says so"

    def shards(self) -> None:  # type: ignore[override]
        return None


class Sleeps(ModuleAdapter):
    no_source = "it may sleep"


@pytest.mark.parametrize(
    ("adapter", "options", "message"),
    [
        (Loads(linear(1)), {}, r"no shards\(\).*a test says so"),
        (Sleeps(linear(1)), {}, "it may sleep"),
        (ModuleAdapter(linear(1)), {"transports": ["collective"]}, "collective reads only from trainers"),
    ],
)
def test_an_engine_that_cannot_serve_its_weights_says_why(
    run: Run, adapter: EngineAdapter, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run.engine(adapter, "a", serve_weights=True, **options)


WORDS = 1024


def vector(value: float) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.full((WORDS,), value), requires_grad=False))
    return module


class Thief(ModuleAdapter):
    """After an honest update it changes its weights, such that their public digest stays the same."""

    def resume(self) -> None:
        super().resume()
        held = self.module.get_parameter("w").data
        true = held.numpy().view(np.uint32).copy()
        words = forged(true, np.full(WORDS, 666.0, np.float32).view(np.uint32), PUBLIC)
        held.copy_(torch.from_numpy(words.view(np.float32)))
        assert digest_box(held, (WORDS,), (0,)) == digest_box(torch.from_numpy(true.view(np.float32)), (WORDS,), (0,))


class LateLoader(ModuleAdapter):
    """Its parameters cannot be read back: what its loader was handed is digested."""

    loads_late = True


def poisoned(module: torch.nn.Module) -> bool:
    return int((module.get_parameter("w") == 666.0).sum()) > WORDS // 2


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp"])
@pytest.mark.parametrize(
    ("adapter", "delivery"), [(ModuleAdapter, "direct"), (ModuleAdapter, "streamed"), (LateLoader, "streamed")]
)
def test_weights_with_a_forged_digest_are_not_installed(
    run: Run, adapter: type[ModuleAdapter], delivery: str, transport: str
) -> None:
    source, target = vector(1.5), vector(0.0)
    trainer = run.trainer(source, transports=[transport])
    thief = vector(0.0)
    run.engine(Thief(thief), "thief", transports=[transport], serve_weights=True)
    trainer.publish(1, timeout=SECONDS)
    trainer.close()
    assert poisoned(thief)
    settings = ClientSettings.load({}, coordinator=run.server.url, token=Secret(run.server.token))
    with Client(settings) as client, client.events() as events:
        late = run.engine(adapter(target), "late", transports=[transport], delivery=delivery)
        result = next(event.result for event in events if isinstance(event, RoundEnded))
        assert result is not None
        (replica,) = result.replicas
        assert (replica.name, replica.source, replica.state) == ("late", "thief", "dirty")
        assert "1 of 1 tensors differ from the published ones" in str(replica.error)
    assert late.serving is None
    assert poisoned(target), "it was paused before the check, and stays so"


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
def test_in_waves_a_reader_of_a_thief_reads_again_from_the_trainer(delivery: str) -> None:
    with ExitStack() as stack:
        waves = Run(stack, fan_out=1)
        source, thief, targets = vector(1.5), vector(0.0), [vector(0.0) for _ in range(3)]
        trainer = waves.trainer(source, transports=["tcp"])
        waves.engine(Thief(thief), "a-thief", transports=["tcp"], serve_weights=True)
        for number, target in enumerate(targets):
            waves.engine(ModuleAdapter(target), f"r{number}", transports=["tcp"], delivery=delivery)
        for number in (1, 2):
            result = trainer.publish(number, timeout=SECONDS)
            assert len(result.updated) == 4
            assert poisoned(thief)
            assert not any(poisoned(target) for target in targets)


def test_the_environment_can_ask_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WEIGHTSYNC_SERVE_WEIGHTS", "on")
    with pytest.raises(ConfigurationError, match="it may sleep"):
        run.engine(Sleeps(linear(1)), "a")
    run.engine(Sleeps(linear(1)), "a", serve_weights=False)
