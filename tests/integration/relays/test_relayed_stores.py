"""What a relay makes of stores that trainers of several ranks, epochs and shardings wrote, and of stores that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from tests.unit.store.stored import RUN, Rank, StoringTrainer, cut

import weightsync
from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import MembershipError, TransportError, VerificationError
from weightsync.model import fold
from weightsync.server.server import BackgroundServer
from weightsync.store import catalog
from weightsync.store.objects import ObjectStore
from weightsync_relay import relay as relay_module
from weightsync_relay.relay import Relay

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

SECONDS = 30.0
INTERVAL = 0.05


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(1024, 3000), torch.nn.Linear(3000, 40)).bfloat16()


class Far:
    """A region: its coordinator, and an engine."""

    def __init__(self, owned: ExitStack, run: str = RUN) -> None:
        self.server = owned.enter_context(BackgroundServer(ServerSettings.load(port=0, require=0, run=run, state_dir="off")))
        self.served = model(1)
        self.engine = owned.enter_context(weightsync.Engine(ModuleAdapter(self.served), "far", self.server.url))

    def serves(self, version: weightsync.Version, state: dict[str, torch.Tensor]) -> None:
        deadline = Deadline(SECONDS)
        while self.engine.serving != version:
            threading.Event().wait(min(0.02, deadline.remaining(f"serving {version}")))
        assert all(torch.equal(tensor, state[name]) for name, tensor in self.served.state_dict().items())


@contextmanager
def following(trainer: StoringTrainer, far: Far, **options: float) -> Iterator[Relay]:
    with Relay(trainer.store, RUN, trainer.key.public, far.server.url, interval=INTERVAL, **options) as relay:  # type: ignore[arg-type]
        thread = threading.Thread(target=relay.follow)
        thread.start()
        try:
            yield relay
        finally:
            relay.close()
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The library of stores has started: what it keeps is no leak of a test."""
    ObjectStore(str(tmp_path_factory.mktemp("first"))).put("first", [b""])


@pytest.fixture
def far(runtime: None) -> Iterator[Far]:
    with ExitStack() as owned:
        yield Far(owned)


def trainer_of(tmp_path: Path, state: dict[str, torch.Tensor], **options: int) -> StoringTrainer:
    return StoringTrainer(tmp_path / "store", state, **options)


def change(state: dict[str, torch.Tensor]) -> None:
    state["0.weight"][1, 3] += 1


