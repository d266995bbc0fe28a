"""Trainers that store what they publish: the store holds the versions, whatever happens to them in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

import weightsync
from weightsync.config import ServerSettings
from weightsync.coordinator import coordinator, keyed_digests
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, RoundFailed, StaleSource, TransportError
from weightsync.server.server import BackgroundServer
from weightsync.store.catalog import load, manifest_path, newest, orders
from weightsync.store.objects import ObjectStore
from weightsync.store.restore import tensors_of

SECONDS = 30.0


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).bfloat16()


def in_store(store: ObjectStore, server: BackgroundServer, number: int) -> dict[str, torch.Tensor]:
    stored = server.coordinator.stored
    version = load(store, server.coordinator.settings.run, (1, number), stored.key.public)
    return {
        spec.name: torch.from_numpy(data.copy()).view(torch.bfloat16).view(spec.shape)
        for bucket in tensors_of(store, version, Deadline(SECONDS))
        for spec, data in bucket
    }


def same(read: dict[str, torch.Tensor], module: torch.nn.Module) -> bool:
    wanted = module.state_dict()
    return read.keys() == wanted.keys() and all(torch.equal(read[name], wanted[name]) for name in wanted)


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHTSYNC_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_what_is_published_is_stored_and_stays(where: Path, tmp_path: Path) -> None:
    trained, served = model(), model(1)
    with BackgroundServer(ServerSettings.load(port=0, require=0, state_dir=str(tmp_path / "state"), run="kept")) as server:
        with weightsync.Trainer(trained, server.url, token=server.token, deltas=True) as trainer:
            trainer.publish(step=70)
            trainer.wait_until_stored(SECONDS)
            with weightsync.Engine(ModuleAdapter(served), "replica-0", server.url, token=server.token):
                trainer.wait_for_replicas()
                with torch.no_grad():
                    trained[0].weight[3, :17] += 1  # type: ignore[index]
                trainer.publish(step=71)
        store = ObjectStore(str(where))
        assert same(in_store(store, server, 1), trained) and same(in_store(store, server, 1), served)
        first = load(store, "kept", (1, 0), server.coordinator.stored.key.public)
        last = newest(store, "kept", server.coordinator.stored.key.public)
        assert last is not None and last.stored.step == 71 and last.stored.base == first.version
        assert [item.kind for item in last.stored.ranks[0].chain] == ["key", "delta"]
        public = server.coordinator.stored.key.public
    with BackgroundServer(ServerSettings.load(port=0, require=0, state_dir=str(tmp_path / "state"), run="kept")) as server:
        assert server.coordinator.stored.key.public == public  # kept for the run


def test_old_versions_are_removed_where_the_trainer_is_told_to(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_STORE_KEEP", "2")
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(model(), server.url, token=server.token) as trainer:
            for _ in range(4):
                trainer.publish()
                trainer.wait_until_stored(SECONDS)
        assert orders(ObjectStore(str(where)), "kept") == [(1, 2), (1, 3)]


def test_a_version_whose_older_ones_cannot_be_removed_is_in_the_store(
    where: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_STORE_KEEP", "2")
    forged = where / manifest_path("kept", (2, 0))
    forged.parent.mkdir(parents=True)
    forged.write_bytes(b"no manifest")
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(model(), server.url, token=server.token, deltas=True) as trainer:
            for number in range(2):
                trainer.publish()
                stored = trainer.wait_until_stored(SECONDS)
                assert stored is not None and stored.number == number
        chain = load(ObjectStore(str(where)), "kept", (1, 1), server.coordinator.stored.key.public).stored.ranks[0].chain
    assert [item.kind for item in chain] == ["key", "delta"]
    assert "were not removed" in caplog.text and "is not in the store" not in caplog.text


def test_a_replica_joins_from_the_store_where_a_later_version_of_others_cannot_be_compared_any_more(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_digests, "KEPT", 0)  # as after many have joined without a trainer
    trained, served, late = model(), model(1), model(2)
    with (
        BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server,
        weightsync.Engine(ModuleAdapter(served), "replica-0", server.url, token=server.token, serve_weights=True) as engine,
    ):
        with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
            trainer.wait_for_replicas()
            first = trainer.publish().version
            trainer.wait_until_stored(SECONDS)
            monkeypatch.setattr(ObjectStore, "put", unwritable)
            last = trainer.publish().version
        with weightsync.Engine(ModuleAdapter(late), "replica-1", server.url, token=server.token) as joining:
            assert joining.wait_for_version(first, SECONDS) == first and engine.serving == last
            assert same(late.state_dict(), trained)


def unwritable(store: ObjectStore, path: str, parts: object) -> None:
    raise TransportError("the store is full")


def test_a_version_that_is_overtaken_is_dropped_and_said(
    where: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hold, held = threading.Event(), threading.Event()
    put = ObjectStore.put

    def slow(self: ObjectStore, path: str, parts: object) -> None:
        if "/objects/" in path:
            held.set()
            hold.wait(SECONDS)
        put(self, path, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectStore, "put", slow)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(model(), server.url, token=server.token) as trainer:
            trainer.publish()
            assert held.wait(SECONDS)
            trainer.publish()  # is not delayed
            trainer.publish()
            hold.set()
        assert orders(ObjectStore(str(where)), "kept") == [(1, 2)]
    assert "version kept@0 is not in the store" in caplog.text and "version kept@1 is not in the store" in caplog.text
    assert caplog.text.count("is not in the store") == 2


def test_a_store_that_fails_does_not_end_training(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    where.parent.mkdir(exist_ok=True)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(model(), server.url, token=server.token) as trainer:
            (where / "kept").write_text("a file in the way")
            trainer.publish()
            trainer.wait_until_stored(SECONDS)
            assert "is not in the store" in caplog.text
            (where / "kept").unlink()
            trainer.publish()
        assert orders(ObjectStore(str(where)), "kept") == [(1, 1)]


def test_two_runs_with_one_id_do_not_overwrite_each_other(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with (
            BackgroundServer(ServerSettings.load(port=0, require=0, run="same", state_dir="off")) as server,
            weightsync.Trainer(model(), server.url, token=server.token) as trainer,
        ):
            trainer.publish()
    assert "a run needs an id that no other run in the store has" in caplog.text


def test_a_trainer_without_a_copy_cannot_store(where: Path) -> None:
    with BackgroundServer(ServerSettings.load(port=0, require=0)) as server:
        for state, options in ((weightsync.Stream(), {}), (model(), {"seeds": False})):
            with pytest.raises(ConfigurationError, match="WEIGHTSYNC_STORE needs a copy"):
                weightsync.Trainer(state, server.url, token=server.token, **options)  # type: ignore[arg-type]


# Replicas that join from the store.


def joined(server: BackgroundServer, served: torch.nn.Module, name: str, **options: object) -> weightsync.Engine:
    engine = weightsync.Engine(ModuleAdapter(served), name, server.url, token=server.token, **options)  # type: ignore[arg-type]
    engine.wait_for_version(0, timeout=SECONDS)
    return engine


def seeded(server: BackgroundServer) -> tuple[weightsync.ReplicaResult, ...]:
    """The result of the seeding, which ends after the replica serves."""
    deadline = Deadline(SECONDS)
    while not (replicas := server.coordinator.status().rounds[-1].replicas):
        threading.Event().wait(min(0.01, deadline.remaining("the round")))
    return replicas


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
def test_a_replica_joins_from_the_store_when_the_trainer_is_gone(where: Path, delivery: str) -> None:
    trained, served = model(), model(1)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(trained, server.url, token=server.token, deltas=True) as trainer:
            for _ in range(3):
                trainer.publish()
                trainer.wait_until_stored(SECONDS)
                with torch.no_grad():
                    trained[0].weight[3, :17] += 1  # type: ignore[index]
            trainer.publish()
        with joined(server, served, "late", delivery=delivery) as engine:
            assert engine.serving is not None and engine.serving.number == 3
            assert same(served.state_dict(), trained)
            [replica] = seeded(server)
            assert replica.source == "store" and replica.transports == ("store",)
            assert replica.verified == "installed"
            status, gauges = server.coordinator.status(), server.coordinator.gauges()
            assert status.stored is not None and status.stored.number == gauges.stored == 3


def test_a_coordinator_that_starts_knows_what_is_stored(where: Path, tmp_path: Path) -> None:
    trained, served = model(), model(1)
    settings = {"port": 0, "require": 0, "run": "kept", "state_dir": str(tmp_path / "state")}
    with (
        BackgroundServer(ServerSettings.load(**settings)) as server,
        weightsync.Trainer(trained, server.url, token=server.token) as trainer,
    ):
        trainer.publish(41)
    with BackgroundServer(ServerSettings.load(**settings)) as server:
        with joined(server, served, "late") as engine:
            assert engine.serving is not None and engine.serving.number == 41 and same(served.state_dict(), trained)
        with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
            assert trainer.last_version == 41  # the next one is above it
            assert trainer.publish().version.number == 42


def test_a_coordinator_that_cannot_read_the_store_goes_on_below_none_of_its_versions(where: Path, tmp_path: Path) -> None:
    trained = model()
    settings = {"port": 0, "require": 0, "run": "kept", "state_dir": str(tmp_path / "state")}
    with (
        BackgroundServer(ServerSettings.load(**settings)) as server,
        weightsync.Trainer(trained, server.url, token=server.token) as trainer,
    ):
        trainer.publish(41)
    away = where.rename(tmp_path / "away")
    where.write_text("no folder")
    with BackgroundServer(ServerSettings.load(**settings)) as server:
        where.unlink()
        where.mkdir()  # the trainer can write here
        (where / "kept").write_text("no folder")
        with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
            with pytest.raises(RoundFailed, match="the number must be above those in the store, which cannot be read"):
                trainer.publish()
            (where / "kept").unlink()
            (away / "kept").rename(where / "kept")
            assert trainer.publish().version.number == 42
            stored = trainer.wait_until_stored(SECONDS)
            assert stored is not None and stored.number == 42


def test_a_store_signed_by_another_key_seeds_nobody(where: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        BackgroundServer(ServerSettings.load(port=0, require=0, run="kept", state_dir="off")) as server,
        weightsync.Trainer(model(), server.url, token=server.token) as trainer,
    ):
        trainer.publish()
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept", state_dir="off")) as server:
        assert server.coordinator.stored.source is None
    assert "passed over" in caplog.text and "not signed" in caplog.text


def test_what_was_changed_in_the_store_is_never_served(where: Path) -> None:
    trained, served = model(), model(1)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
            trainer.publish()
        [path] = where.rglob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
        engine = weightsync.Engine(ModuleAdapter(served), "late", server.url, token=server.token)
        with engine, pytest.raises(weightsync.DeadlineExceeded):
            engine.wait_for_version(0, timeout=3.0)
        [replica] = server.coordinator.status().rounds[-1].replicas
        assert replica.error is not None and "it was changed" in replica.error and replica.service == "out_of_service"


def test_a_key_frame_that_was_removed_fails_that_replica_and_no_more(where: Path) -> None:
    trained, served = model(), model(1)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
            trainer.publish()
        [path] = where.rglob("*.safetensors")
        path.rename(where / "held")
        engine = weightsync.Engine(ModuleAdapter(served), "late", server.url, token=server.token)
        with engine:
            with pytest.raises(weightsync.DeadlineExceeded):
                engine.wait_for_version(0, timeout=3.0)
            assert "removed" in (server.coordinator.status().rounds[-1].replicas[0].error or "")
            (where / "held").rename(path)
            with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
                trainer.publish()
            assert engine.serving is not None and engine.serving.number == 1 and same(served.state_dict(), trained)


def test_a_store_that_fails_for_a_while_delays_a_replica_for_which_no_trainer_comes(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "STORE_SECONDS", 0.2)
    trained, served = model(), model(1)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(trained, server.url, token=server.token) as trainer:
            trainer.publish()
        read, failures = ObjectStore.read, [TransportError("the store fails now")] * 3

        def failing(self: ObjectStore, path: str, first: int, last: int) -> memoryview:
            if path.endswith(".safetensors") and failures:
                raise failures.pop()
            return read(self, path, first, last)

        monkeypatch.setattr(ObjectStore, "read", failing)
        with joined(server, served, "late") as engine:
            assert engine.serving is not None and not failures and same(served.state_dict(), trained)


def test_a_replica_that_serves_a_newer_version_keeps_it(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = model(), model(1)
    with (
        BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server,
        weightsync.Trainer(trained, server.url, token=server.token) as trainer,
    ):
        trainer.publish()
        trainer.wait_until_stored(SECONDS)
        monkeypatch.setattr(ObjectStore, "put", lambda *_: (_ for _ in ()).throw(ConfigurationError("no space")))
        with torch.no_grad():
            trained[0].weight[3, :17] += 1  # type: ignore[index]
        with joined(server, served, "replica-0") as engine:
            trainer.publish()
            trainer.close()
            assert engine.serving is not None and engine.serving.number == 1
            with joined(server, model(2), "late") as late:
                assert late.serving is not None and late.serving.number == 0
            assert engine.serving.number == 1 and same(served.state_dict(), trained)


# Several ranks.


def both(server: BackgroundServer, work: Callable[[int, weightsync.Trainer], None], trained: torch.nn.Module) -> None:
    """Run ``work`` in two trainer ranks, threads here, each of which holds all of ``trained``."""
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            with weightsync.Trainer(trained, server.url, token=server.token, rank=number, world_size=2) as trainer:
                work(number, trainer)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_a_version_exists_when_every_rank_has_stored_its_part(where: Path) -> None:
    trained = model()

    def work(number: int, trainer: weightsync.Trainer) -> None:
        trainer.publish()
        stored = trainer.wait_until_stored(SECONDS)
        assert stored is not None and stored.number == 0  # of both ranks

    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        both(server, work, trained)
        version = load(ObjectStore(str(where)), "kept", (1, 0), server.coordinator.stored.key.public)
        assert len(version.stored.ranks) == 2 and len(version.objects) == 2
        assert same(in_store(ObjectStore(str(where)), server, 0), trained)


def test_a_rank_that_cannot_store_costs_that_version_alone(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, ended = ObjectStore.put, threading.Event()

    def failing(self: ObjectStore, path: str, parts: Iterable[bytes]) -> None:
        if "/1.0.1-" in path:
            raise StaleSource("this rank cannot store version 0")
        put(self, path, parts)

    monkeypatch.setattr(ObjectStore, "put", failing)

    def work(number: int, trainer: weightsync.Trainer) -> None:
        trainer.publish()
        if number == 1:  # the other rank waits for this one's part, until there is a later version
            assert trainer.wait_until_stored(SECONDS) is None
            ended.set()
        ended.wait(SECONDS)
        trainer.publish()
        stored = trainer.wait_until_stored(SECONDS)
        assert stored is not None and stored.number == 1

    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        both(server, work, model())
        assert orders(ObjectStore(str(where)), "kept") == [(1, 1)]
