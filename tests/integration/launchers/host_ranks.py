"""A trainer rank or an engine of the tests between hosts. Commands are lines of standard input, events are JSON lines of output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from tests.integration.ray.ray_actors import change, mark, model
from torch.distributed.fsdp import fully_shard

import weightsync
from weightsync.config import launched_place
from weightsync.errors import WeightSyncError
from weightsync.model import PauseMode


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def train() -> None:
    """Publish a version for each line that rank 0 reads: its timeout in seconds."""
    place = launched_place(os.environ)
    if place is None:
        sys.exit("no launcher started this process")
    dist.init_process_group("gloo", rank=place[0], world_size=place[1])
    source = model(5)
    fully_shard(source)
    with weightsync.Trainer(source) as trainer:
        say("ready", rank=trainer.rank, world_size=trainer.world_size)
        for number, timeout in enumerate(_commands(), start=1):
            change(source, number)
            trainer.wait_for_replicas(2, timeout=60)
            try:
                result = trainer.publish(number, timeout=float(timeout))
            except WeightSyncError as error:
                say("failed", error=f"{type(error).__name__}: {error}")
            else:
                say(
                    "published",
                    replicas={
                        entry.name: [entry.state, entry.version, entry.verified, *entry.transports] for entry in result.replicas
                    },
                )
    dist.destroy_process_group()


def _commands() -> Iterator[str]:
    """Lines of rank 0's standard input, on every rank."""
    while True:
        line = [sys.stdin.readline() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(line)
        if not line[0]:
            return
        yield line[0]


class Served(weightsync.ModuleAdapter):
    """Says when it is paused, and what it holds when it serves."""

    pauses_twice = True

    def pause(self, mode: PauseMode, timeout: float) -> None:
        super().pause(mode, timeout)
        say("paused", version=None)

    def resume(self) -> None:
        super().resume()
        with self.in_use() as version:
            say("serving", version=None if version is None else version.number, marks=mark([*self.module.parameters()]))


def serve() -> None:
    """Serve until standard input ends."""
    with weightsync.Engine(Served(model(0))):
        say("ready")
        sys.stdin.readline()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train, "serve": serve}[sys.argv[1]]()
