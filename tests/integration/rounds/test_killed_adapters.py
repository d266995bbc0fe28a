"""Engines and publishers of adapters that are killed: nothing of a version stays in part, and others go on."""

from __future__ import annotations

import signal
from contextlib import suppress

import msgspec
import pytest
from tests.faults.points import LORA_POINTS
from tests.integration.rounds.test_adapters import Fleet, Made, Part, close, lora, made
from tests.processes import ChildProcess

from weightsync.errors import RoundFailed, VersionError

__all__ = ["made"]

_QUICK = ("engine.lora.received", "trainer.placing")
"""Points at which the processes of ordinary test runs are killed. A case takes ten seconds on a quiet machine."""
_OF_ENGINES = [point for point in LORA_POINTS if point.startswith("engine.")]
_OF_PUBLISHERS = ("publish", "received.place", "place", "placing", "placed", "published")


def _points(*names: str) -> list[object]:
    return [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.rare) for name in names]


def start(fleet: Fleet, *arguments: str) -> ChildProcess:
    """A process that takes part in the fleet, and ends with it."""
    program = ("-m", "tests.integration.rounds.adapter_process", *arguments)
    return fleet.owned.enter_context(ChildProcess(*program, environment={"WEIGHTSYNC_TOKEN": fleet.server.token}))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", _points(*_OF_ENGINES))
def test_a_rank_that_is_killed_takes_the_version_from_its_replica_and_no_other(made: Made, point: str) -> None:
    fleet = made(engines=1)
    survivor = Part()
    fleet.joined.engine(survivor, "duo", rank=0, world_size=2)
    other = start(fleet, "engine", fleet.server.url, point, "duo")
    other.expect("joined")
    fleet.trainer.wait_for_replicas(2)
    fleet.trainer.publish(1)
    assert all(replica.error is None for replica in fleet.adapters.publish("alice/math", 1).replicas)
    assert other.ask("armed") == "ok"
    if point.endswith("drop") or point.endswith("droplora"):
        with suppress(RoundFailed):
            fleet.adapters.retire("alice/math", keep=0)
        newest = 1
        assert fleet.wait_for(lambda: not survivor.registered) and fleet.names() == []
    else:
        results = {replica.name: replica.error for replica in fleet.adapters.publish("alice/math", 2).replicas}
        assert results["duo"] is not None and results["r0"] is None
        assert fleet.wait_for(lambda: survivor.registered == set(survivor.staged) == {"alice/math@1"})
        newest = 2
        for label in ("alice/math@1", "alice/math@2"):  # the other replica serves both
            assert close(fleet.answer(label)[1], fleet.right(fleet.tensors))
    other.exit_code(10)
    with pytest.raises(VersionError, match=rf"alice/math@{newest} cannot be published"):  # for a number is never used again
        fleet.adapters.publish("alice/math", newest)
    start(fleet, "engine", fleet.server.url, "", "duo").expect("joined")
    if newest == 2:  # its replica gets the newest version from the trainer, and forgets what only one rank has
        assert fleet.wait_for(lambda: survivor.registered == set(survivor.staged) == {"alice/math@2"})
    assert all(replica.error is None for replica in fleet.adapters.publish("alice/math", 3).replicas)
    assert "alice/math@3" in survivor.registered and close(fleet.answer("alice/math")[1], fleet.right(fleet.tensors))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", _points(*(f"trainer.{point}" for point in _OF_PUBLISHERS)))
def test_a_publisher_that_is_killed_leaves_what_was_served(made: Made, point: str) -> None:
    fleet = made(engines=2)
    base = msgspec.json.encode(fleet.trainer.version).decode()
    assert start(fleet, "publisher", fleet.server.url, point, base).exit_code() == -signal.SIGKILL
    both = [["bob/code@1"], ["bob/code@1", "bob/code@2"]]
    assert fleet.wait_for(lambda: all(sorted(module.loras()) in both for module in fleet.modules))
    assert fleet.wait_for(lambda: fleet.names() in both)
    if point == "trainer.published":
        assert fleet.names("r0") == fleet.names("r1") == both[1]
    elif point != "trainer.placed":
        assert fleet.names() == both[0]
    for index, module in enumerate(fleet.modules):
        for label in module.loras():
            assert close(fleet.answer(label, index)[1], fleet.right(lora(3)))
    served = fleet.names()
    result = fleet.adapters.publish("bob/code")  # another source goes on with the name
    assert result.ok and f"bob/code@{result.version.number}" not in served
    assert close(fleet.answer("bob/code")[1], fleet.right(fleet.tensors))
