"""A process that serves adapters, or publishes one, and kills itself at a point: ``adapter_process.py ROLE URL POINT MORE``."""

from __future__ import annotations

import os
import signal
import sys

import msgspec
from tests.integration.rounds.test_adapters import Part, lora

from weightsync import failpoints
from weightsync.engine.engine import Engine
from weightsync.model import Version
from weightsync.trainer.adapters import Adapters


def main(role: str, url: str, point: str, more: str) -> None:
    def die(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    if role == "engine":
        with Engine(Part(), more, url, rank=1, world_size=2):
            print("joined", flush=True)
            for line in sys.stdin:
                failpoints.install(die if line.strip() == "armed" else lambda name: None)
                print("ok", flush=True)
        return
    with Adapters(lora(3), msgspec.json.decode(more, type=Version), alpha=8, coordinator=url) as adapters:
        adapters.publish("bob/code", 1)
        failpoints.install(die)
        adapters.publish("bob/code", 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
