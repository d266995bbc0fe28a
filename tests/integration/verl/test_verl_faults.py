"""What goes wrong in the middle of an update of verl: errors on both sides within the deadline, and the next update works."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

import ray
from ray.exceptions import RayActorError, RayTaskError
from tests.integration.server.service_support import free_port
from tests.integration.verl.verl_cluster import OPTION, Run, cluster
from tests.processes import ChildProcess

from weightsync.errors import DeadlineExceeded, RoundFailed, WeightSyncError

SECONDS = 12.0
"""An update's timeout in these tests, the gathering included."""
GRACE = 8.0
"""What an error may be late on a machine that is busy."""

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl's, Ray's and those of what they import
]


class Coordinator:
    """``weightsync serve``, which can be killed and started again at its address."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: ChildProcess | None = None

    def start(self) -> None:
        self.process = ChildProcess("-m", "weightsync", "serve", "--port", self.port, "--run", "faults")
        while str(self.port) not in self.process.line():
            continue

    def kill(self) -> None:
        if self.process is not None:
            self.process.close()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = folder  # where it leaves its token, and Ray's workers look for it
        started = Coordinator()
        try:
            started.start()
            yield started
        finally:
            started.kill()
            os.environ.pop("XDG_RUNTIME_DIR") if before is None else os.environ.update(XDG_RUNTIME_DIR=before)


@pytest.fixture(scope="module")
def run(coordinator: Coordinator) -> Iterator[Run]:
    options = [f"{OPTION}.timeout={SECONDS}", f"{OPTION}.coordinator=http://127.0.0.1:{coordinator.port}"]
    with tempfile.TemporaryDirectory(prefix="v-", ignore_cleanup_errors=True) as folder, cluster(folder):
        yield Run(Path(folder), actors=2, rollouts=2, options=options)


def fail(run: Run, between: Any = None) -> tuple[list[BaseException], list[BaseException], float]:
    """An update as verl's manager makes it, with what each actor and each rollout rank raised, and after how long.

    A rollout rank may raise when verl finalizes it, which the manager does before it resumes any replica.
    """
    rollout = run.rollout_group()
    run.manager.build_process_group(rollout)
    if between is not None:
        between()
    since = time.monotonic()
    asked = run.actors.update_weights(global_steps=1, mode="weightsync") + rollout.update_weights(global_steps=1)
    errors: list[BaseException] = []
    for ref in asked:
        try:
            ray.get(ref, timeout=SECONDS + GRACE - (time.monotonic() - since))
            errors.append(AssertionError("no error"))
        except (RayTaskError, RayActorError) as error:
            errors.append(error.cause if isinstance(error, RayTaskError) else error)
    for number, ref in enumerate(rollout.execute_checkpoint_engine(["finalize"] * rollout.world_size), 2):
        try:
            ray.get(ref, timeout=GRACE)
        except (RayTaskError, RayActorError) as error:
            if "no error" in str(errors[number]):
                errors[number] = error.cause if isinstance(error, RayTaskError) else error
    return errors[:2], errors[2:], time.monotonic() - since


def works(run: Run, seed: int) -> None:
    expected = run.change(seed)
    run.update(seed)
    for taken, _ in run.taken():
        assert taken == expected


def test_a_generator_that_raises_on_all_ranks_ends_the_update_everywhere_and_the_next_one_works(run: Run) -> None:
    works(run, 1)
    run.actors.set_fault("raise")
    actors, rollouts, seconds = fail(run)
    assert all(isinstance(error, ValueError) and "fourth tensor" in str(error) for error in actors), actors
    assert all(isinstance(error, RoundFailed) for error in rollouts), rollouts
    assert seconds < SECONDS
    assert all("must not resume" in str(error) for error in rollouts), "verl's adapters are told of an end only"
    run.actors.set_fault("")
    works(run, 2)


def test_an_adapter_that_raises_fails_its_own_rank_and_the_actors_and_no_other(run: Run) -> None:
    first, second = (replica.workers[0] for replica in run.manager.replicas)
    expected = run.change(3)
    ray.get(first.set_fault.remote("raise"))
    actors, rollouts, seconds = fail(run)
    assert all(isinstance(error, RoundFailed) and " of 2 rollout ranks" in str(error) for error in actors), actors
    assert "does not take this tensor" in str(rollouts[0])
    assert "no error" in str(rollouts[1])
    assert ray.get(second.taken.remote())[0] == expected
    assert seconds < SECONDS
    ray.get(first.set_fault.remote(""))
    works(run, 4)


def test_a_coordinator_that_dies_between_prepare_and_send_is_an_error_on_all_ranks_and_its_successor_is_found(
    run: Run, coordinator: Coordinator
) -> None:
    actors, rollouts, _ = fail(run, between=coordinator.kill)
    assert all(isinstance(error, WeightSyncError) for error in actors + rollouts), (actors, rollouts)
    coordinator.start()
    works(run, 5)


def test_a_replica_that_dies_while_the_stream_flows_fails_alone(run: Run) -> None:
    (extra,) = run.new_replicas(1)
    run.manager.add_replicas([extra])
    expected = run.change(6)
    ray.get(extra.workers[0].set_fault.remote("die"))
    actors, rollouts, seconds = fail(run)
    assert all(isinstance(error, RoundFailed) for error in actors), actors
    assert isinstance(rollouts[-1], RayActorError)
    assert ["no error" in str(error) for error in rollouts[:-1]] == [True, True]
    assert seconds < SECONDS + GRACE
    run.manager.remove_replicas([extra])
    assert [taken for taken, _ in run.taken()] == [expected, expected]
    works(run, 7)


def test_an_adapter_that_hangs_is_left_behind_within_the_deadline(run: Run) -> None:
    (extra,) = run.new_replicas(1)
    run.manager.add_replicas([extra])
    ray.get(extra.workers[0].set_fault.remote("hang"))
    expected = run.change(8)
    rollout = run.rollout_group()
    run.manager.build_process_group(rollout)
    since = time.monotonic()
    asked = run.actors.update_weights(global_steps=1, mode="weightsync")
    others = rollout.update_weights(global_steps=1)
    for ref in asked:
        with pytest.raises(RoundFailed):
            ray.get(ref, timeout=SECONDS + GRACE)
    assert time.monotonic() - since < SECONDS + GRACE
    ray.get(others[:2], timeout=GRACE)
    run.manager.remove_replicas([extra])
    assert [taken for taken, _ in run.taken()] == [expected, expected]
    ray.kill(extra.workers[0])
    works(run, 9)


def test_a_rank_that_does_not_walk_is_an_error_on_all_ranks_within_the_deadline(run: Run) -> None:
    """The last one: the actor ranks stay in a collective that only a restart ends, and say so."""
    run.actors.set_fault("stop on 1")
    actors, rollouts, seconds = fail(run)
    assert all(isinstance(error, DeadlineExceeded) for error in actors), actors
    assert all(isinstance(error, WeightSyncError) for error in rollouts), rollouts
    assert SECONDS - 1 < seconds < SECONDS + GRACE
    with pytest.raises(WeightSyncError, match="restart the actor ranks"):
        run.update(10)
