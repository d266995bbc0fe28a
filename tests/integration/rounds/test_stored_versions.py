"""Trainers that store what they publish: the store holds the versions, whatever happens to them in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weightsync
from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError
from weightsync.server.server import BackgroundServer
from weightsync.store.catalog import load, newest, orders
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
            assert trainer._storing.writer is not None and trainer._storing.writer.wait(SECONDS)
            with weightsync.Engine(ModuleAdapter(served), "replica-0", server.url, token=server.token):
                trainer.wait_for_replicas()
                with torch.no_grad():
                    trained[0].weight[3, :17] += 1  # type: ignore[index, operator, union-attr]
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
                assert trainer._storing.writer is not None and trainer._storing.writer.wait(SECONDS)
        assert orders(ObjectStore(str(where)), "kept") == [(1, 2), (1, 3)]


def test_a_version_that_is_overtaken_is_dropped_and_said(
    where: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    hold, held = threading.Event(), threading.Event()
    put = ObjectStore.put

    def slow(self: ObjectStore, path: str, parts: object) -> None:
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
    assert trainer._storing.writer is not None and trainer._storing.writer.dropped == 2


def test_a_store_that_fails_does_not_end_training(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    where.parent.mkdir(exist_ok=True)
    with BackgroundServer(ServerSettings.load(port=0, require=0, run="kept")) as server:
        with weightsync.Trainer(model(), server.url, token=server.token) as trainer:
            (where / "kept").write_text("a file in the way")
            trainer.publish()
            assert trainer._storing.writer is not None and trainer._storing.writer.wait(SECONDS)
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
