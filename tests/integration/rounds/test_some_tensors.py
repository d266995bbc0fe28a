"""Streamed rounds of a trainer with deltas: loaders get only the tensors that changed, and all where that is not known."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

import pytest
import torch
from tests.integration.rounds.test_deltas import joined as joined  # noqa: PLC0414 - a fixture
from tests.integration.rounds.test_deltas import model, only, publish, same
from tests.integration.rounds.test_rounds import Joined

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.session import EngineSession
from weightsync.engines.module import ModuleAdapter
from weightsync.model import Manifest, Version

NAMES = [name for name, _ in model().named_parameters()]
SIZES = {name: value.nbytes for name, value in model().named_parameters()}


class Loader(EngineAdapter):
    """Has a loader and nothing else. Notes what it is given."""

    name = "loader"
    loads_some = True

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self._inner = module, ModuleAdapter(module)
        self.loaded: list[str] = []
        self.kept: list[str] = []
        self.serves = True

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def pause(self, mode: object, timeout: float) -> None:
        self.serves = False

    def begin(self) -> None:
        self.loaded, self.kept = [], []

    def keep(self, names: Collection[str]) -> None:
        self.kept = list(names)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        came = list(tensors)
        assert came
        self.loaded += [name for name, _ in came]
        self._inner.load(came)

    def resume(self) -> None:
        self.serves = True


class Whole(Loader):
    """Another loader, of which it is not known that some tensors are enough."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load(tensors)


class Discards(Loader):
    """Its weights may be gone when it wakes up."""

    def wake_weights(self) -> None:
        for parameter in self.module.parameters():
            parameter.data.fill_(7)


class Fails(Loader):
    """Its loader raises after the first bucket, if told to."""

    fails = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load(tensors)
        if self.fails:
            raise OSError("the disk of this test is full")

    loads_some = True


def change(module: torch.nn.Module, *names: str) -> None:
    with torch.no_grad():
        for name in names:
            module.get_parameter(name).view(-1)[3:7] += 1.0


@pytest.fixture(autouse=True)
def no_gate() -> Iterator[None]:
    yield
    failpoints.install(lambda name: None)


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp", "nixl"])
def test_only_tensors_that_changed_are_read_and_loaded(joined: Joined, transport: str, buckets: int) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    source, adapter = model(), Loader(model(1))
    trainer = joined.trainer(source, deltas=True, transports=[transport])
    engine = joined.engine(adapter, transports=[transport], bucket_bytes=600, staging_buckets=buckets)
    trainer.wait_for_replicas()
    whole = only(trainer)
    assert (whole.base, whole.verified, whole.nbytes, sorted(adapter.loaded)) == (
        None,
        "received",
        sum(SIZES.values()),
        sorted(NAMES),
    )
    for number, names in enumerate([["1.weight"], ["0.bias", "2.weight"], NAMES[:-1], [], ["1.bias"]], 2):
        change(source, *names)
        some = only(trainer)
        assert (some.error, some.base, some.verified) == (None, number - 1, "received")
        assert some.nbytes == sum(SIZES[name] for name in names)
        assert (sorted(adapter.loaded), sorted(adapter.kept)) == (sorted(names), sorted({*NAMES} - {*names}))
        assert same(source, adapter.module)
        assert engine.serving is not None and engine.serving.number == number


def test_a_module_reads_all_of_its_parameters_again(joined: Joined) -> None:
    source, target = model(), model(1)
    trainer = joined.trainer(source, deltas=True)
    joined.engine(ModuleAdapter(target), delivery="streamed")
    trainer.wait_for_replicas()
    only(trainer)
    change(source, "0.weight")
    some = only(trainer)
    assert (some.base, some.verified, some.nbytes) == (1, "installed", SIZES["0.weight"])
    assert same(source, target)
    change(target, "2.bias")  # behind our back
    change(source, "0.bias")
    some = only(trainer)
    assert (some.base, some.verified, some.nbytes) == (2, "installed", SIZES["0.bias"] + SIZES["2.bias"])
    assert same(source, target)


