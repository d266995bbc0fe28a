"""Joining from a local store, against reading and hashing the same objects, both from a cold page cache.

::

    python -m benchmarks.store --megabytes 1024 --deltas 5 --changed 0.01

A trainer stores a key frame and deltas, and ends. Then, in turns: one thread reads every object in chunks and takes its SHA-256
(the floor), and a new engine joins, from its constructor until it serves the verified version. Before each turn the objects are
dropped from the page cache. ``round`` is the seeding round alone. The ratio of each repetition is to the floor of that repetition;
the medians are reported, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.model.stored import CHUNK_BYTES
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

_HIDDEN = 1024
_SECONDS = 300.0


class _Layers(torch.nn.Module):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(megabytes * (1 << 20) // (2 * _HIDDEN * _HIDDEN), 1)
        weights = (torch.randn(_HIDDEN, _HIDDEN).bfloat16() for _ in range(count))
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(weight, requires_grad=False) for weight in weights)


def _change(model: torch.nn.Module, share: float) -> None:
    for weight in model.parameters():
        flat = weight.data.view(-1)
        where = torch.randint(flat.numel(), (int(share * flat.numel()),))
        flat[where] = -flat[where] - 1


def _drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_and_hash(paths: list[Path]) -> float:
    started = time.perf_counter()
    for path in paths:
        state = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                state.update(chunk)
        state.digest()
    return time.perf_counter() - started


def _join(server: BackgroundServer, name: str, megabytes: int, trained: torch.nn.Module) -> tuple[float, float]:
    served = _Layers(megabytes)
    adapter = ModuleAdapter(served)
    started = time.perf_counter()
    with Engine(adapter, name, server.url, token=server.token) as engine:
        engine.wait_for_version(0, timeout=_SECONDS)
        seconds = time.perf_counter() - started
        if not all(torch.equal(one, other) for one, other in zip(served.parameters(), trained.parameters(), strict=True)):
            raise SystemExit("the replica does not have the trainer's weights")
    result = server.coordinator.status().rounds[-1]
    return seconds, result.seconds


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--deltas", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.01, help="share of the words that each delta changes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="parent of the store; by default that of temporary files")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory)))
        stack.enter_context(patch.dict(os.environ, {"WEIGHTSYNC_STORE": str(folder)}))
        server = stack.enter_context(BackgroundServer(ServerSettings.load(port=0, require=0, run="benchmark", state_dir="off")))
        trained = _Layers(options.megabytes)
        with Trainer(trained, server.url, token=server.token, deltas=True) as trainer:
            for number in range(options.deltas + 1):
                trainer.publish(number)
                trainer.wait_until_stored(_SECONDS)
                if number < options.deltas:
                    _change(trained, options.changed)
        stored = server.coordinator.stored.newest
        if stored is None or len(stored.objects) != options.deltas + 1:
            raise SystemExit("the store does not hold one key frame and the deltas")
        paths = [folder / item.path for item in stored.objects.values()]
        _join(server, "warm-up", options.megabytes, trained)
        floors, joins, rounds = [], [], []
        for repetition in range(options.repetitions):
            _drop_from_page_cache(paths)
            floors.append(_read_and_hash(paths))
            _drop_from_page_cache(paths)
            seconds, in_round = _join(server, f"replica-{repetition}", options.megabytes, trained)
            joins.append(seconds)
            rounds.append(in_round)
        ratios = [join / floor for join, floor in zip(joins, floors, strict=True)]
        in_rounds = [one / floor for one, floor in zip(rounds, floors, strict=True)]
        print(
            json.dumps(
                {
                    "megabytes": options.megabytes,
                    "objects": len(paths),
                    "object_bytes": sum(path.stat().st_size for path in paths),
                    "floor_seconds": round(median(floors), 3),
                    "join_seconds": round(median(joins), 3),
                    "join_ratio": round(median(ratios), 3),
                    "join_ratios": [round(min(ratios), 3), round(max(ratios), 3)],
                    "round_ratio": round(median(in_rounds), 3),
                }
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
