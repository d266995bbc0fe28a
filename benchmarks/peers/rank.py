"""A process of a case: ``python -m benchmarks.peers.rank CONFIG`` executes the parent's commands.

Role ``rank`` moves tensors with a mover, ``worker`` is checkpoint-engine's serving engine, and ``ours`` runs the cases of
:mod:`weightsync_bench`. Commands' output goes to standard error, because standard output carries the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from benchmarks.peers.movers import CheckpointWorker, RankCommands, RankJob
from weightsync.errors import RoundFailed
from weightsync_bench.peer import serve

__all__ = ["main"]


class _Ours:
    """Commands that measure weightsync itself, and the link."""

    def limit(self, gpus: int) -> float:
        """Return the bytes per second of the driver's copy from a peer's memory, or within the only GPU."""
        from weightsync_bench.gpu_rounds import measured_rates

        return measured_rates([0, gpus - 1]).peer

    def case(self, model: str, way: str, rounds: int, gpus: int) -> list[dict[str, float]]:
        """Return the rounds of one trainer rank on GPU 0 and one engine rank on the last GPU."""
        from weightsync_bench.gpu_job import Job
        from weightsync_bench.gpu_rounds import measured_rates, run_gpu_case

        how: dict[str, Any] = {"delivery": "streamed"} if way == "streamed" else {"delivery": "direct", "transport": way}
        job = Job(name=f"{model}/{way}", model=model, on=(0,), to=(gpus - 1,), **how)
        return run_gpu_case(job, measured_rates([0, gpus - 1]), rounds, lambda text: print(text, file=sys.stderr)).rounds


def _quiet(command: Callable[..., object]) -> Callable[..., object]:
    def run(**arguments: Any) -> object:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                return command(**arguments)
            except Exception as error:
                if isinstance(error, (RuntimeError, OSError)):
                    raise
                raise RoundFailed(f"{type(error).__name__}: {error}") from error

    return run


def main() -> None:
    """Execute commands until standard input ends."""
    results = os.dup(1)
    os.dup2(2, 1)  # what native libraries print
    sys.stdout = os.fdopen(results, "w")
    config = json.loads(sys.argv[1])
    commands: Any
    if config["role"] == "ours":
        commands = _Ours()
    elif config["role"] == "worker":
        commands = CheckpointWorker(config["rank"], config["model"])
    else:
        job = msgspec.convert(config["job"], RankJob)
        if job.device == "cuda":
            torch.cuda.set_device(job.gpu)
        commands = RankCommands(job)
    serve(lambda name: _quiet(getattr(commands, name)))
    os._exit(0)  # without waiting for the device, of which peers may be gone


if __name__ == "__main__":
    main()
