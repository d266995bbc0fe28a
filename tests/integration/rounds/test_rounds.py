"""Trainer and Engine over a real coordinator: rounds by every transport and delivery, and what a user gets for bad input."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceeded,
    LayoutError,
    ManifestMismatch,
    MembershipError,
    PeerLost,
    RoundFailed,
    TransportUnavailable,
    VersionError,
)
from weightsync.model import Manifest, TensorSpec, Version
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import FollowedShards, ShardedState, shard
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole

TRANSPORTS = ("inproc", "shared_memory", "tcp", "collective")


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as running:
        yield running


class Net(torch.nn.Module):
    """Every awkward thing in one small model: tied head, odd shapes, a scalar, an empty tensor, mixed dtypes."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 24, dtype=torch.bfloat16)
        self.up = torch.nn.Linear(24, 51, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(51)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 7))
        self.head = torch.nn.Linear(24, 37, bias=False, dtype=torch.bfloat16)
        if tied:
            self.head.weight = self.embed.weight


def change(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == name2 and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for (name, a), (name2, b) in pairs)


class Joined:
    """One trainer rank and one engine rank in this process, over the real service."""

    def __init__(self, server: BackgroundServer, owned: ExitStack) -> None:
        self.server, self._owned = server, owned

    def trainer(self, state: torch.nn.Module | Mapping[str, torch.Tensor] | ShardedState, **options: object) -> Trainer:
        return self._owned.enter_context(Trainer(state, self.server.url, token=self.server.token, **options))  # type: ignore[arg-type]

    def engine(self, adapter: EngineAdapter, replica: str = "replica-0", **options: object) -> Engine:
        made = Engine(adapter, replica, self.server.url, token=self.server.token, **options)  # type: ignore[arg-type]
        return self._owned.enter_context(made)


@pytest.fixture
def joined(server: BackgroundServer) -> Iterator[Joined]:
    with ExitStack() as owned:
        yield Joined(server, owned)


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_changed_versions_arrive_bit_for_bit(joined: Joined, transport: str, delivery: str) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source, transports=[transport])
    adapter = ModuleAdapter(target)
    engine = joined.engine(adapter, transports=[transport], delivery=delivery, bucket_bytes=2000)
    for number in (1, 2, 5):
        change(source, number)
        change(target, 1000 + number)  # scrambled: what was right before must not help
        result = trainer.publish(number, timeout=20)
        assert same(source, target)
        (replica,) = result.replicas
        assert (replica.version, replica.delivery, replica.transports, replica.verified) == (
            number,
            delivery,
            (transport,),
            "installed",
        )
        assert replica.digest == result.version.digest
        assert set(replica.phases) == {"agree", "pause", "move", "verify", "commit"}
        with adapter.in_use() as version:
            assert version == result.version == engine.serving


