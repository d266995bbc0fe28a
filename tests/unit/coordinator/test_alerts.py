"""Problems of a run: one alert for each, with the place and the fix."""

from __future__ import annotations

from typing import Any

from weightsync.coordinator.alerts import alerts_of
from weightsync.coordinator.round_trace import PastRounds
from weightsync.coordinator.status import RankStatus, ReplicaStatus
from weightsync.model import ReplicaResult, RoundResult, Version

GONE = RankStatus("mine-0/0", 0, "node-7", 14912, 5.0)


def replica(state: str, error: str | None = None, **fields: Any) -> ReplicaStatus:
    known: dict[str, Any] = {
        "name": "mine-0", "state": state, "routable": False, "version": None, "digest": None, "staleness": None, "since": 5.0,
        "world_size": 1, "missing": (), "ranks": (), "adapter": "module", "error": error, "phases": {},
    }  # fmt: skip
    return ReplicaStatus(**(known | fields))


def result(**pauses: float) -> RoundResult:
    rows = tuple(
        ReplicaResult(name, "loaded", 1, "d", 8, "direct", ("tcp",), "installed", {"commit": pause}, pause, None)
        for name, pause in pauses.items()
    )
    return RoundResult(3, Version("run", 1, "m", "d"), True, 8, 1.0, {}, rows, None)


def past(*results: RoundResult) -> PastRounds:
    rounds = PastRounds(8, 8)
    for each in results:
        rounds.keep(each)
    return rounds


def test_a_lost_replica_and_a_lost_trainer_are_named_with_their_place() -> None:
    trainer = RankStatus("trainer/0", 0, "node-3", 16914, 4.0)
    first, second = alerts_of([replica("lost", gone=(GONE,))], [trainer], PastRounds(1, 1))
    assert (first.subject, first.kind, first.level, first.since) == ("trainer", "lost", "error", 4.0)
    assert "Last seen: process 16914 on node-3." in first.text
    assert "Last seen: process 14912 on node-7." in second.text
    assert second.fix.startswith("Restart it.")


def test_a_refusal_has_one_fix_its_own_or_that_of_its_class() -> None:
    error = "ManifestMismatch: replica mine-0 differs\nto publish what the engine holds, use Trainer(..., dtype=torch.float16)"
    (own,) = alerts_of([replica("refused", error, gone=(GONE,))], [], PastRounds(1, 1))
    assert own.fix == "To publish what the engine holds, use Trainer(..., dtype=torch.float16)"
    assert own.text == "mine-0 was refused. Last seen: process 14912 on node-7. replica mine-0 differs"
    error = "ManifestMismatch: it takes a stream\nto receive these, make it with Receiver(manifest=...), and restart it"
    (receiver,) = alerts_of([replica("refused", error)], [], PastRounds(1, 1))
    assert receiver.fix == "To receive these, make it with Receiver(manifest=...), and restart it"
    (general,) = alerts_of([replica("refused", "ManifestMismatch: missing: w")], [], PastRounds(1, 1))
    assert (general.error, general.fix.startswith("Correct the engine's model")) == ("ManifestMismatch", True)


def test_a_replica_out_of_service_says_what_failed_and_what_to_do() -> None:
    (known,) = alerts_of([replica("dirty", "move: LoadError: shape")], [], PastRounds(1, 1))
    assert (known.kind, known.error, known.fix) == ("out_of_service", "LoadError", "The engine's log has the traceback.")
    (unknown,) = alerts_of([replica("dirty", "its ranks report different versions")], [], PastRounds(1, 1))
    assert "weightsync update" in unknown.fix


def test_a_slow_replica_is_a_warning_after_the_errors_and_a_healthy_run_has_no_alert() -> None:
    lost, slow = alerts_of([replica("lost")], [], past(result(a=0.1, b=3.0, c=0.1)))
    assert (lost.level, slow.level, slow.subject, slow.round) == ("error", "warning", "b", 3)
    assert "paused for 3.00 s (others: 0.10 s), 3.00 s of it in commit" in slow.text
    assert not alerts_of([replica("loaded"), replica("left")], [], past(result(a=0.1, b=0.2)))
    assert not alerts_of([], [], past(result(a=3.0)))


def test_a_round_that_failed_without_a_result_is_an_alert_until_the_next_result() -> None:
    rounds = past(result(a=0.1))
    rounds.failure = (4, "DeadlineExceeded: place took too long", 7.0)
    (failed,) = alerts_of([], [], rounds)
    assert (failed.subject, failed.kind, failed.round, failed.error) == ("update", "failed", 4, "DeadlineExceeded")
    rounds.keep(result(a=0.1))
    assert not alerts_of([], [], rounds)
