"""Engines and publishers of adapters that are killed: nothing of a version stays in part, and others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from tests.integration.rounds.test_adapters import Fleet, Made, Part, close, lora, made

from weightsync.errors import RoundFailed

__all__ = ["made"]
ROOT = Path(__file__).parents[3]


class Process:
    """A program of this folder, killed at the end."""

    def __init__(self, fleet: Fleet, *arguments: str) -> None:
        environment = {**os.environ, "WEIGHTSYNC_TOKEN": str(fleet.server.token), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
        command = [sys.executable, "-m", "tests.integration.rounds.adapter_process", *arguments]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        fleet.owned.callback(self.end)

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.said() == "ok"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point", ["received", *(pytest.param(point, marks=pytest.mark.rare) for point in ("registered", "received.droplora"))]
)
def test_a_rank_that_is_killed_takes_the_version_from_its_replica_and_no_other(made: Made, point: str) -> None:
    fleet = made(engines=1)
    survivor = Part()
    fleet.joined.engine(survivor, "duo", rank=0, world_size=2)
    other = Process(fleet, "engine", fleet.server.url, f"engine.lora.{point}", "duo")
    assert other.said() == "joined"
    fleet.trainer.wait_for_replicas(2)
    fleet.trainer.publish(1)
    assert all(replica.error is None for replica in fleet.adapters.publish("alice/math", 1).replicas)
    other.tell("armed")
    if point == "received.droplora":
        with suppress(RoundFailed):
            fleet.adapters.retire("alice/math", keep=0)
        newest = 1
        assert fleet.wait_for(lambda: not survivor.registered) and fleet.names() == []
    else:
        results = {replica.name: replica.error for replica in fleet.adapters.publish("alice/math", 2).replicas}
        assert results["duo"] is not None and results["r0"] is None
        assert fleet.wait_for(lambda: survivor.registered == set(survivor.staged) == {"alice/math@1"})
        newest = 2
    other.process.wait(10)
    again = Process(fleet, "engine", fleet.server.url, "", "duo")
    assert again.said() == "joined"
    if newest == 2:  # its replica gets the newest version from the trainer, and forgets what only one rank has
        assert fleet.wait_for(lambda: survivor.registered == set(survivor.staged) == {"alice/math@2"})
    assert all(replica.error is None for replica in fleet.adapters.publish("alice/math", 3).replicas)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", ["trainer.placing"])
def test_a_publisher_that_is_killed_leaves_what_was_served(made: Made, point: str) -> None:
    fleet = made(engines=2)
    base = msgspec.json.encode(fleet.trainer.version).decode()
    publisher = Process(fleet, "publisher", fleet.server.url, point, base)
    assert publisher.process.wait(30) == -signal.SIGKILL
    assert fleet.wait_for(
        lambda: all(set(module.loras()) in ({"bob/code@1"}, {"bob/code@1", "bob/code@2"}) for module in fleet.modules)
    )
    assert fleet.wait_for(lambda: fleet.names() in (["bob/code@1"], ["bob/code@1", "bob/code@2"]))
    for index in range(2):
        _, answer = fleet.answer("bob/code@1", index)
        assert close(answer, fleet.right(lora(3)))
    assert fleet.adapters.publish("bob/code").ok  # another source goes on with the name
