"""Lines of a relay's log: while it waits for a first version, and while versions cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.store.stored import RUN, StoringTrainer, change, small_state

from weightsync.arrays import Bytes
from weightsync.errors import Aborted, StaleSource, TransportError
from weightsync.model.stored import StoredObject
from weightsync.store.catalog import load, manifest_path
from weightsync.store.objects import ObjectStore
from weightsync.store.region import verified_chunk
from weightsync.store.signing import StoredVersion
from weightsync_relay import kept_region, relay
from weightsync_relay.relay import Relay


class ReadingRelay(Relay):
    """Reads, and publishes nothing. After each turn it does the next thing of a list, then it ends."""

    between: list[Callable[[], object]]

    def _publish(self, stored: StoredVersion, *_: object) -> None:
        self._published = stored.version, 0

    def _turn(self, once: bool) -> None:
        try:
            super()._turn(once)
        finally:
            if self.between:
                self.between.pop(0)()
            else:
                self.close()


def lines(caplog: pytest.LogCaptureFixture, level: str, text: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == level and text in each.getMessage()]


def test_a_relay_waits_for_the_first_version_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "weightsync")
    with ReadingRelay(ObjectStore(str(tmp_path / "store")), RUN, bytes(32), "", interval=0.001) as waiting:
        waiting.between = [lambda: None, lambda: None]
        with pytest.raises(StaleSource, match="there is no folder"):
            waiting.follow(once=True)
        waiting.follow()
    assert lines(caplog, "INFO", "") == [f"waiting for the first version of run {RUN}: there is no folder {tmp_path / 'store'}"]
    assert not lines(caplog, "ERROR", "")


def test_a_forged_manifest_ends_no_relay_while_the_store_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the key for a wrong one, and ended, although the store had a version that was signed with it."""
    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    (tmp_path / manifest_path(RUN, (1, 9))).write_bytes((tmp_path / manifest_path(RUN, (1, 0))).read_bytes())

    def fails(store: ObjectStore, run: str, order: tuple[int, int], public: bytes) -> StoredVersion:
        if order == (1, 0) and following.between:
            raise TransportError("the store fails")
        return load(store, run, order, public)

    monkeypatch.setattr(relay, "load", fails)
    with ReadingRelay(ObjectStore(str(tmp_path)), RUN, trainer.key.public, "", interval=0.001) as following:
        following.between = [lambda: None]
        following.follow()
        assert following._published is not None and following._published[0].number == 0


def test_a_relay_that_is_closed_says_of_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It announced a next attempt, as an error."""

    class Closed(Relay):
        def _publish(self, stored: StoredVersion, *_: object) -> None:
            self._published = stored.version, 0
            self.close()
            raise Aborted("the link is closed")

    trainer = StoringTrainer(tmp_path, small_state())
    trainer.publish(0)
    Closed(ObjectStore(str(tmp_path)), RUN, trainer.key.public, "").follow()
    assert not lines(caplog, "ERROR", "")


def test_each_version_that_cannot_be_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "weightsync")
    state = small_state()
    trainer = StoringTrainer(tmp_path, state)
    trainer.publish(0)

    def publish(number: int) -> None:
        change(state, 0.01, number)
        trainer.publish(number)

    def publish_and_damage() -> None:
        publish(1)
        (delta,) = tmp_path.rglob("1.1.0-*.safetensors")
        delta.write_bytes(delta.read_bytes()[:-1] + b"\xff")

    with ReadingRelay(ObjectStore(str(tmp_path)), RUN, trainer.key.public, "", interval=0.001) as following:
        following.between = [publish_and_damage, lambda: None, partial(publish, 2), lambda: None]
        following.follow()
    (first,) = lines(caplog, "ERROR", "no newer version comes")
    (second,) = lines(caplog, "WARNING", "no newer version comes")
    assert f"(version {RUN}@1)" in first and f"(version {RUN}@2)" in second
    reading = [lines(caplog, level, f"reading version {RUN}@") for level in ("INFO", "DEBUG")]
    assert [[line.split(":")[0][-1] for line in each] for each in reading] == [["0", "1", "2"], ["1", "2"]]


@pytest.mark.parametrize("damaged", ["delta", "key frame"])
def test_a_relay_starts_with_the_newest_version_that_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str
) -> None:
    """It waited for the next key frame, and had nothing to publish until then."""
    caplog.set_level("INFO", "weightsync")
    state = small_state()
    trainer = StoringTrainer(tmp_path, state, every=16 if damaged == "delta" else 2)
    for number in range(5):
        change(state, 0.01, number)
        trainer.publish(number)
    first = 3 if damaged == "delta" else 4
    (spoiled,) = tmp_path.rglob(f"1.{first}.0-*.safetensors")
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"\xff")
    with ReadingRelay(ObjectStore(str(tmp_path)), RUN, trainer.key.public, "", interval=0.001) as following:
        following.between = [lambda: None]
        following.follow()
        assert following._published is not None and following._published[0].number == first - 1
    (line,) = lines(caplog, "ERROR", "no newer version comes: VerificationError")
    assert f"(version {RUN}@4)" in line


def test_a_damaged_object_is_read_once_in_an_attempt_however_many_versions_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt read a damaged key frame for every version after it."""
    trainer = StoringTrainer(tmp_path, state := small_state())
    for number in range(6):
        change(state, 0.01, number)
        trainer.publish(number)
    (spoiled,) = tmp_path.rglob("1.0.0-*.safetensors")
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"\xff")
    reads = list[str]()

    def counted(store: ObjectStore, item: StoredObject, chunk: int) -> Bytes:
        reads.append(item.path)
        return verified_chunk(store, item, chunk)

    monkeypatch.setattr(kept_region, "verified_chunk", counted)
    with ReadingRelay(ObjectStore(str(tmp_path)), RUN, trainer.key.public, "", interval=0.001) as following:
        following.between = [lambda: None]
        following.follow()
    assert reads == [str(spoiled.relative_to(tmp_path))] * 2


def test_a_new_coordinator_gets_the_version_whose_memory_a_damaged_key_frame_took(tmp_path: Path) -> None:
    """From the second attempt on there was no version in memory, and a coordinator that was restarted got none."""
    trainer = StoringTrainer(tmp_path, state := small_state(), every=2)
    for number in range(3):
        change(state, 0.01, number)
        trainer.publish(number)
    (spoiled,) = tmp_path.rglob("1.2.0-*.safetensors")
    spoiled.write_bytes(spoiled.read_bytes()[:-1] + b"\xff")
    coordinator: Any = SimpleNamespace(welcomes=0, tell=lambda reason: None, close=lambda: None)
    with ReadingRelay(ObjectStore(str(tmp_path)), RUN, trainer.key.public, "", interval=0.001) as following:
        following.between = [partial(setattr, following, "_trainer", coordinator), partial(setattr, following, "_published", None)]
        following.follow()
        assert following._published is not None and following._published[0].number == 1
