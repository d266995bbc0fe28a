"""The history of rounds: bounded, shared by coordinators, and no round depends on its file."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from weightsync.coordinator.events import RoundEnded, RoundStarted
from weightsync.model import Version
from weightsync.protocol.messages import RoundResult
from weightsync.server import history
from weightsync.server.history import RoundHistory, RoundRecord, record_of, running_record

STARTED = RoundStarted(3, 7, ("a", "b"), False, 2)


def record(number: int, **changes: Any) -> RoundRecord:
    return RoundRecord("run", number, "publish", 7, 1, 1.0, 2.0, 1.0, 0.0, True, **changes)


async def filled(directory: Path | None, *records: RoundRecord) -> list[RoundRecord]:
    kept = RoundHistory(directory, "run")
    try:
        for one in records:
            await kept.add(one)
        return await kept.last(100)
    finally:
        await kept.aclose()


async def test_the_newest_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_ROUNDS", 3)
    assert [one.round for one in await filled(tmp_path, *map(record, range(1, 6)))] == [3, 4, 5]
    assert [one.round for one in await filled(tmp_path, record(1))] == [4, 5, 1]
    assert (tmp_path / "rounds.sqlite3").stat().st_mode & 0o077 == 0


async def test_two_coordinators_share_a_file(tmp_path: Path) -> None:
    both = RoundHistory(tmp_path, "run"), RoundHistory(tmp_path, "run")
    await asyncio.gather(*(kept.add(record(number)) for number in range(20) for kept in both))
    assert [len(await kept.last(100)) for kept in both] == [40, 40]
    for kept in both:
        await kept.aclose()
        await kept.aclose()


@pytest.mark.parametrize("broken", ["bytes", "format", "folder"])
async def test_a_file_that_cannot_be_used_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    directory = tmp_path / "state"
    if broken == "folder":
        directory.write_text("a file")
    else:
        directory.mkdir()
        path = directory / "rounds.sqlite3"
        if broken == "bytes":
            path.write_bytes(b"not a database" * 100)
        else:
            with sqlite3.connect(path) as connection:
                connection.execute("PRAGMA user_version = 99")
            connection.close()
    before = path.read_bytes() if broken != "folder" else b""
    assert [one.round for one in await filled(directory, record(1))] == [1], "in memory"
    assert "in memory only" in caplog.text
    assert broken == "folder" or path.read_bytes() == before


async def test_a_record_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    await filled(tmp_path, record(1), record(2))
    with sqlite3.connect(tmp_path / "rounds.sqlite3") as connection:
        connection.execute("UPDATE rounds SET record = 'x' WHERE id = 1")
    connection.close()
    assert [one.round for one in await filled(tmp_path)] == [2]


def test_a_record_has_what_is_known() -> None:
    failed = record_of("run", STARTED, RoundEnded(3, None, "PeerLost: gone\n" + "x" * 5000, True, 2.0, 0.5))
    assert (failed.kind, failed.number, failed.epoch, failed.ok, failed.replicas, failed.queued) == ("seed", 7, 2, False, 2, 0.5)
    assert failed.ended - failed.started == pytest.approx(2.0)
    assert len(failed.error or "") <= 1000
    version = Version("run", 7, "", "")
    result = RoundResult(3, version, True, 500_000_000, 0.25, {"place": 0.1}, (), transports={"tcp": 5})
    good = record_of("run", STARTED, RoundEnded(3, result, None, False, 0.25))
    assert (good.ok, good.gigabytes_per_second, good.place_seconds, good.transports) == (True, 2.0, 0.1, {"tcp": 5})


async def test_a_round_in_which_the_coordinator_died_is_listed_after_its_restart(tmp_path: Path) -> None:
    dying = RoundHistory(tmp_path, "run")
    for number in (1, 2):
        await dying.add(running_record("run", RoundStarted(number, 7, ("a",), False, 2)))
        assert [one.round for one in await dying.last(10)] == [1][: number - 1], "one that runs is not shown"
        if number == 1:
            await dying.add(
                record_of("run", RoundStarted(1, 7, ("a",), False, 2), RoundEnded(1, None, "PeerLost: gone", False, 2.0))
            )
    again, other = RoundHistory(tmp_path, "run"), RoundHistory(tmp_path, "another run")
    first, second = await again.last(10)
    assert (first.round, first.interrupted, first.error) == (1, False, "PeerLost: gone")
    assert (second.round, second.interrupted, second.ok, second.number, second.epoch, second.replicas) == (2, True, False, 7, 2, 1)
    assert (second.error or "").startswith("interrupted")
    assert [one.round for one in await other.last(10)] == [1], "it may still run"
    assert (await again.last_round(), await other.last_round()) == (2, 0)
    for kept in (dying, again, other):
        await kept.aclose()
