"""LoRA adapters: published as versions beside the base weights, to engines that go on serving."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

import pytest
import torch
from tests.integration.rounds.test_rounds import Joined
from tests.integration.server.service_support import free_port

from weightsync import failpoints
from weightsync.config import Secret, ServerSettings
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    Aborted,
    ConfigurationError,
    DeadlineExceeded,
    LoadError,
    ProtocolError,
    RoundFailed,
    VersionError,
    WeightSyncError,
)
from weightsync.model import Manifest, RoundResult, TensorSpec, Version
from weightsync.model.lora import AdapterSpec, LoraSlots
from weightsync.protocol.messages import Commit, Pause, Resume
from weightsync.protocol.update_messages import Verify
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import Shard, ShardedState, shard
from weightsync.trainer.adapters import Adapters
from weightsync_disaggregated.rank import DisaggregatedRank

MODULES = ("0", "2")
OPERATOR = "of-operators-only-0123456789"

Made = Callable[..., "Fleet"]


@pytest.fixture
def made() -> Iterator[Made]:
    settings = ServerSettings.load(
        {"WEIGHTSYNC_REQUIRE": "0", "WEIGHTSYNC_OPERATOR_TOKEN": OPERATOR}, port=0
    )  # who failed is in the result
    with BackgroundServer(settings) as server, ExitStack() as owned:
        yield lambda **options: Fleet(Joined(server, owned), owned, **options)


@pytest.fixture
def gate() -> Iterator[None]:
    yield
    failpoints.install(lambda name: None)


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))


def lora(seed: int = 0, rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "0.lora_A.weight": (rank, 24),
        "0.lora_B.weight": (48, rank),
        "2.lora_A.weight": (rank, 48),
        "2.lora_B.weight": (8, rank),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def expected(base: torch.nn.Sequential, tensors: dict[str, torch.Tensor], scaling: float, x: torch.Tensor) -> torch.Tensor:
    """The model's output with the adapter merged."""
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    for name in MODULES:
        weights[f"{name}.weight"] += scaling * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    answer: torch.Tensor = torch.func.functional_call(base, weights, x)
    return answer.detach()


