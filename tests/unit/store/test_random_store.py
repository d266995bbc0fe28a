"""Random schedules over a store that fails: every listed version is what was published, or is refused. And what they found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from obstore.exceptions import AlreadyExistsError
from tests.unit.store.random_store import run_schedule
from tests.unit.store.store_mutants import STORE_MUTANTS
from tests.unit.store.stored import RUN, StoringTrainer, change, small_state
from tests.unit.store.storing_process import Signing

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.errors import VersionError
from weightsync.store.catalog import GRACE_SECONDS, collect_garbage, load, manifest_path, orders
from weightsync.store.objects import LocalFiles, ObjectStore
from weightsync.store.restore import tensors_of
from weightsync.store.signing import new_secret

_SCHEDULES = 100


def test_every_listed_version_is_what_was_published_whatever_fails(seed: int) -> None:
    first = seed % 1_000_000
    injected = set[str]()
    for number in range(first, first + _SCHEDULES):
        schedule = run_schedule(number)
        assert not schedule.wrong, f"run_schedule({number}): {schedule.wrong}"
        injected |= schedule.injected.keys()
    assert injected >= {"fails", "answer lost", "slow", "stalls", "dies", "listed late", "torn", "flipped"}


@pytest.mark.parametrize("name", STORE_MUTANTS)
def test_a_planted_bug_is_noticed(name: str) -> None:
    with STORE_MUTANTS[name]():
        assert any(run_schedule(number).wrong for number in range(3 * _SCHEDULES))


# What they found, or what stands in the way of it.


def test_a_file_that_is_removed_while_its_folder_is_listed_hides_no_other(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.manifest").touch()
    listing = LocalFiles(str(tmp_path)).list("")
    found = {next(listing)[0]}
    removed = next(path for path in tmp_path.iterdir() if path.name not in found)
    removed.unlink()
    found |= {path for path, _ in listing}
    assert found == {path.name for path in tmp_path.iterdir()}


def test_a_version_whose_answer_was_lost_is_not_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    store, put = ObjectStore(str(tmp_path)), obstore.put

    def asked_again(*arguments: object, **options: object) -> None:
        put(*arguments, **options)  # type: ignore[arg-type]
        raise AlreadyExistsError("the second time")

    monkeypatch.setattr(obstore, "put", asked_again)
    assert store.create("a", b"one")
    monkeypatch.undo()
    for other in (b"two", b"one and more", b"on"):
        assert not store.create("a", other)


def test_a_listing_without_any_version_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    with monkeypatch.context() as patched:
        every = ObjectStore.list
        patched.setattr(ObjectStore, "list", lambda store, folder="": [] if "versions" in folder else every(store, folder))
        assert not collect_garbage(trainer.store, RUN, trainer.key.public, 1, grace=0).objects
    assert orders(trainer.store, RUN) == [(1, 0)]


def test_what_was_left_of_a_manifest_that_was_being_written_is_garbage(tmp_path: Path) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    manifest = tmp_path / manifest_path(RUN, (1, 0))
    left = manifest.with_name(manifest.name + "#1")
    left.write_bytes(manifest.read_bytes()[:100])
    other = manifest.with_name("notes.txt")
    other.write_text("not the store's")
    assert orders(trainer.store, RUN) == [(1, 0)]
    assert not collect_garbage(trainer.store, RUN, trainer.key.public, 1).objects and left.exists()
    assert collect_garbage(trainer.store, RUN, trainer.key.public, 1, grace=0).objects == 1
    assert manifest.exists() and other.exists() and not left.exists()


def test_the_trainer_of_another_epoch_keeps_the_base_of_what_it_writes(tmp_path: Path) -> None:
    state = small_state()
    early = StoringTrainer(tmp_path, state)
    early.publish(0)
    early.publish(1)
    late = StoringTrainer(tmp_path, small_state(1), epoch=2)
    late.key = early.key
    late.publish(0)
    assert collect_garbage(early.store, RUN, early.key.public, 1).versions == ((1, 0),)
    change(state, 0.01, 1)
    early.publish(2)
    assert early.kinds[-1] == ("delta",)
    assert collect_garbage(early.store, RUN, early.key.public, 1, grace=0).versions == ((1, 1), (1, 2))


@pytest.mark.parametrize("how", ["removed", "cut"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_chain_that_the_store_lost_is_not_extended(tmp_path: Path, how: str, lost: int) -> None:
    """The version is stored whole, not given up: it may be the last one (schedule 20003960 of the simulation)."""
    state = small_state()
    trainer = StoringTrainer(tmp_path, state)
    for number in range(5):
        change(state, 0.01, number)
        if number == 2:
            [item] = tmp_path.rglob(f"1.{lost}.0-*.safetensors")
            if how == "cut":
                item.write_bytes(item.read_bytes()[:-1])
            else:
                item.unlink()
        trainer.publish(number)
    assert trainer.kinds == [("key",), ("delta",), ("key",), ("delta",), ("delta",)]
    version = load(trainer.store, RUN, (1, 4), trainer.key.public)
    read = {spec.name: data.tobytes() for part in tensors_of(trainer.store, version, Deadline(30.0)) for spec, data in part}
    assert read == {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def test_a_store_that_keeps_no_whole_object_gets_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    monkeypatch.setattr(ObjectStore, "size", lambda store, path: 1)
    change(trainer.state, 0.01, 1)
    with pytest.raises(VersionError, match="does not keep"):
        trainer.publish(1)
    assert orders(trainer.store, RUN) == [(1, 0)]


@pytest.mark.parametrize("point", ["store.object", "store.object_written", "store.manifest"])
def test_a_process_that_was_stopped_for_hours_gives_its_version_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Its object may be taken for that of a dead trainer."""
    signing = Signing(str(tmp_path), new_secret(), "small")
    stopped = 0.0

    def stop(name: str) -> None:
        nonlocal stopped
        stopped += 2 * GRACE_SECONDS * (name == point)

    monkeypatch.setattr(Deadline, "_now", lambda deadline: time.monotonic() + stopped)
    monkeypatch.setattr(failpoints, "_gate", stop)
    signing.publish(0)
    assert signing.writer.last is None and not orders(signing.trainer.store, RUN)
