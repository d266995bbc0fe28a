"""The last ten thousand rounds of all coordinators of a user, in a file that outlives them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from weightsync.closing import OnFailure
from weightsync.coordinator.events import RoundEnded, RoundStarted
from weightsync.errors import readable
from weightsync.model import SlowestSpan
from weightsync.protocol.messages import UNREADABLE

_log = logging.getLogger(__name__)

MOST_ROUNDS = 10_000
_FILE = "rounds.sqlite3"
_FORMAT = 1  # of the table; a file of another one is left alone
_MEMORY = ":memory:"
_LOCKED_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_ERROR_CHARACTERS = 1000

T = TypeVar("T")


class RoundRecord(msgspec.Struct, frozen=True):
    """One round that has ended. Times are seconds, and since the Unix epoch for ``started`` and ``ended``."""

    run: str
    round: int
    """Counts from 1 in each run, as far as the history goes back."""
    kind: str
    """``publish``, or ``seed`` for the delivery of a version that was published before."""
    number: int
    epoch: int
    started: float
    ended: float
    seconds: float
    queued: float
    """Waited for earlier rounds."""
    ok: bool
    error: str | None = None
    replicas: int = 0
    """Known replicas."""
    updated: int = 0
    """Replicas that got the version."""
    nbytes: int = 0
    gigabytes_per_second: float = 0.0
    pause_seconds: float = 0.0
    """Longest pause of a replica."""
    place_seconds: float = 0.0
    transports: dict[str, int] = {}
    """Bytes by transport; empty if the round was not traced."""
    slowest: SlowestSpan | None = None
    """The longest phase and the rank that spent it; ``None`` if the round was not traced."""
    interrupted: bool = False
    """Whether the coordinator ended before the round did. Then nothing is known of it but its beginning."""


def running_record(run: str, started: RoundStarted) -> RoundRecord:
    """Return what is left of a round that has begun if the coordinator ends before the round does."""
    why = "interrupted: the coordinator ended before the round did"
    record = record_of(run, started, RoundEnded(started.round, None, why, started.seeding, 0.0))
    return msgspec.structs.replace(record, interrupted=True)


def record_of(run: str, started: RoundStarted, event: RoundEnded) -> RoundRecord:
    """Return the record of a round by its first and its last event."""
    now, result = time.time(), event.result
    error = event.error and readable(event.error, _ERROR_CHARACTERS)
    record = RoundRecord(
        run=run, round=event.round, kind="seed" if event.seeding else "publish", number=started.number, epoch=started.epoch,
        started=now - event.seconds, ended=now, seconds=event.seconds, queued=event.queued, ok=False, error=error,
        replicas=len(started.replicas),
    )  # fmt: skip
    if result is None:
        return record
    return msgspec.structs.replace(
        record, ok=result.ok, replicas=len(result.replicas), updated=len(result.updated), nbytes=result.nbytes,
        gigabytes_per_second=result.gigabytes_per_second, pause_seconds=result.longest_pause,
        place_seconds=result.phases.get("place", 0.0), transports=result.transports, slowest=result.slowest,
    )  # fmt: skip


class RoundHistory:
    """Records of rounds, in SQLite in the folder ``directory``; without one, or if it cannot be used, in memory.

    The file is used on a thread of its own, because a disk may be slow. Several coordinators may share it, each of another ``run``.
    """

    def __init__(self, directory: Path | None, run: str) -> None:
        self._directory, self._run_id = directory, run
        self._running: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightsync-history")
        self._connection: sqlite3.Connection | None = None

    async def add(self, record: RoundRecord) -> None:
        """Add a record; that of a round that has ended takes the place of its :func:`running_record`.

        A failure is logged: a round must not depend on a disk.
        """
        data = msgspec.json.encode(record)

        def insert(connection: sqlite3.Connection) -> None:
            before = self._running.pop(record.round, None)
            with connection:
                command = "INSERT OR REPLACE INTO rounds (id, record) VALUES (?, ?)"
                number = connection.execute(command, (before, data)).lastrowid or 0
                connection.execute("DELETE FROM rounds WHERE id <= ?", (number - MOST_ROUNDS,))
            if record.interrupted:
                self._running[record.round] = number

        try:
            await self._run(insert)
        except sqlite3.Error as error:
            _log.warning("round %d is missing in the history: %s", record.round, error)

    async def last(self, count: int) -> list[RoundRecord]:
        """Return the last ``count`` records, newest last.

        Records that cannot be read are left out, and rounds that run: here, or perhaps in another run's coordinator.
        """

        def select(connection: sqlite3.Connection) -> list[RoundRecord]:
            rows = connection.execute("SELECT id, record FROM rounds ORDER BY id DESC LIMIT ?", (count,)).fetchall()
            running = set(self._running.values())
            records = []
            for number, data in reversed(rows):
                with contextlib.suppress(*UNREADABLE, TypeError):
                    record = msgspec.json.decode(data, type=RoundRecord)
                    if not record.interrupted or (record.run == self._run_id and number not in running):
                        records.append(record)
            return records

        try:
            return await self._run(select)
        except sqlite3.Error as error:
            _log.warning("the history of rounds cannot be read: %s", error)
            return []

    async def last_round(self) -> int:
        """Return the number of the run's last round; 0 if none is known."""
        return max((record.round for record in await self.last(MOST_ROUNDS) if record.run == self._run_id), default=0)

    async def aclose(self) -> None:
        """Write what was added, close the file and end the thread; a disk that hangs is not waited for. Safe twice."""

        def close() -> None:
            if self._connection is not None:
                self._connection.close()

        written = False
        with contextlib.suppress(RuntimeError, TimeoutError, sqlite3.Error):  # closed already, too slow, or beyond use
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.wrap_future(self._thread.submit(close))
            written = True
        self._thread.shutdown(wait=written)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            if self._connection is None:
                self._connection = self._open()
            return work(self._connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _open(self) -> sqlite3.Connection:
        if self._directory is not None:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._directory / _FILE
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))  # errors name hosts: for this user only
                return _opened(str(path))
            except (OSError, sqlite3.Error) as error:
                _log.warning("the history of rounds is kept in memory only: %s: %s", self._directory / _FILE, error)
        return _opened(_MEMORY)


def _opened(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_LOCKED_SECONDS)
    with OnFailure(connection.close), connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _FORMAT):
            raise sqlite3.DatabaseError(f"it has format {version}, and this release knows {_FORMAT}")
        connection.execute("CREATE TABLE IF NOT EXISTS rounds (id INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL)")
        connection.execute(f"PRAGMA user_version = {_FORMAT}")
        connection.execute("PRAGMA synchronous = NORMAL")
    return connection