class Part(EngineAdapter):
    """One of several ranks of an engine, which notes what it is asked."""

    name = "part"

    def __init__(self) -> None:
        self.inner = ModuleAdapter(model(7))
        self.staged: dict[str, Mapping[str, torch.Tensor]] = {}
        self.registered: set[str] = set()
        self.spoils = False
        self.shows: Literal[True] | str | None = True
        self.reads_back: Callable[[], None] = lambda: None

    def manifest(self) -> Manifest:
        return self.inner.manifest()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.inner.load(tensors)

    def lora_slots(self) -> LoraSlots:
        return LoraSlots(4, 16)

    def stage_lora(
        self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | str | None:
        self.staged[label] = {name: tensor.clone() for name, tensor in tensors.items()}
        if self.shows is not True:
            return self.shows
        if self.spoils:
            next(iter(self.staged[label].values())).view(torch.int32)[0, 0] ^= 1
        return self.staged[label]

    def register_lora(self, version: Version) -> None:
        self.reads_back()
        self.registered.add(f"{version.run}@{version.number}")

    def drop_lora(self, label: str) -> None:
        self.staged.pop(label, None)
        self.registered.discard(label)

    def loras(self) -> Collection[str]:
        return self.staged


class Rows(ShardedState):
    """Half of the rows of each matrix."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int) -> None:
        names = {f"base_model.model.{name}": tensor for name, tensor in whole.items()}
        self.manifest = Manifest(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in names.items())
        self.shards = []
        for spec in self.manifest:
            first, last = (spec.shape[0] * which // 2 for which in (rank, rank + 1))
            self.shards.append(shard(spec.name, names[spec.name][first:last], spec.shape, (first, 0)))

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        return self.manifest, self.shards


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-3)


def _error(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except WeightSyncError as error:
        return error
    raise AssertionError("it should have failed")


class Fleet:
    """A trainer that has published its base, engines, and an adapter."""

    def __init__(
        self, joined: Joined, owned: ExitStack, engines: int = 1, slots: int = 4, ranks: int = 0, **options: object
    ) -> None:
        self.joined, self.base, self.owned, self.server, self.slots = joined, model(), owned, joined.server, slots
        self.trainer = joined.trainer(self.base)
        self.modules = [] if ranks else [self.join(f"r{index}") for index in range(engines)]
        self.parts = [Part() for _ in range(ranks)]
        for rank, part in enumerate(self.parts):
            joined.engine(part, "r0", rank=rank, world_size=ranks)
        self.trainer.wait_for_replicas(engines)
        self.trainer.publish(0)
        self.tensors = lora()
        self.adapters = owned.enter_context(Adapters(self.tensors, self.trainer, alpha=8, **options))  # type: ignore[arg-type]

    def join(self, replica: str) -> ModuleAdapter:
        adapter = ModuleAdapter(model(7), adapter_slots=self.slots, max_lora_rank=16)
        self.joined.engine(adapter, replica)
        return adapter

    def elsewhere(self, base: Version | None, state: object = None, **options: object) -> Adapters:
        """Adapters of another process than the trainer's."""
        tensors = self.tensors if state is None else state
        return Adapters(tensors, base, alpha=8, coordinator=self.server.url, token=self.server.token, **options)  # type: ignore[arg-type]

    def names(self, replica: str = "") -> list[str]:
        """What the coordinator says is served, by ``replica`` or anyone."""
        request = urllib.request.Request(f"{self.server.url}/v1/status", headers={"Authorization": f"Bearer {self.server.token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            served = json.load(answer)["adapters"]
        return [f"{adapter['name']}@{adapter['version']}" for adapter in served if not replica or replica in adapter["replicas"]]

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + 10
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        return condition()

    def answer(self, name: str, index: int = 0) -> tuple[Version | None, torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(5, 24)
        with self.modules[index].in_use(5, adapter=name) as version, torch.no_grad():
            return version, self.modules[index].module(x)

    def right(self, tensors: dict[str, torch.Tensor], scaling: float = 2.0) -> torch.Tensor:
        torch.manual_seed(3)
        return expected(self.base, tensors, scaling, torch.randn(5, 24))


def test_a_program_without_a_trainer_waits_for_replicas(made: Made) -> None:
    """Its first version failed if the engines were still loading."""
    fleet = made(engines=1)
    with fleet.elsewhere(fleet.trainer.version) as adapters, ThreadPoolExecutor(1) as other:
        assert adapters.wait_for_replicas() == ("r0",)
        with pytest.raises(DeadlineExceeded, match=r"2 replicas \(ready: r0\)"):
            adapters.wait_for_replicas(2, timeout=0.2)
        waiting = other.submit(adapters.wait_for_replicas, 2, 30.0)
        fleet.join("r1")
        assert waiting.result() == ("r0", "r1")


def test_a_version_is_served_by_name_and_by_number(made: Made) -> None:
    fleet = made(engines=2)
    first = {name: tensor.clone() for name, tensor in fleet.tensors.items()}
    result = fleet.adapters.publish("alice/math", 3)
    assert result.ok and str(result.version) == "alice/math@3"
    assert [(replica.version, replica.verified, replica.error) for replica in result.replicas] == [(3, "installed", None)] * 2
    assert all(
        replica.paused_seconds == 0 and set(replica.phases) >= {"agree", "move", "verify", "commit"} for replica in result.replicas
    )
    for tensor in fleet.tensors.values():
        tensor.add_(0.25)
    assert fleet.adapters.publish("alice/math").version.number == 4
    for index in range(2):
        for name, number, tensors in (
            ("alice/math", 4, fleet.tensors),
            ("alice/math@4", 4, fleet.tensors),
            ("alice/math@3", 3, first),
        ):
            version, answer = fleet.answer(name, index)
            assert version is not None and version.number == number
            assert close(answer, fleet.right(tensors))
    with pytest.raises(VersionError, match="does not serve alice/math@2; it serves alice/math@3, alice/math@4"):
        fleet.answer("alice/math@2")
    with fleet.modules[0].in_use() as version, torch.no_grad():  # the base is as it was
        assert version is not None and version.number == 0
        torch.testing.assert_close(fleet.modules[0].module(torch.ones(1, 24)), fleet.base(torch.ones(1, 24)))


@pytest.mark.parametrize("rslora", [False, True])
def test_each_module_is_scaled_by_its_own_rank(made: Made, rslora: bool) -> None:
    fleet = made()
    tensors = lora() | {name: tensor for name, tensor in lora(1, rank=16).items() if name.startswith("2.")}
    with Adapters(tensors, fleet.trainer, alpha=8, rslora=rslora) as adapters:
        adapters.publish("bob/code", 1)
    small, large = (4.0, 2.0) if rslora else (2.0, 0.5)  # alpha by the (root of the) rank: PEFT's scaling with a rank_pattern
    merged = tensors | {"2.lora_B.weight": tensors["2.lora_B.weight"] * (large / small)}
    assert close(fleet.answer("bob/code")[1], fleet.right(merged, small))


def test_a_running_use_keeps_its_version_and_nothing_waits_for_it(made: Made) -> None:
    fleet = made()
    first = {name: tensor.clone() for name, tensor in fleet.tensors.items()}
    fleet.adapters.publish("alice/math", 1, timeout=20)
    with fleet.modules[0].in_use(5, adapter="alice/math") as version, torch.no_grad():
        assert version is not None and version.number == 1
        for tensor in fleet.tensors.values():
            tensor.neg_()
        assert fleet.adapters.publish("alice/math", 2, timeout=20).ok  # while the module is in use
        assert fleet.adapters.retire("alice/math", keep=1) == ("alice/math@1",)
        torch.manual_seed(3)
        assert close(fleet.modules[0].module(torch.randn(5, 24)), fleet.right(first))
        assert set(fleet.modules[0].loras()) == {"alice/math@1", "alice/math@2"}
    assert set(fleet.modules[0].loras()) == {"alice/math@2"}
    version, answer = fleet.answer("alice/math")
    assert version is not None and version.number == 2
    assert close(answer, fleet.right(fleet.tensors))
    with pytest.raises(VersionError, match="does not serve alice/math@1"):
        fleet.answer("alice/math@1")


def test_a_version_that_cannot_be_dropped_keeps_no_other_from_it(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = made()
    for number in range(3):
        assert fleet.adapters.publish("alice/math", number).ok
    module, fails = fleet.modules[0], ["alice/math@1"]
    own = module.drop_lora

    def drop(label: str) -> None:
        if label in fails:
            raise RuntimeError("injected")
        own(label)

    monkeypatch.setattr(module, "drop_lora", drop)
    with pytest.raises(RoundFailed, match="injected"):
        fleet.adapters.retire("alice/math", keep=0)
    assert set(module.loras()) == {"alice/math@1"}
    fails.clear()


def test_slots_are_bounded_and_a_refused_number_stays_free(made: Made) -> None:
    fleet = made(slots=2)
    for number in (1, 2):
        assert fleet.adapters.publish("alice/math", number).ok
    with pytest.raises(RoundFailed, match=r"all 2 slots for adapters are in use \(2 by other owners\): retire"):
        fleet.adapters.publish("bob/code", 1)
    fleet.adapters.retire("alice/math", keep=1)
    assert fleet.adapters.publish("bob/code", 1).ok
    assert set(fleet.modules[0].loras()) == {"alice/math@2", "bob/code@1"}
    assert fleet.adapters.retire("alice/math", keep=0) == ("alice/math@2",)
    assert set(fleet.modules[0].loras()) == {"bob/code@1"}
    assert fleet.adapters.publish("alice/math").version.number == 3  # numbers go up after all versions are gone


@pytest.mark.parametrize(
    "name", ["math", "alice/", "/math", "alice/math/x", "alice/ma th", "../etc", "alice/..", "alice/math@1", "ä/b", "a/" + 65 * "b"]
)
def test_a_bad_name_is_refused_at_the_trainer_and_by_the_coordinator(
    made: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = made()
    with pytest.raises(ConfigurationError, match="owner/name"):
        fleet.adapters.publish(name, 1)
    monkeypatch.setattr("weightsync.trainer.adapters.check_adapter_name", lambda name: None)
    with pytest.raises((ConfigurationError, ProtocolError), match=r"owner/name|malformed|not a weightsync frame"):
        fleet.adapters.publish(name, 1)


def test_nan_unknown_modules_other_extents_and_large_ranks_are_refused_before_anything_moves(made: Made) -> None:
    fleet = made()
    moved: list[str] = []
    failpoints.install(lambda name: moved.append(name) if name in ("trainer.place", "engine.lora.received") else None)
    try:
        fleet.tensors["0.lora_B.weight"][3, 2] = float("nan")
        with pytest.raises(ConfigurationError, match=r"base_model\.model\.0\.lora_B\.weight holds NaN"):
            fleet.adapters.publish("alice/math", 1)
        followed = fleet.adapters._publisher._role._followed  # type: ignore[union-attr]
        assert followed is not None
        assert not any(part.tensor.numel() for part in followed.last[1]), "a trainer may offload them"
        before, moved_away = fleet.adapters._publisher._stacks, fleet.tensors["0.lora_B.weight"]
        moved_away.data = moved_away.clone()
        with pytest.raises(ConfigurationError, match=r"0\.lora_B\.weight holds NaN"):
            fleet.adapters.publish("alice/math", 1)
        assert fleet.adapters._publisher._stacks is not before, "matrices with other memory are grouped again"
        for tensors, text in (
            (
                {**lora(), "9.lora_A.weight": torch.ones(4, 8), "9.lora_B.weight": torch.ones(8, 4)},
                "changes 9, and this engine's model has no such",
            ),
            ({"1.lora_A.weight": torch.ones(4, 8), "1.lora_B.weight": torch.ones(8, 4)}, "only linear layers"),
            (
                {"0.lora_A.weight": torch.ones(4, 25), "0.lora_B.weight": torch.ones(48, 4)},
                r"\(48, 4\) and \(4, 25\); in this engine it is 48 x 24",
            ),
            (lora(rank=17), "has rank 17, and this engine allows 16"),
        ):
            with Adapters(tensors, fleet.trainer, alpha=8) as other, pytest.raises(RoundFailed, match=text):
                other.publish("alice/math", 1)
    finally:
        failpoints.install(lambda name: None)
    assert not moved and not fleet.modules[0].loras()


def test_matrices_without_their_counterpart_are_no_adapter(made: Made) -> None:
    fleet = made()
    for broken in (
        {"0.lora_A.weight": torch.ones(4, 24)},
        {"0.weight": torch.ones(4, 24)},
        {"0.lora_A.weight": torch.ones(4, 24), "0.lora_B.weight": torch.ones(48, 5)},
    ):
        with pytest.raises(ConfigurationError):
            Adapters(broken, fleet.trainer, alpha=8)
    with pytest.raises(ConfigurationError, match="needs its lora_alpha"):
        Adapters(lora(), fleet.trainer)


def test_the_base_must_be_the_one_that_the_engine_serves_by_its_digest(made: Made) -> None:
    fleet = made()
    version = fleet.trainer.version
    assert version is not None
    other = Version(version.run, version.number, version.manifest, "0" * 16)
    for base in (other, None):
        with fleet.elsewhere(base) as adapters, pytest.raises(RoundFailed, match=r"alice/math@0 is for base .*the replica serves"):
            adapters.publish("alice/math")
    with fleet.elsewhere(version) as adapters:
        assert adapters.publish("alice/math").ok


def test_after_a_base_update_adapters_are_kept_or_refused(made: Made) -> None:
    fleet = made()
    fleet.adapters.publish("alice/math", 1)
    with Adapters(lora(5), fleet.trainer, alpha=8, on_base_update="refuse") as strict:
        strict.publish("bob/code", 1)
        with torch.no_grad():
            for parameter in fleet.base.parameters():
                parameter.mul_(1.5)
        fleet.trainer.publish(1)
        _, answer = fleet.answer("alice/math@1")
        assert close(answer, fleet.right(fleet.tensors))  # on the new base
        with pytest.raises(VersionError, match="does not serve bob/code"):
            fleet.answer("bob/code")
        assert fleet.names() == ["alice/math@1"]
        assert strict.publish("bob/code").version.number == 2
        fleet.answer("bob/code@2")


@pytest.mark.parametrize("delivered", [True, False])
def test_an_adapter_that_refuses_another_base_does_not_survive_an_update_from_outside(made: Made, delivered: bool) -> None:
    fleet = made()
    engine = fleet.modules[0] if delivered else ModuleAdapter(model(7), adapter_slots=4)
    outside = DisaggregatedRank(engine)
    with ExitStack() as owned:
        if not delivered:  # its base weights come from elsewhere only
            server = owned.enter_context(BackgroundServer(ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=0)))
            fleet.server = server
            Joined(server, owned).engine(engine, "r0")
        base = fleet.trainer.version if delivered else None
        strict = owned.enter_context(fleet.elsewhere(base, lora(5), on_base_update="refuse"))
        loose = owned.enter_context(fleet.elsewhere(base, lora(6)))
        assert loose.publish("alice/math", 1).ok
        for update in (1, 2) if not delivered else (1,):
            assert strict.publish("bob/code", update).ok
            with engine.in_use(5, adapter="bob/code"):
                pass
            outside.answer(Pause("abort"), 20, update)
            outside.answer(Verify(), 20, update)
            outside.answer(Commit(Version("outside", update, outside.manifest.fingerprint, "0" * 16)), 20, update)
            outside.answer(Resume(), 20, update)
            with pytest.raises(VersionError, match="does not serve bob/code"), engine.in_use(5, adapter="bob/code"):
                pass
            assert fleet.wait_for(lambda: fleet.names() == ["alice/math@1"])  # before any round of the base
        if delivered:  # seeded with the same base again, it gets what its source still holds
            request = urllib.request.Request(f"{fleet.server.url}/v1/rounds", b'{"replicas": ["r0"]}', method="POST")
            request.add_header("Authorization", f"Bearer {OPERATOR}")
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert json.load(answer)["ok"]
            assert fleet.wait_for(lambda: fleet.names() == ["alice/math@1", "bob/code@1"])
        with engine.in_use(5, adapter="alice/math") as version:
            assert version is not None and version.number == 1


def test_an_engine_that_joins_late_gets_what_the_sources_still_hold(made: Made) -> None:
    fleet = made()
    with Adapters(lora(5), fleet.trainer, alpha=8) as second:
        fleet.adapters.publish("alice/old", 1)
        fleet.adapters.publish("alice/math", 1)
        second.publish("bob/code", 1)
        second.publish("bob/code", 2)
        late = fleet.join("late")
        assert fleet.wait_for(lambda: fleet.names("late") == ["alice/math@1", "bob/code@2"])
        with late.in_use(adapter="bob/code") as version:
            assert version is not None and version.number == 2
        fleet.adapters.retire("alice/math", keep=0)
        later = fleet.join("later")
        assert fleet.wait_for(lambda: fleet.names("later") == ["bob/code@2"]) and set(later.loras()) == {"bob/code@2"}


@pytest.mark.parametrize("point", ["prepared", "received", "staged", "register", "registered"])
def test_a_rank_that_fails_leaves_nothing_of_the_version_anywhere(made: Made, point: str, gate: None) -> None:
    fleet = made(engines=1, ranks=2)
    fleet.adapters.publish("alice/math", 1)
    failed = []

    def fail(name: str) -> None:
        if name == f"engine.lora.{point}" and "r0/1" in threading.current_thread().name:
            failed.append(name)
            raise LoadError("as the test wishes")

    failpoints.install(fail)
    if point == "prepared":
        with pytest.raises(RoundFailed, match="r0: agree: LoadError: r0/1: as the test wishes"):
            fleet.adapters.publish("alice/math", 2)
    else:
        [replica] = fleet.adapters.publish("alice/math", 2).replicas
        assert replica.error is not None and "r0/1: as the test wishes" in replica.error and replica.version is None
    attempts = 1 if point == "prepared" else 2
    assert fleet.wait_for(lambda: len(failed) == attempts)
    assert fleet.wait_for(lambda: all(part.registered == {"alice/math@1"} == set(part.staged) for part in fleet.parts))
    failpoints.install(lambda name: None)
    assert fleet.names() == ["alice/math@1"]
    number = 2 if point == "prepared" else 3
    assert fleet.adapters.publish("alice/math", number).ok
    for part in fleet.parts:
        assert part.registered == {"alice/math@1", f"alice/math@{number}"}


def test_one_rank_with_other_bytes_keeps_the_version_from_all(made: Made) -> None:
    fleet = made(engines=1, ranks=2)
    fleet.parts[1].spoils = True
    [replica] = fleet.adapters.publish("alice/math", 1).replicas
    assert replica.error is not None and "verify: VerificationError" in replica.error
    assert fleet.wait_for(lambda: not any(part.registered or part.staged for part in fleet.parts))
    assert fleet.names() == []


@pytest.mark.parametrize(
    ("shows", "verified", "why"),
    [
        ("", "installed", ""),
        ("it mixes them", "received", "it mixes them"),
        (None, "received", "the engine does not show its copies"),
    ],
)
def test_an_engine_may_read_an_adapter_back_by_itself_or_say_why_it_cannot(
    made: Made, shows: str | None, verified: str, why: str
) -> None:
    fleet = made(engines=1, ranks=2)
    fleet.parts[1].shows = shows
    [replica] = fleet.adapters.publish("alice/math", 1).replicas
    assert (replica.verified, replica.delivery_reason) == (verified, why)


def test_what_an_engine_reads_back_in_another_form_than_was_published_is_not_served(made: Made) -> None:
    fleet = made(engines=1, ranks=2)

    def differs() -> None:
        raise LoadError("its memory has other bytes")

    fleet.parts[1].shows, fleet.parts[1].reads_back = "", differs
    [replica] = fleet.adapters.publish("alice/math", 1).replicas
    assert replica.error is not None and "its memory has other bytes" in replica.error and replica.verified == ""
    assert fleet.wait_for(lambda: not any(part.registered or part.staged for part in fleet.parts))
    assert fleet.names() == []


def test_a_hanging_replica_delays_no_other_and_is_refused_again_until_it_answers(made: Made, gate: None) -> None:
    fleet = made(engines=2)
    hang = threading.Event()

    def wait(name: str) -> None:
        if name == "engine.lora.received" and "r1/0" in threading.current_thread().name:
            hang.wait(20)

    failpoints.install(wait)
    ended: list[RoundResult] = []
    publishing = threading.Thread(target=lambda: ended.append(fleet.adapters.publish("alice/math", 1, timeout=4)))
    publishing.start()
    assert fleet.wait_for(lambda: fleet.names() == ["alice/math@1"])
    version, _ = fleet.answer("alice/math")
    assert version is not None and version.number == 1
    publishing.join(20)
    hang.set()
    assert [replica.error is None for replica in ended[0].replicas] == [True, False]
    failpoints.install(lambda name: None)
    assert fleet.wait_for(lambda: all(replica.error is None for replica in fleet.adapters.publish("alice/math").replicas))


def test_after_a_restart_of_the_coordinator_versions_are_known_and_numbers_go_on() -> None:
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=free_port(), run="kept", token=Secret("t" * 20))
    with ExitStack() as owned:
        with BackgroundServer(settings) as server:
            fleet = Fleet(Joined(server, owned), owned)
            fleet.adapters.publish("alice/math", 5)
        with BackgroundServer(settings) as server:
            fleet.server = server
            assert fleet.wait_for(lambda: fleet.names() == ["alice/math@5"])
            with pytest.raises(VersionError, match=r"^alice/math@5 cannot be published: the last one is 5, .* takes the next one$"):
                fleet.adapters.publish("alice/math", 5)
            assert fleet.adapters.publish("alice/math").version.number == 6
            assert fleet.adapters.retire("alice/math", keep=1) == ("alice/math@5",)


def test_ranks_of_a_trainer_publish_their_parts_together(made: Made) -> None:
    fleet = made()
    whole = lora(2)
    with ExitStack() as owned, ThreadPoolExecutor(2) as pool:
        version = fleet.trainer.version
        ranks = list(
            pool.map(lambda rank: fleet.elsewhere(version, Rows(whole, rank), rank=rank, world_size=2, source="two"), range(2))
        )
        for adapters in ranks:
            owned.enter_context(adapters)
        results = list(pool.map(lambda adapters: adapters.publish("alice/math", 1), ranks))
        assert all(result.ok for result in results)
        _, answer = fleet.answer("alice/math@1")
        assert close(answer, fleet.right(whole))
        whole["0.lora_A.weight"][0, 0] = float("inf")  # of rank 0 only
        failures = list(pool.map(lambda adapters: _error(lambda: adapters.publish("alice/math", 2)), ranks))
        assert "holds NaN or infinity" in str(failures[0]) and isinstance(failures[0], ConfigurationError)
        assert isinstance(failures[1], Aborted) and "holds NaN or infinity" in str(failures[1])


def test_a_replica_that_takes_no_adapters_is_left_alone(made: Made) -> None:
    fleet = made()
    fleet.joined.engine(ModuleAdapter(model(9)), "plain")
    fleet.trainer.wait_for_replicas(2)
    fleet.trainer.publish(1)
    assert [replica.name for replica in fleet.adapters.publish("alice/math").replicas] == ["r0"]
    with ExitStack() as owned:
        server = owned.enter_context(BackgroundServer())
        alone = Joined(server, owned)
        trainer = alone.trainer(model())
        alone.engine(ModuleAdapter(model(1)))
        trainer.wait_for_replicas()
        trainer.publish(0)
        adapters = owned.enter_context(Adapters(lora(), trainer, alpha=8))
        with pytest.raises(RoundFailed, match="no engine that takes LoRA adapters is connected"):
            adapters.publish("alice/math")
