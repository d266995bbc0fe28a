"""Engine ranks of the control benchmark, many in a process: ``python -m benchmarks.control_rank CONFIG``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.shards import Shard, shard
from weightsync_bench.peer import serve

__all__ = ["NAME", "main"]

NAME = "one.weight"


class _Tiny(EngineAdapter):
    """Sixteen bytes of weights, and nothing to pause: what is left of a round is its control."""

    name = "bench-control"

    def __init__(self) -> None:
        self._shards = [shard(NAME, torch.zeros(4, dtype=torch.float32), (4,), (0,))]

    def manifest(self) -> Manifest:
        return Manifest([TensorSpec(NAME, (4,), "float32")])

    def shards(self) -> list[Shard]:
        return self._shards


def main() -> None:
    """Join ``count`` replicas of one rank, then more on command, until standard input ends."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with ExitStack() as owned:

        def join(name: str) -> None:
            where = {"coordinator": config["coordinator"], "token": config["token"]}
            owned.enter_context(Engine(_Tiny(), name, **where, transports=["shared_memory"]))

        for index in range(config["count"]):
            join(f"{config['role']}-{config['rank']}-{index}")
        serve({"join": join}.__getitem__)


if __name__ == "__main__":
    main()
