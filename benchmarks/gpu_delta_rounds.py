"""Whole rounds that move only what changed, beside whole versions: ``python -m benchmarks.gpu_delta_rounds OUT [--to 1]``.

A trainer on GPU 0 and an engine on GPU ``--to``, each in a process. Every round is verified. With ``--masters`` the trainer holds
float32, so that it publishes a copy; otherwise its parameters are read in place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from weightsync_bench.gpu_job import Job
from weightsync_bench.gpu_rounds import measured_rates, run_gpu_case

SHOWN = (
    "pause_to_resume",
    "pause_to_resume_at_coordinator",
    "pause",
    "move",
    "verify",
    "commit",
    "stage",
    "place",
    "agree",
    "publish",
)


def main() -> None:
    """Run a case for each share of changed words, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--to", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.001, 0.01, 0.03])
    parser.add_argument("--transport", default="cuda_ipc")
    parser.add_argument("--masters", action="store_true")
    options = parser.parse_args()
    rates = measured_rates((0, options.to))
    cases = []
    for share in options.shares:
        job = Job(
            name=f"{share:.3f} changed", model=options.model, delivery="direct", on=(0,), to=(options.to,),
            transport=options.transport, masters=options.masters, changed=share,
        )  # fmt: skip
        case = run_gpu_case(job, rates, options.rounds, lambda text: print(text, flush=True))
        cases.append(case)
        shown = {name: case.steady[name] for name in SHOWN if name in case.steady}
        print(f"{job.name}: {case.steady['bytes'] / 1e9:.3f} GB, ms {shown}, memory {case.extra_bytes}", flush=True)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(cases), indent=1))


if __name__ == "__main__":
    main()
