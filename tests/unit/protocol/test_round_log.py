"""What trainers and engines log: joining, rounds, failures, reconnecting; and how a command logs as JSON."""

from __future__ import annotations

import json
import logging
import queue
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from weightsync.cli.options import JsonFormatter, configure_logs
from weightsync.config import Secret, ServerSettings
from weightsync.errors import Aborted, ConfigurationError, RoundFailed, VerificationError, WeightSyncError
from weightsync.model.result import ReplicaResult, RoundResult
from weightsync.protocol.messages import Audit, Body
from weightsync.protocol.round_log import LoggedCalls, MissedReplicas
from weightsync.protocol.worker import IncomingCall
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks")

SECONDS = 20


class Lines(logging.Handler):
    """Everything that is logged under ``weightsync``, as ``LEVEL message``."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname} {record.getMessage()}"
        self.all.append(line)
        self._new.put(line)

    def find(self, pattern: str) -> list[str]:
        return [line for line in self.all if re.fullmatch(pattern, line)]

    def wait(self, pattern: str) -> None:
        while not re.fullmatch(pattern, self._new.get(timeout=SECONDS)):
            pass


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    logger, handler = logging.getLogger("weightsync"), Lines()
    logger.addHandler(handler)
    kept = logger.level
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(kept)


class Streamed(weightsync.EngineAdapter):
    """A loader that nobody can look behind."""

    def __init__(self, broken: bool = False) -> None:
        self.module, self.broken = torch.nn.Linear(8, 4), broken

    def manifest(self) -> weightsync.Manifest:
        return weightsync.manifest_of(self.module)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.broken:
            raise ValueError("no room")
        self.module.load_state_dict(dict(tensors), strict=False)


def engine(trainer: weightsync.Trainer, adapter: weightsync.EngineAdapter, name: str, **given: Any) -> weightsync.Engine:
    environment = trainer.environment
    where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
    return weightsync.Engine(adapter, replica=name, coordinator=where, token=token, transports=["inproc"], **given)


def trainer(server: BackgroundServer) -> weightsync.Trainer:
    return weightsync.Trainer(torch.nn.Linear(8, 4), server.url, token=server.token, transports=["inproc"])


@pytest.fixture
def server(lines: Lines) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        yield server


def test_joining_and_rounds_are_logged_with_version_and_milliseconds(lines: Lines, server: BackgroundServer) -> None:
    with trainer(server) as publisher, engine(publisher, weightsync.ModuleAdapter(torch.nn.Linear(8, 4)), "mine-0"):
        publisher.publish(7, timeout=SECONDS)
    where = re.escape(server.url)
    assert lines.find(rf"INFO trainer/0 joined run run at {where}")
    assert lines.find(rf"INFO mine-0/0 joined run run at {where}")
    assert lines.find(r"INFO mine-0/0 serves run@7 after [\d.]+ ms: 144 B direct, verified as installed")
    assert lines.find(
        r"INFO trainer/0: round 1: version run@7 serves in 1 of 1 replicas \(mine-0\) after [\d.]+ ms: 144 B, verified as installed"
    )
    assert not [line for line in lines.all if line.startswith("WARNING")]


def test_what_is_only_verified_as_received_is_warned_of_once(lines: Lines, server: BackgroundServer) -> None:
    with trainer(server) as publisher, engine(publisher, Streamed(), "mine-0"):
        for number in (1, 2):
            publisher.publish(number, timeout=SECONDS)
    assert len(lines.find(r"INFO mine-0/0 serves run@\d after [\d.]+ ms: 144 B streamed, verified as received")) == 2
    assert len(lines.find(r"WARNING mine-0/0: verified as received: .*delivery_reason .* says why")) == 1


def test_a_failure_is_in_the_engines_log_and_in_the_trainers(lines: Lines, server: BackgroundServer) -> None:
    with trainer(server) as publisher, engine(publisher, Streamed(broken=True), "mine-0"), pytest.raises(RoundFailed):
        publisher.publish(1, timeout=SECONDS)
    assert lines.find(r"WARNING mine-0/0: updating failed: .*no room.*")
    assert lines.find(r"WARNING trainer/0: round 1: version run@1 serves in 0 of 1 replicas .*")
    assert lines.find(r"WARNING version run@1 did not reach mine-0 \(out of service\): .*no room.*")


def test_a_result_prints_an_error_that_recurs_only_once(server: BackgroundServer) -> None:
    even, odd = (weightsync.ModuleAdapter(torch.nn.Linear(8, rows)) for rows in (4, 5))
    joined = weightsync.Engine(odd, replica="odd", coordinator=server.url, token=server.token, transports=["inproc"])  # first
    with joined, trainer(server) as publisher, engine(publisher, even, "mine-0"):
        results = [publisher.publish(number, timeout=SECONDS) for number in (2, 3, 4)]
    printed = [str(result).splitlines()[-1] for result in results]
    assert printed[0].startswith("  not updated: odd (refused: ManifestMismatch: ")
    assert printed[1:] == ["  not updated: odd (refused since round 1)"] * 2
    errors = [result.missed[0].error for result in results]
    assert errors[0] and len(set(errors)) == 1, "programs get the whole error each time"


def test_an_error_is_printed_again_if_it_changes_or_comes_back() -> None:
    def after(number: int, error: str | None) -> RoundResult:
        replica = ReplicaResult("odd", "dirty" if error else "loaded", None, None, 0, "", (), "", {}, 0.0, error)
        version = weightsync.Version("run", number, "f", "d")
        return missed.warn(RoundResult(number, version, True, 0, 0.1, {}, (replica,)))

    missed = MissedReplicas(logging.getLogger(__name__))
    rounds = [(1, "a"), (2, "a"), (4, "b"), (5, "b"), (6, None), (7, "b"), (8, "b"), (1, "b"), (2, "b")]  # a coordinator restarted
    assert [after(*each).replicas[0].since for each in rounds] == [None, 1, None, 4, None, None, 7, None, 1]


def test_a_replica_that_fails_for_another_reason_is_warned_of_again(caplog: pytest.LogCaptureFixture) -> None:
    """It was out of service before; that it then held other bytes was in no log."""
    missed = MissedReplicas(logging.getLogger(__name__))
    errors = ["move: LoadError: no room", "move: LoadError: still no room", "verify: VerificationError: other bytes"]
    for number, error in enumerate(errors, 1):
        replica = ReplicaResult("odd", "dirty", None, None, 0, "", (), "", {}, 0.0, error)
        version = weightsync.Version("run", number, "f", "d")
        missed.warn(RoundResult(number, version, True, 0, 0.1, {}, (replica,)))
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"version run@{number} did not reach odd (out of service): {errors[number - 1]}" for number in (1, 3)]


def test_ranks_of_a_larger_replica_log_their_versions_too(lines: Lines, server: BackgroundServer) -> None:
    parts = [weightsync.ModuleAdapter(torch.nn.Linear(8, 4)) for _ in range(2)]
    with (
        trainer(server) as publisher,
        engine(publisher, parts[0], "mine-0", rank=0, world_size=2),
        engine(publisher, parts[1], "mine-0", rank=1, world_size=2),
    ):
        publisher.publish(1, timeout=SECONDS)
    for rank in range(2):
        assert lines.find(rf"INFO mine-0/{rank} serves run@1 after [\d.]+ ms: .* verified as installed")


def test_a_lost_coordinator_and_its_return_are_logged(lines: Lines) -> None:
    with BackgroundServer(ServerSettings(port=0, run="run", token=Secret("t"))) as first:
        adapter = weightsync.ModuleAdapter(torch.nn.Linear(8, 4))
        rank = weightsync.Engine(adapter, replica="mine-0", coordinator=first.url, token="t")
        with rank:
            first.stop()
            lines.wait(r"WARNING mine-0/0: the connection to the coordinator at \S+ ended: the coordinator is shutting down")
            with BackgroundServer(ServerSettings(port=first.address.port, run="run", token=Secret("t"))):
                lines.wait(rf"INFO mine-0/0 is connected to {re.escape(first.url)} again after \d+\.\d s")


def test_json_logs_are_one_object_a_line_whatever_the_message_holds() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.LogRecord("weightsync.x", logging.ERROR, "", 0, "a\n%s", ("\x1b[31m",), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found.pop("time"))
    assert found == {"level": "error", "logger": "weightsync.x", "message": "a\n\x1b[31m", "exception": "ValueError: why"}


def test_the_level_is_that_of_weightsync_alone(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    level, root.handlers[:] = root.level, []
    try:
        configure_logs("debug", True)
        assert logging.getLogger("weightsync.trainer").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("asyncio").isEnabledFor(logging.INFO)
        assert not logging.getLogger("weightsync.websocket").isEnabledFor(logging.DEBUG)
        assert isinstance(root.handlers[0].formatter, JsonFormatter)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_an_audit_that_is_not_possible_is_no_warning(lines: Lines) -> None:
    version, error = weightsync.Version("run", 1, "", ""), WeightSyncError("nothing")

    def run(timeout: float) -> Body:
        raise error

    receive = LoggedCalls("r/0", lambda body: IncomingCall(body, run, lambda: ""))
    for error in (ConfigurationError("it may sleep"), Aborted("withdrawn"), VerificationError("weight differs")):
        with pytest.raises(type(error)):
            receive(Audit(version)).run(SECONDS)
    assert lines.all == ["WARNING r/0: reading its weights again failed: VerificationError: weight differs"]
