"""A process that is killed while it stores a version leaves a store in which every version that is listed can be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.faults.points import STORE_POINTS
from tests.unit.store.stored import RUN, StoringTrainer, change, large_state, small_state
from tests.unit.store.storing_process import SECONDS, Signing

from weightsync.config import Secret
from weightsync.deadline import Deadline
from weightsync.errors import StaleSource
from weightsync.store.catalog import collect_garbage, load, newest, orders
from weightsync.store.objects import Listed, ObjectStore
from weightsync.store.restore import check_object, tensors_of
from weightsync.store.signing import SigningKey, new_secret
from weightsync_testing.fork_server import ForkServer

FORK_SERVER = ForkServer("tests.unit.store.storing_process")


def run(folder: Path, secret: Secret, size: str, point: str, *mutant: str) -> str:
    """Let a process store two versions. Returns what it printed before it ended."""
    output, its = os.pipe()
    with os.fdopen(output) as file:
        try:
            FORK_SERVER.fork("tests.unit.store.storing_process:run", [its], [str(folder), secret.reveal(), size, point, *mutant])
        finally:
            os.close(its)
        return file.read()


def versions(size: str) -> dict[int, dict[str, bytes]]:
    """The bytes of both versions that the process stores."""
    state = small_state() if size == "small" else large_state()
    found = {}
    for number in (0, 1):
        if number:
            change(state, 0.2, 1)
        found[number] = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
    return found


def readable(folder: Path, secret: Secret, size: str) -> list[int]:
    """Read every listed version. Returns their numbers."""
    store, key = ObjectStore(str(folder)), SigningKey(secret)
    wanted = versions(size)
    for order in orders(store, RUN):
        version = load(store, RUN, order, key.public)
        for item in version.objects.values():
            check_object(store, item)
        read = {spec.name: data.tobytes() for part in tensors_of(store, version, Deadline(SECONDS), 8 << 20) for spec, data in part}
        assert read == wanted[order[1]]
    return [number for _, number in orders(store, RUN)]


@pytest.mark.parametrize(("point", "size"), [*((point, "small") for point in STORE_POINTS), ("store.piece", "large")])
def test_a_writer_may_be_killed_anywhere(tmp_path: Path, point: str, size: str) -> None:
    secret = new_secret()
    assert "ended" not in run(tmp_path, secret, size, point)
    existing = readable(tmp_path, secret, size)
    assert existing == {"store.manifest_written": [0, 1], "store.manifests_removed": [1]}.get(point, [0])
    # A trainer that starts again writes a key frame, and what the dead one left is removed when nothing can need it any more.
    again = Signing(str(tmp_path), secret, size)
    again.publish(5)
    assert again.told and again.writer.last is not None
    collect_garbage(again.trainer.store, RUN, again.trainer.key.public, 1, grace=0)
    left = [file for file in tmp_path.rglob("*") if file.is_file()]  # so what obstore was writing is gone, too: its name has a "#"
    assert len(left) == 2


def test_a_manifest_that_is_written_first_is_noticed(tmp_path: Path) -> None:
    """The mutant: what the test above would say of it."""
    secret = new_secret()
    assert "ended" not in run(tmp_path, secret, "small", "store.manifest_written", "manifest-first")
    with pytest.raises(StaleSource, match="no such object"):
        readable(tmp_path, secret, "small")


def test_a_full_disk_costs_the_version_alone(tmp_path: Path) -> None:
    secret = new_secret()
    said = run(tmp_path, secret, "large", "full")
    assert "ended after 0" in said and "failed while writing" in said
    assert readable(tmp_path, secret, "large") == [0]


def test_a_listing_without_the_newest_version_costs_nothing_but_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state()
    trainer = StoringTrainer(tmp_path, state)
    for number in range(3):
        change(state, 0.01, number)
        trainer.publish(number)
    every = ObjectStore.list

    def late(self: ObjectStore, folder: str = "") -> list[Listed]:
        return [item for item in every(self, folder) if "0000000002.manifest" not in item.path]

    monkeypatch.setattr(ObjectStore, "list", late)
    found = newest(trainer.store, RUN, trainer.key.public)
    assert found is not None and found.version.number == 1
    assert not collect_garbage(trainer.store, RUN, trainer.key.public, 1).objects  # objects of what is not listed are young
    monkeypatch.undo()
    version = load(trainer.store, RUN, (1, 2), trainer.key.public)
    for item in version.objects.values():
        check_object(trainer.store, item)
