"""What people see at 80 columns: one line a replica and a round, errors below, ages and times."""

from __future__ import annotations

import io
import re
import time

import msgspec
import pytest
from rich.console import Console, RenderableType

from weightsync.cli.tables import age, doctor_table, event_line, round_view, rounds_view, status_view
from weightsync.coordinator.events import Audited, RoundEnded
from weightsync.coordinator.status import AdapterStatus, Alert, RankStatus, ReplicaStatus, Status
from weightsync.model import SlowestSpan, Version
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.server.findings import Finding
from weightsync.server.history import RoundRecord

NOW = time.mktime((2030, 5, 6, 14, 0, 0, 0, 0, -1))
ERROR = "ManifestMismatch: replica mine-1: 21 tensors differ in dtype: float32 at the trainer, bfloat16 here: " + "words " * 40


def shown(view: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(view)
    text = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    assert all(len(line) <= width for line in text.splitlines())
    return text


def replica(name: str, state: str, version: int | None, error: str | None = None, missing: tuple[int, ...] = ()) -> ReplicaStatus:
    return ReplicaStatus(
        name=name, state=state, routable=state == "loaded", version=version, digest=None, staleness=version and 1, since=NOW - 200,
        world_size=2, missing=missing,
        ranks=tuple(RankStatus(f"{name}/{rank}", rank, "host", 7) for rank in range(2 - len(missing))),
        adapter="transformers", error=error, phases={},
    )  # fmt: skip


def result(number: int, error: str | None = None, ended: float = NOW - 60) -> RoundResult:
    part = ReplicaResult(
        name="mine-0", state="dirty" if error else "loaded", version=number, digest="0" * 16, nbytes=1 << 34, delivery="direct",
        transports=("shared_memory", "tcp"), verified="" if error else "installed",
        phases=dict.fromkeys(("agree", "wait", "pause", "move", "verify", "commit"), 12.3456), paused_seconds=12.5, error=error,
    )  # fmt: skip
    version = Version(run="run", number=number, manifest="0" * 32, digest="0" * 16)
    return RoundResult(number, version, error is None, 1 << 34, 12.5, {}, (part,), error, ended)


def status(*replicas: ReplicaStatus, rounds: tuple[RoundResult, ...] = ()) -> Status:
    return Status(
        run="run", last=123456, version=None, busy=True, trainer_world_size=2, trainer=(), replicas=replicas, rounds=rounds, now=NOW
    )


def test_a_replica_with_a_long_error_takes_one_line_and_the_error_follows_the_table_once() -> None:
    text = shown(status_view(status(replica("mine-0", "loaded", 123455), replica("mine-1", "registered", None, ERROR))))
    lines = text.splitlines()
    (row,) = [line for line in lines if line.startswith("mine-1 ")]
    assert re.fullmatch(r"mine-1 +registered +- +- +3 min +- +- +2/2 +host: 7, 7 *", row)
    assert re.search(r"^mine-0 +serving +123455 +1 +3 min +- +- +2/2", text, re.MULTILINE)
    assert text.count("21 tensors differ in dtype") == 1
    (where,) = [number for number, line in enumerate(lines) if line.startswith("  mine-1: ManifestMismatch: ")]
    assert where > lines.index(row)


def test_adapters_follow_the_replicas_by_name_with_their_versions() -> None:
    def served(name: str, version: int, *replicas: str) -> AdapterStatus:
        return AdapterStatus(name, version, "0" * 16, 8, "run@8", replicas)

    crowd = tuple(f"mine-{number}" for number in range(6))
    adapters = (served("alice/math", 2, *crowd), served("alice/math", 3, "mine-0", "mine-1"), served("bob/[red]code", 0, "mine-0"))
    full = msgspec.structs.replace(status(replica("mine-0", "loaded", 8), rounds=(result(8),)), adapters=adapters)
    text = shown(status_view(full))
    assert re.search(r"^adapter +newest version +earlier versions *$", text, re.MULTILINE)
    assert re.search(r"^alice/math +3 at mine-0, mine-1 +2 at 6 replicas *$", text, re.MULTILINE)
    assert re.search(r"^bob/\[red\]code +0 at mine-0 +- *$", text, re.MULTILINE)
    assert text.index("\nreplicas ") < text.index("\nadapters ") < text.index("last rounds")
    assert "adapters" not in shown(status_view(status(replica("mine-0", "loaded", 8))))

    many = tuple(served(f"many/{number:03}", 0, "mine-0") for number in range(123))
    text = shown(status_view(msgspec.structs.replace(full, adapters=many)))
    assert re.search(r"^many/019 .*\nand 103 more, which status --json lists *$", text, re.MULTILINE)


def test_alerts_come_before_the_replicas_with_their_fix_and_are_not_repeated_below_the_table() -> None:
    gone = (RankStatus("mine-1/0", 0, "gpu-7", 14912, NOW - 200), RankStatus("mine-1/1", 1, "gpu-7", 14913, NOW - 200))
    lost = msgspec.structs.replace(replica("mine-1", "lost", None, "PeerLost: mine-1/0", missing=(0, 1)), gone=gone)
    serving = msgspec.structs.replace(
        replica("mine-0", "loaded", 8), service="serving", staleness=0, verified="installed", paused_seconds=0.018
    )
    alert = Alert("error", "mine-1", "lost", "mine-1/0 disappeared.", "Restart it.", NOW - 200)
    text = shown(status_view(msgspec.structs.replace(status(serving, lost, rounds=(result(8),)), last=8, alerts=(alert,))))
    assert " ".join(text.split("\nerror: ")[0].split()) == (
        "14:00:00 run run: last published: version 8, served by 1 of 2 replicas; last update 1 min ago; trainer ranks: 0 of 2; "
        "a round is running"
    )
    assert "\nerror: mine-1/0 disappeared. (3 min ago)" in text
    assert text.index("  fix: Restart it.") < re.search(r"^replicas *$", text, re.MULTILINE).start()  # type: ignore[union-attr]
    assert re.search(r"^mine-0 +serving +8 +0 +3 min +installed +18 ms +2/2 +host: 7, 7 *$", text, re.MULTILINE)
    assert re.search(r"^mine-1 +lost +- +- +3 min +- +- +0/2 +gpu-7: *", text, re.MULTILINE)
    assert "not connected" not in text
    assert "PeerLost" not in text


def test_a_replica_that_is_incomplete_says_which_ranks_are_missing_below_the_table() -> None:
    text = shown(status_view(status(replica("mine-0", "registered", None, missing=(1,)))))
    assert re.search(r"^mine-0 +registered .* 1/2 ", text, re.MULTILINE)
    assert "  mine-0: rank 1 is not connected" in text


def test_a_replica_that_left_after_an_update_says_what_it_received() -> None:
    left = replica("mine-0", "left", None, missing=(0, 1))
    text = shown(status_view(status(left, rounds=(result(7), result(8)))))
    assert "left after it received version 8" in text
    assert "not connected" not in text
    assert "left before it received a version" in shown(status_view(status(left)))


def test_rounds_say_when_they_ended_and_a_failure_follows_the_table() -> None:
    error = "1 of 2 replicas got the version, but 2 must: mine-1: " + "words " * 30
    text = shown(status_view(status(rounds=(result(7, ended=NOW - 200_000), result(8), result(9, error)))))
    assert re.search(r"^05-04 06:26 +7 +7 .* ok *$", text, re.MULTILINE)
    assert re.search(r"^ *13:59:00 +8 +8 +17.2 GB +12.500 +1.37 +12500 ms +ok *$", text, re.MULTILINE)
    assert re.search(r"^ *13:59:00 +9 +9 .* failed *$", text, re.MULTILINE)
    assert text.count("1 of 2 replicas got the version") == 1
    assert text.startswith("14:00:00  run run:")


@pytest.mark.parametrize("error", [None, ERROR])
def test_a_round_takes_one_line_a_replica(error: str | None) -> None:
    text = shown(round_view(result(7, error)))
    assert re.search(r"^mine-0 +(serving|failed) +17.2 GB +(12345.6 *){6}$", text, re.MULTILINE)
    assert ("  mine-0: direct by shared_memory, tcp, verified as installed" in text) == (error is None)
    assert text.count("21 tensors differ in dtype") == (error is not None)


def record(number: int, rank: str = "policy-0/0", **changes: object) -> RoundRecord:
    """The round of a large model in a long run; every cell is wide."""
    whole = RoundRecord(
        run="run", round=number, kind="publish", number=123456, epoch=1, started=NOW - 72.5, ended=NOW - 60, seconds=112.5,
        queued=0.0, ok=True, replicas=16, updated=16, nbytes=61 << 30, gigabytes_per_second=0.58, pause_seconds=12.5,
        place_seconds=0.1, transports={"shared_memory": 60 << 30, "tcp": 1 << 30}, slowest=SlowestSpan(rank, "verify", 12.345),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def test_the_history_takes_one_whole_line_a_round_at_80_columns_and_names_what_it_hides() -> None:
    failed = record(10, ok=False, kind="seed", updated=1, error=ERROR, slowest=None, transports={})
    text = shown(rounds_view([record(8), record(9), failed]))
    assert re.search(r"^13:59:00 +9 +112.500 +12500 ms +ok +verify 12345 ms +policy-0/0 *$", text, re.MULTILINE)
    assert re.search(r"^13:59:00 +10 +112.500 +12500 ms +failed \(late\) *$", text, re.MULTILINE)
    assert "\nhidden at this width: version, bytes, GB/s, replicas, by transport\n" in text
    assert text.count("21 tensors differ in dtype") == 1
    table = text.partition("hidden at")[0]
    assert "0.4 ms" in shown(rounds_view([record(9, slowest=SlowestSpan("coordinator", "plan", 0.0004))]))
    assert len(table.splitlines()) == 7, "a blank line, the title, the headings and their rule, and a line a round"
    assert "\u2026" not in table


def test_a_wide_terminal_shows_every_column_of_the_history() -> None:
    text = shown(rounds_view([record(9)]), 160)
    assert re.search(
        r" 65.5 GB +112.500 +0.58 +12500 ms +16/16 +ok .* policy-0/0 +shared_memory 64.4 GB, tcp 1.1 GB *$", text, re.MULTILINE
    )
    assert "hidden" not in text


def test_the_history_says_of_which_run_a_round_is_if_it_lists_several() -> None:
    text = shown(rounds_view([record(9), record(1, run="run-of-another")]), 160)
    assert re.search(r"^13:59:00 +run +9 ", text, re.MULTILINE)
    assert re.search(r"^13:59:00 +run-of-another +1 ", text, re.MULTILINE)
    assert "run-of-another" not in shown(rounds_view([record(1, run="run-of-another")]), 160)


@pytest.mark.parametrize(
    ("width", "cells"), [(60, "9 +112.500"), (80, "13:59:00 +9 +112.500 +12500 ms"), (100, "13:59:00 .* 16/16")]
)
def test_a_long_name_of_a_rank_is_shortened_before_other_columns_are_hidden(width: int, cells: str) -> None:
    text = shown(rounds_view([record(9, "policy-" + "x" * 200)]), width)
    assert re.search(rf"^ *{cells} +ok +verify 12345 ms +policy-x+\u2026 *$", text, re.MULTILINE)


def test_text_from_agents_is_no_markup() -> None:
    assert "[red]x[/red]" in shown(status_view(status(replica("[red]x[/red]", "loaded", 1))))


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (0.4, "0 s"), (59, "59 s"), (200, "3 min"), (7200, "2 h"), (5 * 86400, "5 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_a_version_of_a_later_epoch_says_so() -> None:
    later = msgspec.structs.replace(result(7), version=Version(run="run", number=7, manifest="", digest="", epoch=2))
    serving = msgspec.structs.replace(replica("mine-0", "loaded", 7), epoch=2)
    text = shown(status_view(msgspec.structs.replace(status(serving, rounds=(later,)), epoch=2)))
    assert "last published: version 2@123456" in text
    assert re.search(r"^mine-0 +serving +2@7 ", text, re.MULTILINE)
    assert re.search(r" 7 +2@7 .* ok *$", text, re.MULTILINE)


def test_what_the_replicas_say_is_not_said_again_by_the_rounds() -> None:
    failed = msgspec.structs.replace(result(9, ERROR), error=f"0 of 1 replicas got the version, but 1 must: mine-0: {ERROR}")
    text = shown(status_view(status(replica("mine-0", "dirty", None, ERROR), rounds=(failed, failed))))
    assert text.count("21 tensors differ in dtype") == 1
    assert "  round 9, 9: 0 of 1 replicas got the version, but 1 must: mine-0 " in text


def test_an_event_is_one_line_whatever_it_holds() -> None:
    line = event_line(RoundEnded(9, result(9, "a\n  b"), "a\n  b"))
    assert line == "round 9: failed, 17.2 GB in 12.500 s (1.37 GB/s): a b"
    assert event_line(RoundEnded(9, result(9))) == "round 9: ok, 17.2 GB in 12.500 s (1.37 GB/s)"
    assert event_line(Audited("r0", 0.02)) == "r0: its weights were read again in 0.020 s"
    assert event_line(Audited("r0", 0.02, "changed:\n a")) == "r0: its weights were read again in 0.020 s: changed: a"


def test_a_findings_impact_begins_below_its_value() -> None:
    findings = [Finding("gpus", "missing", "none [red]", "weights stay in CPU memory"), Finding("python", "ok", "3.11")]
    lines = shown(doctor_table(findings)).splitlines()
    (value,) = [line for line in lines if "none [red]" in line]
    impact = lines[lines.index(value) + 1]
    assert impact.index("weights") == value.index("none")
    assert lines[0].strip() == "ready; not here, or limited: gpus"
    broken = shown(doctor_table([*findings, Finding("numba", "missing", "not installed", "cannot be compiled")]))
    assert broken.splitlines()[0].strip() == "not ready: numba; not here, or limited: gpus"
