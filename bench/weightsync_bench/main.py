"""``weightsync bench``: measures each case and its floor in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightsync.cli.tables import plain_text, titled_table
from weightsync.errors import ConfigurationError
from weightsync_bench.compute import COMPUTE_CASES, Case, run_compute_case
from weightsync_bench.options import BenchOptions
from weightsync_bench.report import machine, print_json
from weightsync_bench.transfer import TRANSFER_CASES, run_transfer_case


class CaseSummary(msgspec.Struct, frozen=True):
    """Several runs of one case. All times are in seconds."""

    name: str
    runs: int
    seconds: float
    """Median of the runs."""
    floor_seconds: float
    """Median of the runs."""
    ratio: float
    """Median of the runs' ratios, each of which is to the floor of its own run."""
    ratio_lowest: float
    ratio_highest: float
    goal: float | None = None


def select(options: BenchOptions) -> list[str]:
    """Return the names of the cases to run, in order.

    Raises:
        ConfigurationError: The suite is unknown, or no case matches the options.
    """
    names = {"cpu": (*COMPUTE_CASES, *TRANSFER_CASES), "plan": COMPUTE_CASES, "transfer": TRANSFER_CASES}
    if options.suite not in names:
        raise ConfigurationError(f"unknown suite {options.suite!r}; choose from {', '.join(names)}, gpu")
    chosen = [name for name in names[options.suite] if not options.only or any(part in name for part in options.only)]
    if options.tensors:
        chosen = [name for name in chosen if name in COMPUTE_CASES or int(name.rsplit("/", 1)[1]) == options.tensors]
    if not chosen:
        raise ConfigurationError(f"no case matches; the cases are {', '.join(names[options.suite])}")
    return chosen


def _table(cases: Sequence[Case]) -> Table:
    headings = ("case", *(f">{name}" for name in ("ms", "floor", "ratio", "rounds", "goal", "cpu", "waited", "publish ms")))
    table = titled_table("pause to resume, and the floor of the same run", headings, map(_row, cases))
    table.caption = (
        "ratio: ms / floor. rounds: lowest and highest ratio of a round. cpu: ratio of the engine ranks' CPU times. "
        "waited: share of ms spent waiting for a CPU."
    )
    return table


def _row(case: Case) -> list[Text]:
    cells = (
        case.name, f"{case.seconds * 1000:.0f}", f"{case.floor_seconds * 1000:.0f}", f"{case.ratio:.2f}",
        "" if case.ratio_lowest is None else f"{case.ratio_lowest:.2f}-{case.ratio_highest:.2f}",
        "" if case.goal is None else f"{case.goal:.2f}",
        "" if case.processor_ratio is None else f"{case.processor_ratio:.2f}",
        "" if case.waited_share is None else f"{case.waited_share:.0%}",
        "" if case.publish_seconds is None else f"{case.publish_seconds * 1000:.0f} ({case.publish_ratio:.2f})",
    )  # fmt: skip
    return [plain_text(cell, "" if case.goal is None or case.ratio <= case.goal else "yellow") for cell in cells]


def summarize(cases: Sequence[Case]) -> list[CaseSummary]:
    """Return one summary for each name in ``cases``, in the order of their first run."""
    runs: dict[str, list[Case]] = {}
    for case in cases:
        runs.setdefault(case.name, []).append(case)
    return [
        CaseSummary(
            name=name,
            runs=len(same),
            seconds=statistics.median(case.seconds for case in same),
            floor_seconds=statistics.median(case.floor_seconds for case in same),
            ratio=statistics.median(case.ratio for case in same),
            ratio_lowest=min(case.ratio for case in same),
            ratio_highest=max(case.ratio for case in same),
            goal=same[0].goal,
        )
        for name, same in runs.items()
    ]


def _summary_table(summaries: Sequence[CaseSummary]) -> Table:
    rows = [
        (
            summary.name, f"{summary.seconds * 1000:.0f}", f"{summary.floor_seconds * 1000:.0f}", f"{summary.ratio:.2f}",
            f"{summary.ratio_lowest:.2f}-{summary.ratio_highest:.2f}", "" if summary.goal is None else f"{summary.goal:.2f}",
        )
        for summary in summaries
    ]  # fmt: skip
    styles = ["" if summary.goal is None or summary.ratio <= summary.goal else "yellow" for summary in summaries]
    table = titled_table(
        f"median of {summaries[0].runs} runs", ("case", ">ms", ">floor", ">ratio", ">runs", ">goal"),
        ([plain_text(cell, style) for cell in row] for row, style in zip(rows, styles, strict=True)),
    )  # fmt: skip
    table.caption = "runs: lowest and highest ratio of a run."
    return table


def run(options: BenchOptions) -> int:
    """Run the selected cases. Tables and progress go to standard error. With ``options.json``, JSON is the last line of output.

    With ``options.runs`` above one, all cases are run that often, one run after the other, and summarized.

    Returns:
        Exit status 0.

    Raises:
        ConfigurationError: The options select no case.
        RoundFailed: A round failed or was not verified.
    """
    if options.suite == "gpu":
        from weightsync_bench.gpu_suite import run_gpu_suite

        return run_gpu_suite(options)
    console = Console(stderr=True)
    cases: list[Case] = []
    with console.status("starting") as status:
        for name in select(options) * options.runs:

            def note(text: str) -> None:
                status.update(text)
                console.print(text, style="dim", highlight=False)

            if name in COMPUTE_CASES:
                note(f"{name}: measuring")
                cases.append(run_compute_case(name, options.size))
            else:
                cases.append(run_transfer_case(name, options.size, options.rounds, note))
    console.print(_table(cases))
    summaries = summarize(cases) if options.runs > 1 else []
    if summaries:
        console.print(_summary_table(summaries))
    if options.json:
        print_json(cases, machine() | ({"summary": msgspec.to_builtins(summaries)} if summaries else {}))
    return 0
