"""A replica of two ranks that compute in step is updated between two of its forward passes, never in one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.rounds.in_step_ranks import fill, model
from tests.processes import ranks

from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

LAST = 12
pytestmark = pytest.mark.timeout(180)  # two ranks import torch, on two cores that others use too


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as running:
        yield running


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("replicated", marks=pytest.mark.rare)])
def test_ranks_enter_together_and_no_pass_mixes_two_versions(server: BackgroundServer, tmp_path: Path, kind: str) -> None:
    policy = model()
    arguments = ("tests.integration.rounds.in_step_ranks", tmp_path / "store", server.url, kind, LAST)
    with (
        Trainer(policy, server.url, token=server.token) as trainer,
        ranks(2, *arguments, environment={"WEIGHTSYNC_TOKEN": server.token}) as processes,
    ):
        trainer.wait_for_replicas(1, timeout=90)
        for number in range(1, LAST + 1):
            fill(policy, number)
            (replica,) = trainer.publish(number, timeout=40).replicas
            assert (replica.version, replica.delivery, replica.verified) == (number, "direct", "installed")
        for report in [json.loads(process.line()) for process in processes]:
            assert report["passes"]
            assert (report["wrong"], report["error"]) == ([], "")
        assert [process.end(30) for process in reversed(processes)] == [0, 0]


@pytest.mark.rare
def test_a_vote_that_ran_into_its_timeout_is_waited_for_by_the_next_call(tmp_path: Path) -> None:
    """Until its result is known a pause waits, because the other rank may have it, and be inside."""
    with ranks(2, "tests.integration.rounds.vote_ranks", tmp_path / "store", "vote") as (first, second):
        first.expect("late")
        second.write()
        report = json.loads(first.line())
        assert "waiting for the other ranks of this replica (2 in all) to call in_use() took more than 2 s" in report["outcome"]
        assert (report["paused"], report["users"]) == (False, 0)
        assert json.loads(second.line())["users"] == 0
        assert [first.exit_code(30), second.exit_code(30)] == [0, 0]


@pytest.mark.rare
def test_a_rank_that_gave_up_waiting_does_not_keep_the_other_from_its_pause(tmp_path: Path) -> None:
    """It had said that it was there, and the other one held its vote for it: no update could pause that rank."""
    with ranks(2, "tests.integration.rounds.vote_ranks", tmp_path / "store", "meet") as (first, second):
        first.expect("gave up")
        assert second.ask() == "paused"
        first.write()
        assert [first.exit_code(30), second.exit_code(30)] == [0, 0]


def test_ranks_compute_with_the_same_version_of_an_adapter(tmp_path: Path) -> None:
    """A version becomes visible on one rank before the other, and one pass computed with two versions."""
    with ranks(2, "tests.integration.rounds.vote_ranks", tmp_path / "store", "adapters") as (first, second):
        reports = [json.loads(process.line()) for process in (first, second)]
        refused = "not all ranks of this replica serve {}, or they use different adapters".format
        for report, mine in zip(reports, ("alice/math@2", "alice/math"), strict=True):
            assert report["used"] == [
                refused("alice/math"), 1, refused("alice/math@2"), 2, refused("alice/math@1"), 2, refused(mine),
                refused("alice/math" if report is reports[0] else None), None,
            ]  # fmt: skip
            assert report["users"] == 0
        assert [report["loras"] for report in reports] == [["alice/math@2"], ["alice/math@1", "alice/math@2"]]
        assert [first.exit_code(30), second.exit_code(30)] == [0, 0]
