"""Two checkouts compared: ``python -m benchmarks.pairs OLD NEW --pairs 10 -- --suite transfer --only direct``.

Runs ``weightsync bench`` of both in turns, in the same environment: old, new, then new, old, and so on, so that a slow drift of
the machine affects both alike. Everything after ``--`` is given to ``weightsync bench``; both must know the options.

For each case it prints the median of new / old and its interval, of the times, and of the ratios to the floor of the same run. An
interval goes from one order statistic to another, so it assumes nothing about the distribution. Its coverage is at least 95 %
with six pairs or more. With fewer, it goes from the lowest to the highest, the table says what it covers, and nothing is decided.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from weightsync.errors import ConfigurationError, RoundFailed

__all__ = ["Interval", "PairedCase", "compare", "main", "median_interval"]

_COVERAGE = 0.95
_NO_SLOWER = 1.03
_WIDTH = 120  # columns, so that a table in a log is whole


class Interval(msgspec.Struct, frozen=True):
    """A median and the interval that holds the true one with probability ``coverage``."""

    median: float
    low: float
    high: float
    coverage: float


class PairedCase(msgspec.Struct, frozen=True):
    """One case of all pairs: new / old."""

    name: str
    pairs: int
    old_ms: float
    """Median."""
    new_ms: float
    """Median."""
    time: Interval
    over_floor: Interval
    no_slower: bool | None
    """Whether the interval of the times includes 1.00 or lies below 1.03. ``None`` with too few pairs."""


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of ``values`` and the narrowest interval of order statistics that covers it with 95 %, if there is one."""
    ordered, count = sorted(values), len(values)
    below = 0  # values left out at each end
    # The true median lies outside if at most ``below`` of the values are on one side of it.
    outside = [2 * sum(math.comb(count, index) for index in range(left + 1)) / 2**count for left in range((count + 1) // 2)]
    while below + 1 < len(outside) and 1 - outside[below + 1] >= _COVERAGE:
        below += 1
    return Interval(statistics.median(ordered), ordered[below], ordered[-1 - below], max(1 - outside[below], 0.0))


def compare(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[PairedCase]:
    """Return a result for each case of the runs ``old[i]`` and ``new[i]``, which are by case name.

    Raises:
        ConfigurationError: The runs do not all have the same cases.
    """
    names = list(old[0])
    if any(set(run) != set(names) for run in (*old, *new)):
        raise ConfigurationError(f"the checkouts ran different cases: {', '.join(sorted(set(old[0]) ^ set(new[0])))}")
    compared = []
    for name in names:
        before, after = [run[name] for run in old], [run[name] for run in new]

        def quotients(key: str, before: list[Any] = before, after: list[Any] = after) -> Interval:
            return median_interval([mine[key] / theirs[key] for mine, theirs in zip(after, before, strict=True)])

        time = quotients("seconds")
        compared.append(
            PairedCase(
                name=name,
                pairs=len(before),
                old_ms=1e3 * statistics.median(case["seconds"] for case in before),
                new_ms=1e3 * statistics.median(case["seconds"] for case in after),
                time=time,
                over_floor=quotients("ratio"),
                no_slower=(time.low <= 1 <= time.high or time.high < _NO_SLOWER) if time.coverage >= _COVERAGE else None,
            )
        )
    return compared


def _table(cases: Sequence[PairedCase]) -> Table:
    covered = cases[0].time.coverage
    table = Table(title=f"new / old, {cases[0].pairs} pairs", caption=f"in brackets: interval of the median ({covered:.1%})")
    table.add_column("case", no_wrap=True)
    for heading in ("old ms", "new ms", "time", "over floor", "no slower"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        intervals = [f"{of.median:.3f} [{of.low:.3f}, {of.high:.3f}]" for of in (case.time, case.over_floor)]
        decided = {True: "yes", False: "NO", None: "too few pairs"}[case.no_slower]
        table.add_row(
            case.name,
            f"{case.old_ms:.0f}",
            f"{case.new_ms:.0f}",
            *intervals,
            decided,
        )
    return table


def _environment(checkout: Path) -> dict[str, str]:
    # Since the benchmarks are a separate package, a checkout has two folders on the path. An older one has only the first.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / folder) for folder in ("src", "bench"))}


def _check_checkout(checkout: Path, python: str) -> None:
    """Raise ConfigurationError unless ``python`` imports weightsync from ``checkout``."""
    code = "import weightsync; print(weightsync.__file__)"
    command = [python, "-P", "-c", code]
    result = subprocess.run(
        command, check=False, cwd=checkout, env=_environment(checkout), capture_output=True, text=True, timeout=120
    )
    if not Path(result.stdout.strip() or "/").is_relative_to(checkout / "src"):
        raise ConfigurationError(f"{python} does not import weightsync from {checkout}: {(result.stdout + result.stderr)[-500:]}")


def _bench(checkout: Path, python: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run the benchmark once and return its cases by name."""
    command = [python, "-m", "weightsync", "bench", *arguments, "--json"]
    try:
        result = subprocess.run(
            command, check=False, cwd=checkout, env=_environment(checkout), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise RoundFailed(f"{checkout}: no result within {timeout:g} s") from None
    if result.returncode or not result.stdout.strip():
        raise RoundFailed(f"{checkout}: exit status {result.returncode}: {result.stderr[-2000:]}")
    return {case["name"]: case for case in json.loads(result.stdout.splitlines()[-1])["cases"]}


def _run_pairs(
    old: Path, new: Path, python: str, arguments: Sequence[str], pairs: int, timeout: float, note: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    checkouts = {"old": old, "new": new}
    for pair in range(pairs):
        for label in ("old", "new") if pair % 2 == 0 else ("new", "old"):
            run = _bench(checkouts[label], python, arguments, timeout)
            runs[label].append(run)
            times = ", ".join(f"{name} {1e3 * case['seconds']:.0f} ms ({case['ratio']:.2f})" for name, case in run.items())
            note(f"pair {pair + 1} of {pairs}, {label}: {times}")
    return runs["old"], runs["new"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two checkouts. The table goes to standard error, JSON is the last line of output.

    Returns:
        0, or 1 if a case became slower.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, bench = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="checkout of the state before")
    parser.add_argument("new", type=Path, help="checkout of the state after")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--python", default=sys.executable, help="interpreter of both")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one run")
    options = parser.parse_args(own)
    if options.pairs < 1:
        raise ConfigurationError("at least one pair is needed")
    old, new = options.old.resolve(), options.new.resolve()
    console = Console(stderr=True)
    console.width = max(console.width, _WIDTH)
    for checkout in (old, new):
        _check_checkout(checkout, options.python)

    def note(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    cases = compare(*_run_pairs(old, new, options.python, bench, options.pairs, options.timeout, note))
    console.print(_table(cases))
    print(json.dumps({"arguments": bench, "cases": msgspec.to_builtins(cases)}))
    return int(any(case.no_slower is False for case in cases))


if __name__ == "__main__":
    sys.exit(main())