def test_nan_and_infinity_are_moved_as_they_are(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    with torch.no_grad():
        source.up.weight[3, 4] = float("nan")
        source.up.weight[0] = float("-inf")
    trainer.publish(1, timeout=20)
    assert same(source, target)
    assert torch.isnan(target.up.weight[3, 4])


def test_float32_masters_become_bfloat16_only_when_asked(joined: Joined) -> None:
    source = torch.nn.Linear(40, 30)
    target = torch.nn.Linear(40, 30, dtype=torch.bfloat16)
    trainer = joined.trainer(source, dtype=torch.bfloat16)
    joined.engine(ModuleAdapter(target))
    trainer.publish(1, timeout=20)
    assert torch.equal(target.weight, source.weight.to(torch.bfloat16))


def test_another_dtype_is_refused_and_says_what_to_do(joined: Joined) -> None:
    joined.trainer(torch.nn.Linear(4, 3))
    with pytest.raises(
        ManifestMismatch, match=r"2 tensors have dtype bfloat16 instead of float32[\s\S]*Trainer\(..., dtype=torch.bfloat16"
    ):
        joined.engine(ModuleAdapter(torch.nn.Linear(4, 3, dtype=torch.bfloat16)))


def test_differences_of_the_manifest_are_listed_ten_at_most_with_their_count(joined: Joined) -> None:
    joined.trainer({f"layers.{index}.weight": torch.zeros(2, 2) for index in range(30)})
    module = torch.nn.Module()
    module.register_parameter("other", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ManifestMismatch) as caught:
        joined.engine(ModuleAdapter(module))
    text = str(caught.value)
    assert "31 differences" in text
    assert "missing: layers.0.weight" in text
    assert "21 more" in text
    assert text.count("\n") == 11


def test_a_version_is_published_once_and_never_backwards(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source)
    engine = joined.engine(ModuleAdapter(target))
    trainer.publish(5, timeout=20)
    for number in (5, 4):
        with pytest.raises(VersionError, match="5"):
            trainer.publish(number, timeout=20)
    assert engine.serving is not None
    assert engine.serving.number == 5
    assert trainer.publish(6, timeout=20).ok


def test_after_publish_returns_the_trainers_memory_is_not_read(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source)
    change(source, 1)
    expected = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    adapter = ModuleAdapter(target)
    with ExitStack() as held:
        held.enter_context(adapter.in_use())  # the engine is busy, so the round cannot move anything yet
        joined.engine(adapter)
        future = trainer.publish_async(1, timeout=20)
        change(source, 2)  # the next optimizer step
    assert future.result(20).ok
    assert all(torch.equal(expected[name], tensor) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
def test_memory_that_a_framework_replaced_is_followed_on_both_sides(joined: Joined, delivery: str) -> None:
    source, target = Net(tied=False), Net(tied=False)
    trainer = joined.trainer(source)
    adapter = ModuleAdapter(target)
    joined.engine(adapter, delivery=delivery)
    trainer.publish(1, timeout=20)
    for number, moved in ((2, source), (3, target), (4, source)):
        fresh = {name: tensor.clone() for name, tensor in moved.state_dict().items()}
        moved.load_state_dict(fresh, assign=True)  # as sleep and wake, .to() or a reload do
        change(source, number)
        trainer.publish(number, timeout=20)
        assert same(source, target)


def test_a_number_that_is_published_again_means_the_weights_of_now_on_every_rank(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = [{"weight": torch.zeros(4, 3)}, {"weight": torch.zeros(4, 3)}]
    target = torch.nn.Linear(3, 8, bias=False)
    rows = [shard("weight", half["weight"], (8, 3), (4 * rank, 0)) for rank, half in enumerate(halves)]
    manifest = Manifest([TensorSpec("weight", (8, 3), "float32")])
    monkeypatch.setattr(FollowedShards, "_look", lambda self: ([], []))
    trainers = []
    for rank in range(2):
        with monkeypatch.context() as patched:
            patched.setattr("weightsync.tensors.shards.shards_of", lambda *_, rank=rank, **__: (manifest, [rows[rank]]))
            trainers.append(joined.trainer(halves[rank], rank=rank, world_size=2))
    joined.engine(ModuleAdapter(target))

    def publish(number: int, value: float) -> list[BaseException | None]:
        for half in halves:
            half["weight"].fill_(value)
        with ThreadPoolExecutor(2) as pool:
            return [one.exception(30) for one in [pool.submit(trainer.publish, number, timeout=10) for trainer in trainers]]

    with monkeypatch.context() as patched:
        role = trainers[1]._role
        assert isinstance(role, TrainerRole)
        patched.setattr(role._placer, "place", Mock(side_effect=LayoutError("injected")))
        assert all(publish(5, 5.0))
    assert publish(5, 6.0) == [None, None]
    assert torch.equal(target.weight, torch.full((8, 3), 6.0))


@pytest.mark.parametrize("number", ["32", 33.5, True, -5, 1 << 70])
def test_a_version_that_is_no_number_is_refused_at_once(joined: Joined, number: int) -> None:
    trainer = joined.trainer(Net())
    with pytest.raises(VersionError, match="integer"):
        trainer.publish(number, timeout=20)


def test_numpys_integers_are_numbers(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    int_like: Any = np.int64(3)
    assert trainer.publish(int_like, timeout=20).version.number == 3


def test_the_frameworks_own_step_is_in_the_result(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    int_like: Any = np.int64(400)
    assert trainer.publish(step=int_like, timeout=20).step == 400
    assert trainer.publish_async(step=400, timeout=20).result(20).step == 400
    assert trainer.publish(timeout=20).step is None


@pytest.mark.parametrize("step", [0.5, "400", 1 << 63])
def test_a_step_that_is_no_integer_of_64_bits_is_refused_at_once(joined: Joined, step: Any) -> None:
    with pytest.raises(ConfigurationError, match="a step is an integer"):
        joined.trainer(Net()).publish(step=step, timeout=20)


def test_a_dead_trainer_rank_ends_the_others_publication_at_once(joined: Joined) -> None:
    ranks = [joined.trainer(Net(), rank=rank, world_size=3) for rank in range(2)]  # the third never comes
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(one.publish, 1, timeout=30) for one in ranks]
        threading.Event().wait(0.5)  # the coordinator has heard both
        ranks[1].close()
        with pytest.raises(PeerLost, match="trainer/1 is gone"):
            asked[0].result(5)
        assert asked[1].exception(5) is not None


class Faulty(ModuleAdapter):
    """Raises where it is told to."""

    fault = ""

    def _maybe(self, where: str) -> None:
        if self.fault == where:
            raise RuntimeError(f"injected in {where}")

    def pause(self, mode: str, timeout: float) -> None:
        super().pause(mode, timeout)  # type: ignore[arg-type]
        self._maybe("pause")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        first = list(tensors)
        super().load(first[: len(first) // 2])
        self._maybe("load")
        super().load(first[len(first) // 2 :])
        if self.fault == "skip":
            with torch.no_grad():
                next(iter(self.module.parameters())).add_(1)  # a loader that silently installs something else

    def finish(self, version: Version) -> None:
        self._maybe("finish")
        super().finish(version)

    def flush(self) -> bool:
        return self.fault != "flush"

    def resume(self) -> None:
        self._maybe("resume")
        super().resume()


@contextmanager
def _never_used(adapter: ModuleAdapter) -> Iterator[None]:
    """Nobody gets to use the module while it is dirty."""
    with pytest.raises(DeadlineExceeded), adapter.in_use(timeout=0.2):
        pass
    yield


@pytest.mark.parametrize("fault", ["pause", "load", "skip", "finish", "flush", "resume"])
def test_a_replica_that_fails_is_never_used_until_a_later_round_brought_it_back(joined: Joined, fault: str) -> None:
    source, good, bad = Net(), Net(), Net()
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(good), "good")
    adapter = Faulty(bad)
    joined.engine(adapter, "bad", delivery="streamed", bucket_bytes=3000)
    change(source, 1)
    adapter.fault = fault
    result = trainer.publish(1, timeout=20)
    outcome = {replica.name: replica for replica in result.replicas}
    assert outcome["good"].version == 1
    assert same(source, good)
    assert outcome["bad"].state == "dirty"
    assert outcome["bad"].version is None
    assert outcome["bad"].error
    with _never_used(adapter):
        adapter.fault = ""
        change(source, 2)
        result = trainer.publish(2, timeout=20)
    assert {replica.name: replica.version for replica in result.replicas} == {"good": 2, "bad": 2}
    assert same(source, bad)
    with adapter.in_use(timeout=1) as version:
        assert version == result.version


def test_fewer_replicas_than_required_is_an_error_that_names_them(joined: Joined) -> None:
    source, adapter = Net(), Faulty(Net())
    trainer = joined.trainer(source)
    joined.engine(adapter, "only", delivery="streamed")
    adapter.fault = "load"
    with pytest.raises(RoundFailed, match=r"only: .*injected in load"):
        trainer.publish(1, timeout=20)


def test_a_joiner_is_seeded_without_a_new_publication(joined: Joined) -> None:
    source, late = Net(), Net()
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(Net()), "early")
    change(source, 1)
    trainer.publish(1, timeout=20)
    expected = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    change(source, 2)  # training goes on: the joiner gets what was published
    seeded = threading.Event()

    class Late(ModuleAdapter):
        def resume(self) -> None:
            super().resume()
            seeded.set()

    adapter = Late(late)
    joined.engine(adapter, "late")
    assert seeded.wait(20)
    with adapter.in_use(timeout=5) as version:
        assert version is not None
        assert version.number == 1
        assert all(torch.equal(expected[name], tensor) for name, tensor in late.state_dict().items())


def test_a_name_in_use_and_a_second_trainer_are_refused(joined: Joined) -> None:
    joined.trainer(Net())
    joined.engine(ModuleAdapter(Net()), "taken")
    with pytest.raises(MembershipError, match="taken"):
        joined.engine(ModuleAdapter(Net()), "taken")
    with pytest.raises(MembershipError, match="trainer"):
        joined.trainer(Net())


def test_a_wrong_token_is_refused(server: BackgroundServer) -> None:
    with pytest.raises(AuthenticationError, match="token"):
        Trainer(Net(), server.url, token="wrong")


def test_a_rank_that_never_joins_is_named(joined: Joined) -> None:
    source = Net()
    trainer = joined.trainer(source, rank=0, world_size=2)
    with pytest.raises(DeadlineExceeded, match=r"\b1\b"):
        trainer.publish(1, timeout=0.5)


def test_ranks_that_hold_another_model_are_refused(joined: Joined) -> None:
    joined.trainer(Net(), rank=0, world_size=2)
    with pytest.raises(ManifestMismatch):
        joined.trainer(Net(tied=False), rank=1, world_size=2)


class Opaque(EngineAdapter):
    """An engine that can only be streamed to."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._inner = ModuleAdapter(module)

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._inner.load(tensors)


class Lazy(Opaque):
    """A loader with a ``yield`` left inside: it never runs."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:  # type: ignore[override]
        for name, tensor in tensors:
            self._inner.load([(name, tensor)])
            yield


def test_a_loader_that_takes_nothing_is_an_error(joined: Joined) -> None:
    trainer = joined.trainer(Net())
    joined.engine(Lazy(Net()))
    with pytest.raises(RoundFailed, match="took 0 of the 7 tensors"):
        trainer.publish(1, timeout=20)


def test_auto_streams_to_an_engine_without_a_layout_and_direct_is_refused(joined: Joined) -> None:
    with pytest.raises(ConfigurationError, match="streamed"):
        joined.engine(Opaque(Net()), delivery="direct")
    source = Net()
    trainer = joined.trainer(source)
    joined.engine(Opaque(Net()))
    result = trainer.publish(1, timeout=20)
    assert (result.replicas[0].delivery, result.replicas[0].verified) == ("streamed", "received")


def test_an_engine_that_is_no_adapter_is_refused(joined: Joined) -> None:
    for engine in ("vllm", Net(), None):
        with pytest.raises(ConfigurationError, match=r"not an engine adapter.*ModuleAdapter"):
            joined.engine(engine)  # type: ignore[arg-type]


def test_a_transport_that_is_unknown_is_refused(joined: Joined) -> None:
    with pytest.raises((ConfigurationError, TransportUnavailable), match="pigeon"):
        joined.trainer(Net(), transports=["pigeon"])


def test_trainer_and_engine_without_a_common_transport_say_so(joined: Joined) -> None:
    source = Net()
    trainer = joined.trainer(source, transports=["shared_memory"])
    joined.engine(ModuleAdapter(Net()), "far", transports=["inproc"])
    with pytest.raises(RoundFailed, match=r"inproc|shared_memory"):
        trainer.publish(1, timeout=20)
