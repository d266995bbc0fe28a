"""verl's own manager and workers, with the option ``shards``: actor ranks publish their FSDP2 shards, and nothing is gathered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here")

import ray
from ray.exceptions import RayActorError
from tests.integration.verl import verl_actors
from tests.integration.verl.verl_cluster import OPTION, Run, cluster

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # verl's, Ray's and those of what they import
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="v-", ignore_cleanup_errors=True) as name, cluster(name):
        yield Path(name)


def test_only_shards_travel_and_the_values_are_equal(folder: Path) -> None:
    options = [f"{OPTION}.shards=true", f"{OPTION}.timeout=60"]
    run = Run(folder, actors=2, rollouts=2, options=options, actor=verl_actors.PlainActor)
    expected = run.change(0)
    metrics = run.update(0)
    assert [taken for taken, _ in run.taken()] == [expected, expected]
    assert run.actors.gathers() == [0, 0], "from the first update on"

    for step in (1, 2):
        expected = run.change(step)
        run.actors.replace_parameters()
        later = run.update(step)
        assert [taken for taken, _ in run.taken()] == [expected, expected]
        assert run.actors.gathers() == [0, 0]
        assert later["checkpoint_engine/version"] == metrics["checkpoint_engine/version"] + step
        assert later["checkpoint_engine/payload_mbytes"] == pytest.approx(metrics["checkpoint_engine/payload_mbytes"], rel=0.01)

    first, second = run.manager.replicas
    (third,) = run.new_replicas(1)
    run.manager.add_replicas([third])
    run.manager.remove_replicas([first])
    expected = run.change(3)
    run.update(3)
    assert [taken for taken, _ in run.taken()] == [expected, expected], "a replica that comes later takes no older version first"
    assert [steps for _, steps in run.taken()] == [[0, 1, 2, 3], [3]]

    ray.kill(second.workers[0])
    with pytest.raises(RayActorError):
        run.update(4)
    run.manager.remove_replicas([second])
    expected = run.change(5)
    run.update(5)
    assert run.taken() == [(expected, [3, 5])]
    assert run.actors.gathers() == [0, 0]
    assert [result.step for result in run.rounds() if result.ok] == [0, 1, 2, 3, 5], "verl's own count is in each result"