@pytest.mark.parametrize(("kind", "deltas", "why"), [
    (Whole, True, "takes whole versions"), (Discards, True, "takes whole versions"), (Loader, False, ""),
])  # fmt: skip
def test_all_tensors_come_where_some_are_not_enough(
    joined: Joined, kind: type[Loader], deltas: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source, adapter = model(), kind(model(1))
    trainer = joined.trainer(source, deltas=deltas)
    joined.engine(adapter)
    trainer.wait_for_replicas()
    for _ in range(2):
        change(source, "0.weight")
        result = only(trainer)
        assert (result.error, result.base, result.nbytes) == (None, None, sum(SIZES.values()))
        assert same(source, adapter.module)
    assert why in caplog.text


def test_all_tensors_come_after_all_have_changed(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source, adapter = model(), Loader(model(1))
    trainer = joined.trainer(source, deltas=True)
    joined.engine(adapter)
    trainer.wait_for_replicas()
    for _ in range(2):
        change(source, *NAMES)
        assert (only(trainer).base, sorted(adapter.loaded)) == (None, sorted(NAMES))
    assert "every tensor has changed since version" in caplog.text


@pytest.mark.parametrize("failing", [0, 1])
def test_every_rank_gets_all_tensors_after_one_failed(joined: Joined, failing: int) -> None:
    """Its loader had taken a part of the version, and the other rank's all that changed."""
    source, adapters = model(), [Fails(model(seed)) for seed in (1, 2)]
    trainer = joined.trainer(source, deltas=True)
    for rank, adapter in enumerate(adapters):
        joined.engine(adapter, rank=rank, world_size=2, bucket_bytes=600)
    trainer.wait_for_replicas()
    only(trainer)
    change(source, "0.weight", "2.weight")
    adapters[failing].fails = True
    failed = only(trainer)
    assert (failed.state, failed.version, failed.base) == ("dirty", None, None)
    assert "full" in str(failed.error) and not any(adapter.serves for adapter in adapters)
    adapters[failing].fails = False
    change(source, "1.weight")
    again = only(trainer)
    assert (again.error, again.base) == (None, None)
    assert all(sorted(adapter.loaded) == sorted(NAMES) and same(source, adapter.module) for adapter in adapters)
    change(source, "1.bias")
    assert only(trainer).base == again.version
    assert all(adapter.loaded == ["1.bias"] and same(source, adapter.module) for adapter in adapters)


@pytest.mark.parametrize(
    "point", ["engine.stage", "engine.staged", "engine.pausing", "engine.paused", "engine.moved", "engine.finish"]
)
def test_a_round_that_fails_anywhere_leaves_nothing_behind(joined: Joined, point: str) -> None:
    source, adapter = model(), Loader(model(1))
    trainer = joined.trainer(source, deltas=True)
    joined.engine(adapter)
    trainer.wait_for_replicas()
    only(trainer)
    failing = [True]

    def fail(name: str) -> None:
        if name == point and failing:
            failing.clear()
            raise OSError("the disk of this test is full")

    change(source, "0.weight")
    failpoints.install(fail)
    only(trainer)
    assert not failing
    change(source, "1.weight")
    assert only(trainer).error is None
    assert same(source, adapter.module)
    change(source, "1.bias")
    assert only(trainer).base == 3
    assert (adapter.loaded, same(source, adapter.module)) == (["1.bias"], True)


def test_a_replica_that_missed_versions_gets_what_changed_since_its_own(joined: Joined) -> None:
    source, adapters = model(), {name: Loader(model(1)) for name in ("a", "behind")}
    trainer = joined.trainer(source, deltas=True)
    for name, adapter in adapters.items():
        joined.engine(adapter, name)
    trainer.wait_for_replicas(2)
    publish(trainer)

    behind = adapters["behind"]
    other = EngineSession(behind, "another driver")
    for name in ("0.bias", "1.bias"):
        change(source, name)
        with other.turn(other.receive("a wait"), Deadline(20)):  # it cannot answer, and is not paused
            results = {replica.name: replica for replica in trainer.publish(timeout=2).replicas}
        assert (results["a"].error, adapters["a"].loaded) == (None, [name])
        assert (results["behind"].error is None, results["behind"].version, behind.serves) == (False, 1, True)
    change(source, "2.bias")
    results = {replica.name: replica for replica in publish(trainer).replicas}
    assert (results["a"].base, results["behind"].base, results["behind"].error) == (3, 1, None)
    assert sorted(behind.loaded) == ["0.bias", "1.bias", "2.bias"]
    assert all(same(source, adapter.module) for adapter in adapters.values())


def outside(adapter: Loader, version: Version) -> None:
    """Update an engine by its own means: zeros for a tensor, under the label of another version."""
    session, deadline = EngineSession(adapter, "an update from outside"), Deadline(20)
    with session.turn(session.receive("an update"), deadline):
        session.pause("abort", 5)
        with session.writing():
            session.begin()
            session.load([("2.weight", torch.zeros(64, 250, dtype=torch.bfloat16))])
        session.finish(version)
        session.commit(version)
        with session.resuming(deadline):
            pass


@pytest.mark.parametrize("point", ["round.placed", "round.staged"])
def test_an_update_from_outside_voids_what_was_received(joined: Joined, point: str) -> None:
    """Before the tensors are compared, and after it, before the pause: the base is not served any more."""
    source, adapter = model(), Loader(model(1))
    trainer = joined.trainer(source, deltas=True)
    joined.engine(adapter)
    trainer.wait_for_replicas()
    first = trainer.publish(1)
    left = [first.version]

    def gate(name: str) -> None:
        if name == point and left:
            outside(adapter, left.pop())

    change(source, "0.weight")
    failpoints.install(gate)
    result = only(trainer)
    assert (not left, result.error, result.nbytes, sorted(adapter.loaded)) == (True, None, sum(SIZES.values()), sorted(NAMES))
    assert same(source, adapter.module)


class Remembers(Loader):
    """Keeps what each update gave it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.updates: list[list[str]] = []

    def begin(self) -> None:
        super().begin()
        self.updates.append(self.loaded)


def test_a_restarted_engine_or_a_new_epoch_gets_all_tensors(joined: Joined) -> None:
    source, adapter = model(), Remembers(model(1))
    with joined.trainer(source, deltas=True) as trainer:
        with joined.engine(adapter):
            trainer.wait_for_replicas()
            only(trainer)
        before = len(adapter.updates)
        joined.engine(adapter)
        trainer.wait_for_replicas()
        change(source, "0.weight")
        base = only(trainer).base  # 1 if it was given version 1 again in the meantime
        assert base in (None, 1) and sorted(adapter.updates[before]) == sorted(NAMES)
        change(source, "0.weight")
        assert (only(trainer).base, adapter.loaded) == (2, ["0.weight"])
    trainer = joined.trainer(source, deltas=True, new_epoch=True)
    for base, loaded in ((None, NAMES), (1, ["1.bias"])):
        change(source, "1.bias")
        assert (only(trainer).base, sorted(adapter.loaded)) == (base, sorted(loaded))
        assert same(source, adapter.module)


def test_a_tied_tensor_comes_once_under_its_first_name(joined: Joined) -> None:
    def tied(seed: int) -> torch.nn.Module:
        module = model(seed)
        module.append(torch.nn.Linear(250, 64).bfloat16())
        module[3].weight = module[2].weight
        return module

    source, adapter = tied(0), Loader(tied(1))
    trainer = joined.trainer(source, deltas=True)
    joined.engine(adapter)
    trainer.wait_for_replicas()
    only(trainer)
    change(source, "3.weight")
    result = only(trainer)
    assert (result.base, result.nbytes, adapter.loaded) == (1, SIZES["2.weight"], ["2.weight"])
    assert same(source, adapter.module)
