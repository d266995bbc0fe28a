"""``make demo ARGS="--kill"``: a replica, a trainer rank and the coordinator are killed in the middle of rounds, and come back."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.examples.test_demo import Run, start

__all__ = ["KILL", "CoordinatorOfDemo", "start", "token_file"]

pytestmark = [pytest.mark.slow, pytest.mark.rare]

KILL = ["--kill", "--trainer-ranks", "2", "--replicas", "2", "--versions", "5"]


class CoordinatorOfDemo:
    """The demo's coordinator, as another process of its user asks it."""

    def __init__(self, run: Run, token_file: Path) -> None:
        found = re.search(r"coordinator at (\S+);", run.read_until("coordinator at"))
        assert found is not None
        self.url, self._token_file = found[1], token_file

    def ask(self, *command: str) -> Any:
        where = ["--json", "--coordinator", self.url, "--token-file", str(self._token_file)]
        done = subprocess.run(
            [sys.executable, "-m", "weightsync", *command, *where], stdout=subprocess.PIPE, timeout=60, check=True
        )
        return json.loads(done.stdout)

    def replica(self, name: str) -> dict[str, Any]:
        return next(dict(replica) for replica in self.ask("status")["replicas"] if replica["name"] == name)


@pytest.fixture
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.touch(0o600)
    path.write_text("a-token-that-only-this-test-knows")
    return path


@pytest.mark.timeout(900)
def test_whoever_is_killed_comes_back_and_every_response_is_right(start: Callable[..., Run], token_file: Path) -> None:
    run = start(*KILL, "--token-file", str(token_file))
    coordinator = CoordinatorOfDemo(run, token_file)

    run.read_until("killing replica-1")
    run.read_until("replica-1  lost")
    lost = coordinator.replica("replica-1")
    assert (lost["state"], lost["routable"], lost["version"]) == ("lost", False, None)
    assert "PeerLost" in lost["error"]

    run.read_until("replica-1 is back")  # the next one is killed at once: what happened is in the history
    run.read_until("killing trainer-1")
    run.read_until("  replica-1  out of service")
    dirty = coordinator.replica("replica-1")
    assert (dirty["state"], dirty["routable"], dirty["version"]) == ("dirty", False, None)

    run.read_until("trainer-1 is back")
    run.read_until("killing coordinator")
    run.read_until("coordinator is back")
    back = coordinator.replica("replica-1")
    assert (back["state"], back["epoch"]) == ("loaded", 2)
    assert back["version"] > 3
    rounds = coordinator.ask("rounds")
    told = [(one["kind"], one["epoch"], one["number"], one["updated"], one["replicas"]) for one in rounds[:5]]
    assert told == [
        ("publish", 1, 1, 2, 2),
        ("publish", 1, 2, 1, 2),
        ("seed", 1, 2, 1, 1),
        ("publish", 1, 3, 1, 2),
        ("publish", 2, 3, 2, 2),
    ]
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1)), "rounds of both coordinators"
    assert [(one["epoch"], one["number"]) for one in rounds if one["interrupted"]] == [(2, 4)], "in which the first one died"
    assert rounds[-1]["updated"] == 2

    assert run.process.stderr is not None
    assert run.process.stdout is not None
    errors, out = run.process.stderr.read(), run.process.stdout.read()
    assert run.process.wait(60) == 0, errors
    found = json.loads(out)
    assert (found["ok"], found["kills"], found["recoveries"], found["versions"]) == (True, 3, 3, 5)
    assert (found["torn_responses"], found["mislabelled_responses"], found["tokens_match"]) == (0, 0, True)
    assert [kill["process"] for kill in found["killed"]] == ["replica-1", "trainer-1", "coordinator"]
    assert [kill["version"] for kill in found["killed"]] == ["2", "3", "2@4"]
    assert found["killed"][1]["back_at"] == "2@3"
    assert all(kill["round"] > 0 and kill["seconds"] > 0 for kill in found["killed"])
    assert found["responses_checked"] > 30
    run.check_nothing_is_left()


@pytest.mark.timeout(600)
def test_an_interrupt_while_a_replica_is_down_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start(*KILL)
    run.read_until("replica-1  lost")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(20) == 130
    run.check_nothing_is_left()
