"""Rounds that move only what changed: by every transport, to several ranks, undone after a failure, and whole where they must."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.integration.rounds.test_rounds import Joined

from weightsync import failpoints
from weightsync.config import ServerSettings
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.model import Manifest, PauseMode, TensorSpec, Version
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import Shard, ShardedState, shard
from weightsync.trainer.trainer import Trainer


@pytest.fixture
def joined() -> Iterator[Joined]:
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=0)  # replicas that failed are in the result
    with BackgroundServer(settings) as server, ExitStack() as owned:
        yield Joined(server, owned)


@pytest.fixture
def gate() -> Iterator[None]:
    yield
    failpoints.install(lambda name: None)


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(96, 250), torch.nn.LayerNorm(250), torch.nn.Linear(250, 64)).bfloat16()


def step(module: torch.nn.Module, share: float = 0.01) -> None:
    """Change so many of the words."""
    with torch.no_grad():
        for parameter in module.parameters():
            words = parameter.view(torch.int16)
            words[torch.rand(words.shape) < share] ^= 1


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Columns(EngineAdapter):
    """An engine rank that holds a part of the columns of each matrix, and counts what is asked of it."""

    name = "columns"

    def __init__(self, like: torch.nn.Module, rank: int = 0, ranks: int = 1) -> None:
        self.whole = {name: value.detach() for name, value in like.named_parameters()}
        self.held: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        for name, value in self.whole.items():
            first, last = (value.shape[-1] * which // ranks for which in (rank, rank + 1))
            part = slice(first, last) if value.dim() == 2 else slice(None)
            self.held[name] = torch.zeros_like(value[..., part]), (0,) * (value.dim() - 1) + (part.start or 0,)
        self.paused, self.pauses = False, 0
        self.finished: list[int] = []

    def manifest(self) -> Manifest:
        return Manifest(TensorSpec(name, tuple(value.shape), "bfloat16") for name, value in self.whole.items())

    def shards(self) -> Sequence[Shard]:
        return [shard(name, part, self.whole[name].shape, starts) for name, (part, starts) in self.held.items()]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.paused, self.pauses = True, self.pauses + 1

    def resume(self) -> None:
        self.paused = False

    def finish(self, version: Version) -> None:
        self.finished.append(version.number)

    def flush(self) -> bool:
        return True

    def holds(self, module: torch.nn.Module) -> bool:
        values = dict(module.named_parameters())
        for name, (part, starts) in self.held.items():
            index = tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
            if not torch.equal(part, values[name][index]):
                return False
        return True


def publish(trainer: Trainer) -> RoundResult:
    """Publish version 1, or the next."""
    return trainer.publish(1 if trainer.last_version is None else None)


def only(trainer: Trainer) -> ReplicaResult:
    """Publish, to one replica."""
    [replica] = publish(trainer).replicas
    return replica


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp", "nixl"])
def test_the_second_version_moves_only_what_changed(joined: Joined, transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True, transports=[transport])
    engine = joined.engine(ModuleAdapter(target), transports=[transport])
    trainer.wait_for_replicas()
    whole = only(trainer)
    assert (whole.base, whole.verified) == (None, "installed")
    for number in range(2, 5):
        step(source)
        changed = only(trainer)
        assert (changed.base, changed.verified, changed.version) == (number - 1, "installed", number)
        assert 0 < changed.nbytes < whole.nbytes / 10
        assert same(source, target)
        assert engine.serving is not None and engine.serving.number == number


def test_every_rank_reads_the_lists_of_its_part(joined: Joined) -> None:
    source = model()
    adapters = [Columns(source, rank, 2) for rank in range(2)]
    trainer = joined.trainer(source, deltas=True)
    for rank, adapter in enumerate(adapters):
        joined.engine(adapter, rank=rank, world_size=2)
    trainer.wait_for_replicas()
    only(trainer)
    for base in (1, 2):
        step(source)
        assert only(trainer).base == base
        assert all(adapter.holds(source) and not adapter.paused for adapter in adapters)


def test_the_same_weights_again_move_nothing(joined: Joined) -> None:
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    again = only(trainer)
    assert (again.base, again.nbytes, again.version, again.error) == (1, 0, 2, None)


def test_too_many_changes_move_whole(joined: Joined) -> None:
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    step(source, 0.9)
    assert only(trainer).base is None
    step(source)
    assert only(trainer).base == 2
    assert same(source, target)


def test_a_replica_that_missed_a_version_gets_all_bytes(joined: Joined) -> None:
    source, first, second = model(), model(1), model(2)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(first), "first")
    trainer.wait_for_replicas(names=["first"])
    only(trainer)
    step(source)
    only(trainer)
    late = joined.engine(ModuleAdapter(second), "second")
    late.wait_for_version(2, 20.0)
    step(source)
    bases = {replica.name: replica.base for replica in trainer.publish().replicas}
    assert bases["first"] == 2
    assert bases["second"] in (2, None)  # the publication may have come before its seeding was over
    assert same(source, first) and same(source, second)


def test_parameters_that_moved_get_all_bytes(joined: Joined) -> None:
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    for parameter in target.parameters():
        parameter.data = torch.zeros_like(parameter)  # and nothing of version 1 is left
    step(source)
    moved = only(trainer)
    assert (moved.base, moved.error) == (None, None)
    assert same(source, target)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("point", ["engine.stage", "engine.staged", "engine.pausing", "engine.paused", "engine.move"])
def test_parameters_that_move_after_changes_were_staged_get_all_bytes(joined: Joined, point: str) -> None:
    """Found by the simulation of people: changes went to the memory that the parameters had left."""
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    step(source)

    def move(name: str) -> None:
        if name == point:
            for parameter in target.parameters():
                parameter.data = parameter.data.clone()

    failpoints.install(move)
    assert only(trainer).error is None
    assert same(source, target)


@pytest.mark.parametrize("row", [3, 4])
def test_parameters_that_were_changed_behind_our_back_get_all_bytes(joined: Joined, row: int) -> None:
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)
    with torch.no_grad():
        source.get_parameter("0.weight")[3, 5] += 1.0
        target.get_parameter("0.weight")[row, 5] += 64.0  # a word that the new version changes, or one that it does not
    changed = only(trainer)
    assert (changed.base, changed.error) == (None, None)
    assert same(source, target)


@pytest.mark.usefixtures("gate")
def test_a_publication_that_fails_breaks_no_chain(joined: Joined) -> None:
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target))
    trainer.wait_for_replicas()
    only(trainer)

    def fail(name: str) -> None:
        if name == "trainer.placing":
            raise OSError("the disk of this test is full")

    step(source)
    failpoints.install(fail)
    with pytest.raises(WeightSyncError, match="full"):
        trainer.publish(timeout=5.0)
    failpoints.install(lambda name: None)
    for base in (None, 2, 3):
        step(source)
        assert only(trainer).base == base
        assert same(source, target)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("point", ["engine.move", "engine.applied", "engine.moved"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_whose_update_fails_serves_the_base_on(joined: Joined, point: str, ranks: int) -> None:
    source = model()
    adapters = [Columns(source, rank, ranks) for rank in range(ranks)]
    trainer = joined.trainer(source, deltas=True)
    engines = [joined.engine(adapter, rank=rank, world_size=ranks) for rank, adapter in enumerate(adapters)]
    trainer.wait_for_replicas()
    only(trainer)
    before = model()
    before.load_state_dict(source.state_dict())
    step(source)
    once = threading.Lock()

    def fail(name: str) -> None:
        if name == point and once.acquire(blocking=False):
            raise OSError("the disk of this test is full")

    failpoints.install(fail)
    replica = only(trainer)
    failpoints.install(lambda name: None)
    assert (replica.state, replica.version, replica.base) == ("loaded", 1, None)
    assert "full" in str(replica.error)
    assert all(adapter.holds(before) and not adapter.paused and adapter.finished == [1, 1] for adapter in adapters)
    assert [engine.serving and engine.serving.number for engine in engines] == [1] * ranks
    step(source)
    again = only(trainer)
    assert (again.error, again.base) == (None, 1)
    assert all(adapter.holds(source) for adapter in adapters)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("point", ["engine.finish", "engine.committed", "engine.resumed"])
def test_what_a_single_rank_may_have_committed_is_not_put_back(joined: Joined, point: str) -> None:
    """Its pause, move, commit and resume are one exchange, which fails when the words are the new version's."""
    source = model()
    adapter = Columns(source)
    trainer = joined.trainer(source, deltas=True)
    engine = joined.engine(adapter)
    trainer.wait_for_replicas()
    only(trainer)
    step(source)
    once = threading.Lock()

    def fail(name: str) -> None:
        if (name == point and once.acquire(blocking=False)) or (name == "engine.pause" and once.locked()):
            raise OSError("the disk of this test is full")

    failpoints.install(fail)  # also where the coordinator brings the version again, which it does soon
    replica = only(trainer)
    assert (replica.state, replica.version, engine.serving) == ("dirty", None, None)
    assert "full" in str(replica.error)
    assert adapter.holds(source) and adapter.paused
    failpoints.install(lambda name: None)
    step(source)
    again = only(trainer)
    assert again.error is None and again.base != 1, "that version is gone; 2 was perhaps brought again in between"
    assert adapter.holds(source) and not adapter.paused


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("missed", [1, 3])
def test_a_replica_that_serves_an_older_version_gets_all_that_changed_since(joined: Joined, missed: int) -> None:
    """In one step, with the values of the new version, beside a replica that serves the version before."""
    source, target = model(), model(1)
    behind = Columns(source)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target), "a")
    joined.engine(behind, "behind")
    trainer.wait_for_replicas(2)
    publish(trainer)
    flip = source.get_parameter("0.weight")

    def fail() -> None:
        raise OSError("the disk of this test is full")

    behind.begin = fail  # type: ignore[method-assign]
    for number in range(missed):
        step(source, 0.001)
        with torch.no_grad():
            flip[0, 0] += 1.0 if number % 2 else -1.0  # back to what it was, for an even number
        results = {replica.name: replica for replica in publish(trainer).replicas}
        assert results["a"].base == number + 1
        assert (results["behind"].error is None, results["behind"].version) == (False, 1)
    del behind.begin
    step(source, 0.001)
    results = {replica.name: replica for replica in publish(trainer).replicas}
    assert (results["a"].base, results["behind"].base, results["behind"].error) == (missed + 1, 1, None)
    assert behind.holds(source) and same(source, target)


