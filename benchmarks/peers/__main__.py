"""Measure weightsync and other systems on the same tensors, one after the other, between two processes on GPUs of this host.

``python -m benchmarks.peers --out peers.json``: from GPU 0 to GPU 1, or with ``--gpus 1`` within a GPU that both share. Each way
has separate processes and a deadline; one that hangs or fails is ended and becomes a row that says so, and the next one runs. Times
count until the tensors are in the receiver's memory, and they are compared after every round. The file has the form of
``docs/data/peers.json``, and is complete after each row.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import weightsync
from benchmarks.peers.movers import RankJob
from benchmarks.peers.ways import WAYS, Paths, Way
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, WeightSyncError
from weightsync_bench.peer import Peer, together
from weightsync_bench.report import gpu_machine, machine
from weightsync_bench.shapes import read_configuration, tensors_of

__all__ = ["main"]

_LEAST_SECONDS = 15.0  # a way that would have less is left out
_AHEAD = 0.05


class _Run:
    """Options, and what is common to all ways."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.model: str = options.model
        self.rounds: int = options.rounds
        self.device: str = options.device
        self.gpus: int = options.gpus
        self.paths = Paths(vllm=options.vllm, nemo_rl=options.nemo_rl, nccl=options.nccl)
        self.specs = tensors_of(read_configuration(self.model))
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        self.console = console
        self._folder = folder
        self._cases = 0

    def row(self, way: Way, deadline: Deadline) -> dict[str, Any]:
        """Measure one way; whatever goes wrong is in the row."""
        row: dict[str, Any] = {"way": way.label, "detail": way.detail, "of": way.of}
        try:
            if way.mover:
                row |= self._moved(way, deadline)
            elif self.device != "cuda":
                row["absent"] = "needs CUDA devices"
            else:
                row |= self._ours(way, deadline)
        except (WeightSyncError, RuntimeError, OSError, ValueError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        if "move" not in row:
            row["detail"] += "; failed" if "error" in row else "; not measured"
        return row

    def _moved(self, way: Way, deadline: Deadline) -> dict[str, Any]:
        """Run the processes of each variant of a way."""
        measured: list[dict[str, Any]] = []
        details = []
        for settings in way.variants:
            answer = self._variant(way, settings, Deadline(min(way.seconds, deadline.remaining(way.name))))
            if "absent" in answer:
                return answer
            details.append(answer.pop("detail"))
            measured.append({"settings": settings} | answer)
        rounds = [ms for variant in measured for ms in variant["rounds_ms"]]
        return {
            "detail": ", ".join(dict.fromkeys(filter(None, (*details, way.detail)))),
            "move": _range(rounds),
            "variants": measured,
        }

    def _variant(self, way: Way, settings: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        self._cases += 1
        what, port = f"{way.name} {settings or ''}".strip(), _free_port()
        preload = {"LD_PRELOAD": self.paths.nccl} if self.paths.nccl and way.mover == "m2n" else {}
        with ExitStack() as owned:
            peers = []
            for rank in range(2):
                gpu = min(rank, self.gpus - 1)
                job = RankJob(
                    model=self.model, rank=rank, device=self.device, rendezvous=str(self._folder / f"store{self._cases}"),
                    port=port, mover=way.mover, gpu=gpu, settings=settings, paths=self.paths, seconds=deadline.remaining(what),
                )  # fmt: skip
                config = {"role": "rank", "rank": rank, "job": msgspec.to_builtins(job)}
                environment = {"PYTHONWARNINGS": "ignore", **preload}
                peers.append(owned.enter_context(Peer("benchmarks.peers.rank", config, environment)))
            for peer in peers:
                peer.hear(deadline.remaining(what))
            opened = together(peers, deadline.remaining(what), do="open")
            for answer in opened:
                if "absent" in answer:
                    return {"absent": f"not installed: {answer['absent']}"}
            rounds = []
            for seed in range(self.rounds + 1):  # the first one warms up
                together(peers, deadline.remaining(what), do="fill", seed=seed)
                at = time.monotonic() + _AHEAD
                rounds.append(1000 * max(together(peers, deadline.remaining(what), do="move", at=at)))
                together(peers, deadline.remaining(what), do="check", seed=seed)
                self.console.print(f"{what}: round {seed}: {rounds[-1]:.1f} ms", style="dim", highlight=False, markup=False)
        return {
            "detail": opened[0]["detail"],
            "rounds_ms": [round(ms, 2) for ms in rounds[1:]],
            "first_ms": round(rounds[0], 2),
            "open_seconds": round(max(answer["seconds"] for answer in opened), 1),
        }

    def _ours(self, way: Way, deadline: Deadline) -> dict[str, Any]:
        """Run what :mod:`weightsync_bench` measures, in a process that a deadline can end."""
        deadline = Deadline(min(way.seconds, deadline.remaining(way.name)))
        with Peer("benchmarks.peers.rank", {"role": "ours", "rank": 0}) as peer:
            peer.hear(deadline.remaining(way.name))
            if way.name == "limit":
                rate = peer.ask(deadline.remaining(way.name), do="limit", gpus=self.gpus)
                return {"move": _range([1000 * self.nbytes / rate]), "bytes_per_second": rate}
            case = {"model": self.model, "way": way.name, "rounds": self.rounds, "gpus": self.gpus}
            rounds = peer.ask(deadline.remaining(way.name), do="case", **case)[1:]
        return {
            "detail": f"this repository, {weightsync.__version__}",
            "move": _range([one["move_without_digest"] for one in rounds]),
            "pause_to_resume": _range([one["pause_to_resume"] for one in rounds]),
            "variants": [{"rounds": rounds}],
        }


def _range(rounds: Sequence[float]) -> list[float]:
    """Return the least and the greatest time, as the picture shows them."""
    return [round(ms) if ms >= 10 else round(ms, 2) for ms in (min(rounds), max(rounds))]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _environment(device: str) -> dict[str, Any]:
    facts = gpu_machine() if device == "cuda" else machine()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else ""  # type: ignore[no-untyped-call]
    return facts | {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": nccl,
        "weightsync": weightsync.__version__,
    }


def _report(run: _Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    facts = _environment(run.device)
    if run.device != "cuda":
        place = "one process to another, without GPUs"
    elif run.gpus == 1:
        place = f"one process to another on one {facts['device']}"
    else:
        place = f"one {facts['device']} to another of the same host"
    size = f"{run.nbytes / 1e9:.0f} GB" if run.nbytes >= 1e9 else f"{run.nbytes:,} bytes"
    return {
        "what": f"{size} in {len(run.specs):,} tensors ({run.model}, bfloat16) from {place}",
        "unit": "milliseconds",
        "date": str(facts["date"])[:10],
        "conditions": (
            f"All in one run on the same machine, one after the other, {run.rounds} rounds each after a first one; ranges are over "
            "rounds. Of other ways only the move was timed, into the tensors of the receiving process, and compared there"
        ),
        "environment": facts,
        "rows": rows,
    }


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=report["what"])
    for heading in ("way", "move, ms", "pause to resume, ms", "median", "detail"):
        table.add_column(heading, justify="left" if heading in ("way", "detail") else "right")
    for row in report["rows"]:
        problem = row.get("absent") or row.get("error")
        ranges = [" to ".join(f"{ms:,}" for ms in dict.fromkeys(row.get(column, ()))) for column in ("move", "pause_to_resume")]
        rounds = [ms for variant in row.get("variants", ()) for ms in variant.get("rounds_ms", ())]
        median = f"{statistics.median(rounds):,.1f}" if rounds else ""
        table.add_row(row["way"], *ranges, median, Text(problem or row["detail"]))
    return table


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table to standard error, and write the file. Status 1 if a way failed, other than by being absent.

    Raises :class:`~weightsync.errors.ConfigurationError` for an unknown way or model, or too few GPUs.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, in the form of docs/data/peers.json")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a built-in model such as qwen3-8b, or a config.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="for everything; what has no time left says so")
    parser.add_argument("--only", default="", help=f"some of {','.join(way.name for way in WAYS)}")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="1: both processes share a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, to try the driver")
    parser.add_argument("--vllm", default="", help="folder with vLLM's packed_tensor.py, if it is not installed")
    parser.add_argument("--nemo-rl", default="", help="folder with NeMo-RL's packed_tensor.py, if it is not installed")
    parser.add_argument("--nccl", default="", help="a libnccl.so.2 of 2.30.5 or newer, for M2N")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    if unknown := set(names) - {way.name for way in WAYS}:
        raise ConfigurationError(f"unknown ways: {', '.join(sorted(unknown))}")
    if options.rounds < 1:
        raise ConfigurationError("a benchmark needs at least one round")
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        raise ConfigurationError(f"GPUs needed: {options.gpus}; here: {torch.cuda.device_count()}. --device cpu tries the driver")
    console = Console(stderr=True, width=170)
    deadline = Deadline(options.seconds)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(options, Path(folder), console)
        for way in WAYS:
            if (names and way.name not in names) or options.gpus not in way.gpus:
                continue
            try:
                enough = deadline.remaining(way.name) >= _LEAST_SECONDS
            except DeadlineExceeded:
                enough = False
            left_out = {"way": way.label, "detail": way.detail, "of": way.of, "absent": "left out: no time"}
            started = time.monotonic()
            rows.append(run.row(way, deadline) if enough else left_out)
            rows[-1]["seconds"] = round(time.monotonic() - started, 1)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(_report(run, rows), indent=1) + "\n")
            state = rows[-1].get("absent") or rows[-1].get("error") or rows[-1]["move"]
            console.print(f"{way.label}: {state} ({rows[-1]['seconds']} s)", highlight=False, markup=False)
        console.print(_table(_report(run, rows)))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
