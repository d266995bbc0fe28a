"""Suite ``gpu``: one model and one pair of shardings, with direct and streamed delivery."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from weightsync.cli.tables import titled_table
from weightsync.errors import ConfigurationError
from weightsync_bench.gpu_job import Delivery, Job, place
from weightsync_bench.gpu_rounds import GpuCase, measured_rates, run_gpu_case
from weightsync_bench.options import BenchOptions
from weightsync_bench.report import gpu_machine, print_json

_SHOWN = ("agree", "place", "pause", "receive", "load", "digest", "move_without_digest", "verify", "commit", "pause_to_resume")


def jobs_of(options: BenchOptions, gpus: int) -> list[Job]:
    """Return the cases that ``options`` select.

    Raises:
        ConfigurationError: An option is invalid, or ``gpus`` GPUs are too few.
    """
    on, to = place(options.source, options.target, options.placement, gpus)
    name = Path(options.model).stem if options.model.endswith(".json") else options.model
    wanted: list[Delivery] = [delivery for delivery in get_args(Delivery) if options.delivery in ("", delivery)]
    return [
        Job(
            name=f"{name}/{options.source}/{options.target}/{options.placement}/{options.transport}/{delivery}",
            model=options.model,
            delivery=delivery, on=on, to=to, transport=options.transport, bucket_bytes=options.bucket_bytes,
            buffers=options.buffers,
            masters=options.masters,
        )
        for delivery in wanted
    ]  # fmt: skip


def _table(case: GpuCase) -> Table:
    moved = case.steady["move_without_digest"]
    title = f"{case.name}: floor {case.floor_ms:.1f} ms, moved in {moved:.1f} ms ({moved / case.floor_ms:.2f} x)"
    rows = ((name, f"{case.first[name]:.1f}", f"{case.steady[name]:.1f}") for name in _SHOWN if name in case.steady)
    return titled_table(title, ("ms", ">first round", ">steady"), rows)


def run_gpu_suite(options: BenchOptions) -> int:
    """Run the cases. Tables and progress go to standard error. With ``options.json``, JSON is the last line of output.

    Returns:
        Exit status 0.

    Raises:
        ConfigurationError: There is no GPU, or the options are invalid.
        RoundFailed: A round failed or was not verified.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError("suite gpu needs a CUDA device, but torch finds none")
    jobs = jobs_of(options, torch.cuda.device_count())
    console = Console(stderr=True, width=160)
    rates = measured_rates(sorted({*jobs[0].on, *jobs[0].to}))
    cases: list[GpuCase] = []
    for job in jobs:
        cases.append(run_gpu_case(job, rates, options.rounds, lambda text: console.print(text, style="dim", highlight=False)))
        console.print(_table(cases[-1]))
    if options.json:
        print_json(cases, gpu_machine())
    return 0
