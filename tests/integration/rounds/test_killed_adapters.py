"""Engines and publishers of adapters that are killed: nothing of a version stays in part, and others go on."""

from __future__ import annotations

import signal
from contextlib import suppress

import msgspec
import pytest
from tests.integration.rounds.test_adapters import Fleet, Made, Part, close, lora, made
from tests.processes import ChildProcess

from weightsync.errors import RoundFailed

__all__ = ["made"]


def start(fleet: Fleet, *arguments: str) -> ChildProcess:
    """A process that takes part in the fleet, and ends with it."""
    program = ("-m", "tests.integration.rounds.adapter_process", *arguments)
    return fleet.owned.enter_context(ChildProcess(*program, environment={"WEIGHTSYNC_TOKEN": fleet.server.token}))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point", ["received", *(pytest.param(point, marks=pytest.mark.rare) for point in ("registered", "received.droplora"))]
)
def test_a_rank_that_is_killed_takes_the_version_from_its_replica_and_no_other(made: Made, point: str) -> None:
    fleet = made(engines=1)
    survivor = Part()
    fleet.joined.engine(survivor, "duo", rank=0, world_size=2)
    other = start(fleet, "engine", fleet.server.url, f"engine.lora.{point}", "duo")
    other.expect("joined")
    fleet.trainer.wait_for_replicas(2)
    fleet.trainer.publish(1)
    assert all(replica.error is None for replica in fleet.adapters.publish("alice/math", 1).replicas)
    assert other.ask("armed") == "ok"
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
    other.exit_code(10)
    start(fleet, "engine", fleet.server.url, "", "duo").expect("joined")
    if newest == 2:  # its replica gets the newest version from the trainer, and forgets what only one rank has
        assert fleet.wait_for(lambda: survivor.registered == set(survivor.staged) == {"alice/math@2"})
    assert all(replica.error is None for replica in fleet.adapters.publish("alice/math", 3).replicas)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", ["trainer.placing"])
def test_a_publisher_that_is_killed_leaves_what_was_served(made: Made, point: str) -> None:
    fleet = made(engines=2)
    base = msgspec.json.encode(fleet.trainer.version).decode()
    assert start(fleet, "publisher", fleet.server.url, point, base).exit_code(30) == -signal.SIGKILL
    assert fleet.wait_for(
        lambda: all(set(module.loras()) in ({"bob/code@1"}, {"bob/code@1", "bob/code@2"}) for module in fleet.modules)
    )
    assert fleet.wait_for(lambda: fleet.names() in (["bob/code@1"], ["bob/code@1", "bob/code@2"]))
    for index in range(2):
        _, answer = fleet.answer("bob/code@1", index)
        assert close(answer, fleet.right(lora(3)))
    assert fleet.adapters.publish("bob/code").ok  # another source goes on with the name
