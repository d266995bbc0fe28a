"""What the transfer benchmark says of a case, besides the median: how far rounds differ, and whether others had the processors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rich.console import Console

from weightsync.errors import ConfigurationError
from weightsync_bench import main, transfer
from weightsync_bench.compute import Case
from weightsync_bench.options import BenchOptions
from weightsync_bench.peer import Peer
from weightsync_bench.rank import _Floor, _processor


class Rank:
    """Answers as a rank process would, from a script."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self._answers, self._next = answers, [object()]

    def tell(self, do: str, **_: object) -> None:
        self._next = [self._answers[do].pop(0) if self._answers.get(do) else 0.1]

    def hear(self, timeout: float = 0.0) -> Any:
        return self._next[0]


def _result(paused: float) -> dict[str, Any]:
    return {"ok": True, "replicas": [{"paused_seconds": paused}]}


def test_a_round_beside_busy_neighbours_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds run and waited: before the floor, between floor and round, after it; a set-up round and one that counts.
    quiet, busy = [[0, 0], [1, 0], [2.2, 0]], [[3, 0], [4, 0], [5.2, 0.9]]
    publishes = [{"seconds": 1.0, "result": _result(0.5)}, {"seconds": 2.0, "result": _result(1.5)}]
    trainer = Rank({"publish": publishes})
    engine = Rank({"processor": [*quiet, *busy]})
    lines: list[str] = []

    def floor(trainers: Sequence[Peer], engines: Sequence[Peer], streamed: bool) -> tuple[float, float]:
        return 2.0, 1.0

    trainers: Any = [trainer]
    engines: Any = [engine]
    (one,) = transfer._rounds(trainers, engines, 1, False, floor, lines.append)
    assert (one.paused, one.floor_paused, one.floor_whole) == (1.5, 1.0, 2.0)
    assert one.ran / one.floor_ran == pytest.approx(1.2), "the program itself was no slower"
    assert one.waited == pytest.approx(0.9)
    assert "waited for a CPU 900 ms" in lines[1]


def test_the_floor_of_encryption_holds_sockets_and_both_ends() -> None:
    trainer, engine = Rank({"seal": [0.3], "send": [0.5]}), Rank({"open": [0.2], "receive": [0.6]})
    trainers: Any = [trainer]
    engines: Any = [engine]
    engine.ask = lambda **_: 1  # type: ignore[attr-defined]
    whole, paused = transfer._encrypted_floor(trainers, engines, False)
    assert whole == paused == pytest.approx(0.6 + 0.3 + 0.2)
    floor = _Floor([torch.zeros(300_000, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)])
    assert floor.seal() > 0
    assert floor.open() > 0
    assert not any(bool(tensor.any()) for tensor in floor._others), "what was sealed are zeros, and these are they"


def test_a_process_says_what_it_ran() -> None:
    ran, waited = _processor()
    sum(range(100_000))
    assert _processor()[0] > ran
    assert waited >= 0


def test_the_table_shows_it() -> None:
    case = Case(
        name="tcp/direct/300", bytes=1, seconds=0.15, floor="f", floor_seconds=0.1, ratio=1.5, ratio_lowest=1.25,
        ratio_highest=1.75, processor_ratio=1.2, waited_share=0.4,
    )  # fmt: skip
    console = Console(width=120, record=True)
    with console.capture() as captured:
        console.print(main._table([case, Case(name="cover", bytes=1, seconds=0.1, floor="f", floor_seconds=0.1, ratio=1.0)]))
    shown = captured.get()
    for part in ("1.50", "1.25-1.75", "1.20", "40%"):
        assert part in shown


def test_runs_are_repeated_and_summarized(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"tcp/direct/300": [0.3, 0.2, 0.9], "tcp-encrypted/direct/300": [0.5, 0.4, 0.6]}
    order: list[str] = []

    def measure(name: str, *_: object) -> Case:
        order.append(name)
        taken = seconds[name][(len(order) - 1) // 2]
        return Case(name, 1, taken, "f", 0.2, taken / 0.2, goal=1.3)

    monkeypatch.setattr(main, "run_transfer_case", measure)
    options = BenchOptions(suite="transfer", tensors=300, only=("tcp/direct", "tcp-encrypted"), runs=3, json=True)
    assert main.run(options) == 0
    assert order == list(seconds) * 3, "whole runs, one after the other"
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(answer["cases"]) == 6
    plain, encrypted = answer["summary"]
    assert (plain["name"], plain["runs"], plain["goal"]) == ("tcp/direct/300", 3, 1.3)
    assert (plain["seconds"], plain["ratio_lowest"]) == (0.3, pytest.approx(1.0))
    assert (plain["ratio"], plain["ratio_highest"]) == (pytest.approx(1.5), pytest.approx(4.5))
    assert encrypted["ratio"] == pytest.approx(2.5)


def test_one_run_has_no_summary_and_none_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main, "run_transfer_case", lambda name, *_: Case(name, 1, 0.3, "f", 0.2, 1.5))
    main.run(BenchOptions(suite="transfer", only=("tcp-encrypted",), json=True))
    assert "summary" not in json.loads(capsys.readouterr().out.splitlines()[-1])
    with pytest.raises(ConfigurationError, match="runs must be at least 1"):
        BenchOptions(runs=0)
    with pytest.raises(ConfigurationError, match="1 for suite gpu"):
        BenchOptions(suite="gpu", runs=2)