@pytest.mark.parametrize("wrong", [-1, "yes"])
def test_deltas_that_are_no_number_of_bytes_are_refused(joined: Joined, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="deltas is True, or the most bytes"):
        joined.trainer(model(), deltas=wrong)


def test_two_trainer_ranks_list_the_changes_of_their_shards(joined: Joined) -> None:
    source = model()
    adapters = [Columns(source, rank, 3) for rank in range(3)]

    class Rows(ShardedState):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def declare(self) -> tuple[Manifest, Sequence[Shard]]:
            shards = []
            for name, value in source.named_parameters():
                first, last = (value.shape[0] * which // 2 for which in (self.rank, self.rank + 1))
                shards.append(shard(name, value.detach()[first:last], value.shape, (first,) + (0,) * (value.dim() - 1)))
            return adapters[0].manifest(), shards

    trainers = [joined.trainer(Rows(rank), deltas=True, rank=rank, world_size=2) for rank in range(2)]
    for rank, adapter in enumerate(adapters):
        joined.engine(adapter, rank=rank, world_size=3)
    trainers[0].wait_for_replicas()
    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 4):
            results = [outcome.result() for outcome in [pool.submit(publish, trainer) for trainer in trainers]]
            assert results[0].replicas[0].base == (number - 1 or None)
            assert all(adapter.holds(source) for adapter in adapters)
            step(source)
