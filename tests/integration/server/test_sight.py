"""A slow phase at one rank is named by the result, the metrics, the trace and the history. The history outlives a coordinator."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.server.test_metrics import value
from typer.testing import CliRunner

import weightsync
from weightsync.cli.main import app as cli
from weightsync.config import ServerSettings
from weightsync.errors import RoundFailed
from weightsync.model import PauseMode, RoundResult
from weightsync.server.server import BackgroundServer

SLOW = 0.25
FEATURES = 256


class SlowAdapter(weightsync.ModuleAdapter):
    """A module whose engine is slow, or fails, in one method."""

    def __init__(self, slow: str = "", fails: bool = False, features: int = FEATURES) -> None:
        super().__init__(torch.nn.Linear(features, features))
        self.slow, self._fails = slow, fails

    def _reach(self, method: str) -> None:
        if method == self.slow:
            threading.Event().wait(SLOW)
            if self._fails:
                raise RuntimeError("on purpose")

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._reach("pause")
        super().pause(mode, timeout)

    def flush(self) -> bool:
        self._reach("flush")
        return super().flush()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run", state_dir=str(tmp_path / "state"))) as server:
        yield server


def run(server: BackgroundServer, *arguments: str) -> str:
    done = CliRunner(env={"WEIGHTSYNC_TOKEN": server.token}).invoke(cli, [*arguments, "-c", server.url])
    assert done.exit_code == 0, done.output
    return done.output


def publish(server: BackgroundServer, adapters: dict[str, list[SlowAdapter]], rounds: int = 1, **options: Any) -> RoundResult:
    with ExitStack() as opened:
        options |= {"coordinator": server.url, "token": server.token, "transports": ["shared_memory"]}
        trainer = opened.enter_context(weightsync.Trainer(torch.nn.Linear(FEATURES, FEATURES), **options))
        for replica, ranks in adapters.items():
            for rank, adapter in enumerate(ranks):
                opened.enter_context(weightsync.Engine(adapter, replica, rank=rank, world_size=len(ranks), **options))
        trainer.wait_for_replicas(len(adapters))
        for _ in range(rounds):
            result = trainer.publish()
    return result


@pytest.mark.parametrize(("phase", "ranks"), [("flush", 2), ("pause", 1)])
def test_a_slow_rank_is_named_everywhere(no_leaks: None, server: BackgroundServer, tmp_path: Path, phase: str, ranks: int) -> None:
    slow = [*(SlowAdapter() for _ in range(ranks - 1)), SlowAdapter(phase)]
    member = f"b/{ranks - 1}"
    result = publish(server, {"a": [SlowAdapter()], "b": slow})
    assert result.slowest is not None
    assert (result.slowest.rank, result.slowest.phase) == (member, phase)
    assert SLOW <= result.slowest.seconds <= result.seconds
    assert f"slowest: {phase} at {member}" in str(result)
    nbytes = (ranks + 1) * 4 * FEATURES * (FEATURES + 1)
    assert result.transports == {"shared_memory": nbytes} == {"shared_memory": result.nbytes}
    # Metrics.
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {server.token}"}) as http:
        text = http.get(f"{server.url}/metrics").text
    found = {
        (sample.name.removeprefix("weightsync_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert value(found, "slowest_rank_seconds", phase=phase, rank=member) == pytest.approx(result.slowest.seconds)
    assert (value(found, "phase_seconds_sum", party="engine", phase=phase) or 0.0) >= SLOW
    assert value(found, "received_bytes_total", transport="shared_memory") == nbytes
    # History.
    [record] = json.loads(run(server, "rounds", "--json"))
    assert record["slowest"] == {"rank": member, "phase": phase, "seconds": result.slowest.seconds, "source": ""}
    assert (record["transports"], record["ok"], record["updated"]) == ({"shared_memory": nbytes}, True, 2)
    assert record["ended"] - record["started"] == pytest.approx(result.seconds)
    assert json.loads(run(server, "rounds", "--json", "--run", record["run"])) == [record]
    assert json.loads(run(server, "rounds", "--json", "--run", "of-another")) == []
    listed = run(server, "rounds")
    assert phase in listed
    assert member in listed
    # Trace.
    path = tmp_path / "round.json"
    assert f"slowest: {phase} at {member}" in run(server, "trace", "--last", "--out", str(path))
    check_trace(json.loads(path.read_text()), result, member, phase)


def check_trace(trace: dict[str, Any], result: RoundResult, member: str, phase: str) -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    parties = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert set(parties.values()) == {"coordinator", "trainer", "a", "b"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    tracks = {f"{parties[e['pid']]}/{names[e['pid'], e['tid']]}" for e in spans}
    replica, _, rank = member.partition("/")
    assert {"trainer/rank 0", "a/rank 0", f"{replica}/rank {rank}", "coordinator/phases of a"} <= tracks
    worst = max((e for e in spans if e["cat"] != "replica"), key=lambda e: e["dur"])
    assert (worst["args"]["member"], worst["name"]) == (member, phase)
    assert {"copy", "pause", "flush", "resume", "read trainer/0"} <= {e["name"] for e in spans}
    begin, error = min(e["ts"] for e in spans), trace["otherData"]["clock_error_us"]
    assert 0 < error < 1e6 * SLOW
    for event in spans:
        assert abs(event["args"]["clock_offset_us"]) <= event["args"]["clock_error_us"] + 1, "all clocks here are one"
        assert event["ts"] + event["dur"] <= begin + 1e6 * result.seconds + 2 * error
    lanes: dict[tuple[int, int], float] = {}
    for event in sorted(spans, key=lambda e: float(e["ts"])):
        assert event["ts"] >= lanes.get((event["pid"], event["tid"]), 0.0) - 1, "spans of one track do not overlap"
        lanes[event["pid"], event["tid"]] = event["ts"] + event["dur"]


def test_a_round_that_fails_is_in_the_history_with_where_its_time_went(server: BackgroundServer) -> None:
    with pytest.raises(RoundFailed):
        publish(server, {"a": [SlowAdapter("pause", fails=True)]})
    record = json.loads(run(server, "rounds", "--json"))[0]
    assert not record["ok"]
    assert "on purpose" in record["error"]
    assert record["slowest"]["phase"] == "pause"


def test_the_history_outlives_a_coordinator_and_traces_can_be_turned_off(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, run="run", state_dir=str(tmp_path / "state"), traces=0)
    for started in (1, 2):
        with BackgroundServer(settings) as server:
            publish(server, {"a": [SlowAdapter()]}, rounds=2)
            records = json.loads(run(server, "rounds", "--json"))
            assert [record["number"] for record in records] == [0, 1] * started
            assert [record["round"] for record in records] == list(range(1, 2 * started + 1))
            assert {json.dumps(record["slowest"]) for record in records} == {"null"}
            assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
            done = CliRunner(env={"WEIGHTSYNC_TOKEN": server.token}).invoke(cli, ["trace", "-c", server.url])
            assert done.exit_code == 1
            assert "no round ended, or WEIGHTSYNC_TRACES=0" in done.output