def test_ranks_of_which_one_holds_copies(tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    state = model().state_dict()
    trainer = trainer_of(tmp_path, state, ranks=2)
    copies = Rank(trainer.store, 2, trainer.manifest, cut(state, 2)[1], 16)
    trainer.ranks.append(copies)
    trainer.layouts["trainer/2"] = copies.layout
    read: list[str] = []
    reading = ObjectStore.read

    def noted(self: ObjectStore, path: str, first: int, last: int) -> memoryview:
        read.append(path)
        return reading(self, path, first, last)

    monkeypatch.setattr(ObjectStore, "read", noted)
    version = trainer.publish(0)
    with following(trainer, far):
        far.serves(version, state)
        read.clear()
        change(state)
        far.serves(trainer.publish(1), state)
    objects = {path.rpartition("/")[2].partition("-")[0] for path in read if "/objects/" in path}
    assert objects == {"1.1.0", "1.1.1"}  # only deltas, and none of the rank that holds copies


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_later_epoch_perhaps_with_other_shards(tmp_path: Path, far: Far, ranks: int) -> None:
    state = model().state_dict()
    trainer = trainer_of(tmp_path, state, ranks=2)
    with following(trainer, far):
        far.serves(trainer.publish(5), state)
        change(state)
        restarted = trainer_of(tmp_path, state, ranks=ranks, epoch=2)
        restarted.key = trainer.key
        version = restarted.publish(0)
        assert str(version) == f"{RUN}.2@0"
        far.serves(version, state)
        change(state)
        far.serves(restarted.publish(1), state)


def test_a_store_that_fails_is_read_again(
    tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", relay_module._log.name)
    state = model().state_dict()
    trainer = trainer_of(tmp_path, state)
    monkeypatch.setattr(relay_module, "_LONGEST_PAUSE", 2 * INTERVAL)
    reading, failing = ObjectStore.read, threading.Event()

    def read(self: ObjectStore, path: str, first: int, last: int) -> memoryview:
        if failing.is_set() and "/objects/" in path and first:
            raise TransportError("the store fails")
        return reading(self, path, first, last)

    monkeypatch.setattr(ObjectStore, "read", read)
    first = trainer.publish(0)
    with following(trainer, far) as relay:
        far.serves(first, state)
        before = {name: tensor.clone() for name, tensor in state.items()}
        failing.set()
        for rank in trainer.ranks:
            rank.objects.confirm(first, None)  # the next object is a key frame
        state["0.weight"][:] = -state["0.weight"]
        version = trainer.publish(1)
        deadline = Deadline(SECONDS)
        while not far.server.coordinator.gauges().relay_failing:
            threading.Event().wait(min(0.02, deadline.remaining("the failure")))
        far.serves(first, before)
        assert relay._trainer is not None and relay._state is not None
        relay._trainer.welcomes += 1  # as by a new connection: half a version must not be published for it
        attempts = caplog.text.count("reading version")
        while caplog.text.count("reading version") < attempts + 2:
            threading.Event().wait(min(0.02, deadline.remaining("another attempt")))
        late = model(2)
        with weightsync.Engine(ModuleAdapter(late), "late", far.server.url) as engine:  # reads the last good version
            engine.wait_for_version(0, timeout=SECONDS)
            assert torch.equal(late.state_dict()["0.weight"], before["0.weight"])
        failing.clear()
        far.serves(version, state)


def test_a_store_that_hangs_is_said_and_then_used(
    tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = model().state_dict()
    trainer = trainer_of(tmp_path, state)
    monkeypatch.setattr(relay_module, "_SLACK", 0.1)
    go, calls = threading.Event(), [0]

    def hanging(store: ObjectStore, run: str) -> list[tuple[int, int]]:
        calls[0] += 1
        assert go.wait(SECONDS)
        return catalog.orders(store, run)

    monkeypatch.setattr(relay_module, "orders", hanging)
    version = trainer.publish(0)
    with following(trainer, far, timeout=0.1):
        deadline = Deadline(SECONDS)
        while "does not answer" not in caplog.text:
            threading.Event().wait(min(0.02, deadline.remaining("the message")))
        threading.Event().wait(0.5)
        assert calls == [1]  # a second read would change the same memory
        go.set()
        far.serves(version, state)


def test_another_run_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model().state_dict())
    trainer.publish(0)
    with ExitStack() as owned:
        far = Far(owned, "another")
        with (
            Relay(trainer.store, RUN, trainer.key.public, far.server.url) as relay,
            pytest.raises(MembershipError, match="'a-run'"),
        ):
            relay.follow()


def test_digests_that_the_bytes_do_not_have_are_refused(tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    state = model().state_dict()
    trainer = trainer_of(tmp_path, state)
    good = trainer.publish(0)
    place = trainer.place

    def wrong(number: int, **options: object) -> object:
        version, totals = place(number)
        totals[0] += 1
        return weightsync.Version(version.run, number, version.manifest, fold(totals), version.epoch), totals

    with Relay(trainer.store, RUN, trainer.key.public, far.server.url) as relay:
        relay.follow(once=True)
        far.serves(good, state)
        before = {name: tensor.clone() for name, tensor in state.items()}
        monkeypatch.setattr(trainer, "place", wrong)
        change(state)
        trainer.publish(1)
        with pytest.raises(VerificationError, match="the store: 1 of 4 tensors differ"):
            relay.follow(once=True)
        far.serves(good, before)
        monkeypatch.setattr(trainer, "place", place)
        far_version = trainer.publish(2)
        relay.follow(once=True)
        far.serves(far_version, state)


def test_memory_that_changed_is_read_again_whole(tmp_path: Path, far: Far) -> None:
    state = model().state_dict()
    trainer = trainer_of(tmp_path, state)
    first = trainer.publish(0)
    with Relay(trainer.store, RUN, trainer.key.public, far.server.url) as relay:
        relay.follow(once=True)
        far.serves(first, state)
        assert relay._state is not None
        relay._state._regions[0].memory[5] ^= 1
        change(state)
        version = trainer.publish(1)
        assert trainer.kinds[1] == ("delta",)
        with pytest.raises(VerificationError, match="the store: 1 of 4 tensors differ"):
            relay.follow(once=True)
        relay.follow(once=True)
        far.serves(version, state)
