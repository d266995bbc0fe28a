"""A region in memory follows the versions of a store: it reads what it lacks, and keeps its version when that fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.unit.store.stored import RUN, StoringTrainer, change, large_state, small_state

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, StaleSource, VerificationError
from weightsync.model.stored import CHUNK_BYTES, StoredObject
from weightsync.store.catalog import load
from weightsync.store.objects import ObjectStore
from weightsync_relay.kept_region import KeptRegion

SECONDS = 30.0


def chain_of(trainer: StoringTrainer, number: int) -> tuple[StoredObject, ...]:
    return load(trainer.store, RUN, (1, number), trainer.key.public).stored.ranks[0].chain


def region_of(trainer: StoringTrainer) -> KeptRegion:
    return KeptRegion(trainer.store, trainer.ranks[0].layout.regions[0])


def holds_now(region: KeptRegion, trainer: StoringTrainer) -> bool:
    return bool(np.array_equal(region.memory, trainer.ranks[0].memory[: len(region.memory)]))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the objects that are read."""
    paths: list[str] = []
    reading = ObjectStore.read

    def noted(self: ObjectStore, path: str, first: int, last: int) -> memoryview:
        paths.append(path)
        return reading(self, path, first, last)

    monkeypatch.setattr(ObjectStore, "read", noted)
    return paths


@pytest.mark.parametrize("make", [small_state, large_state])
def test_only_what_it_lacks_is_read(tmp_path: Path, read: list[str], make: type) -> None:
    state = make()
    trainer = StoringTrainer(tmp_path, state, every=4)
    region = region_of(trainer)
    for number, share in enumerate((1.0, 0.01, 0.0, 0.001, 0.2, 0.01, 0.01)):
        change(state, share, number)
        trainer.publish(number)
        chain = chain_of(trainer, number)
        if number == 2:
            continue  # a version that is skipped
        read.clear()
        region.update(chain, Deadline(SECONDS))
        assert holds_now(region, trainer) and region.chain == chain
        lacked = {1: 1, 3: 2}.get(number, 1)
        assert set(read) == {item.path for item in chain[-lacked:]}
    assert [kinds[0] for kinds in trainer.kinds] == ["key", "delta", "delta", "delta", "key", "delta", "delta"]
    read.clear()
    region.update(chain, Deadline(SECONDS))
    assert not read
    late = region_of(trainer)
    late.update(chain, Deadline(SECONDS))
    assert holds_now(late, trainer)


def test_a_delta_that_was_changed_leaves_the_version_before(tmp_path: Path) -> None:
    state = large_state()
    trainer = StoringTrainer(tmp_path, state)
    trainer.publish(0)
    region = region_of(trainer)
    region.update(chain_of(trainer, 0), Deadline(SECONDS))
    before = region.memory.copy()
    change(state, 0.15, 1)
    trainer.publish(1)
    chain = chain_of(trainer, 1)
    path = tmp_path / chain[1].path
    good = path.read_bytes()
    assert chain[1].kind == "delta" and chain[1].chunks > 1
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # in the last chunk
    with pytest.raises(VerificationError, match="it was changed"):
        region.update(chain, Deadline(SECONDS))
    assert np.array_equal(region.memory, before) and region.chain == chain[:1]
    path.write_bytes(good)
    region.update(chain, Deadline(SECONDS))
    assert holds_now(region, trainer)


def test_a_key_frame_that_fails_leaves_none(tmp_path: Path) -> None:
    state = large_state()
    trainer = StoringTrainer(tmp_path, state, every=1)
    trainer.publish(0)
    region = region_of(trainer)
    region.update(chain_of(trainer, 0), Deadline(SECONDS))
    change(state, 0.5, 1)
    trainer.publish(1)
    chain = chain_of(trainer, 1)
    path = tmp_path / chain[0].path
    content = path.read_bytes()
    path.write_bytes(content[: CHUNK_BYTES + 1])
    with pytest.raises(VerificationError, match="it was changed"):
        region.update(chain, Deadline(SECONDS))
    assert region.chain == ()
    region.update(chain_of(trainer, 0), Deadline(SECONDS))  # the earlier one can be read again
    path.unlink()
    with pytest.raises(StaleSource):
        region.update(chain, Deadline(SECONDS))
    path.write_bytes(content)
    with pytest.raises(DeadlineExceeded, match="did not finish within"):
        region.update(chain, Deadline(1e-6))
    region.update(chain, Deadline(SECONDS))
    assert holds_now(region, trainer)
