"""Holds that the simulation has teeth: bugs planted on purpose are noticed. ``make simulate`` plants the rare ones, too."""

from __future__ import annotations

import pytest
from tests.simulation.main import hunt
from tests.simulation.mutants import MUTANTS

QUICK = {
    "resume before verify": ("infected", "stuck", "torn", "mislabelled"),
    "label before commit": ("mislabelled",),
    "replica loaded before commit": ("unusable", "mislabelled"),
    "ack before the copy is done": ("mislabelled",),
    "dirty replica resumed": ("dirty", "torn", "unusable", "mislabelled"),
    "digest not compared": ("mislabelled",),
    "stale region published": ("mislabelled",),
    "publish returns before the copy": ("mislabelled", "infected"),
    "pause answered before the engine stands": ("torn", "unusable"),
    "version served while paused": ("unusable",),
    "a rank that blinks while ranks gather loses its place": ("stuck",),
    "replicas that are lost or refused are dropped from results": ("dropped", "stuck"),
    "an abort before the pause is forgotten": ("unusable",),
    "version served while memory is followed": ("unusable",),
    "adapter paused twice": ("twice",),
    "seeded from memory that was withdrawn": ("spoiled",),
    "windows of a stream are freed before they were read": ("infected", "stuck", "torn"),
    "a replica that failed still holds windows": ("infected", "stuck"),
    "an adapter's base is not compared": ("mislabelled",),
    "an adapter is registered before it is verified": ("mislabelled",),
    "digests of a stream are not compared": ("mislabelled", "torn"),
    "an iterator is left when its stream fails": ("undrained",),
    "parameters that moved before the pause are not followed": ("mislabelled",),
    "what a replica reads from the store is compared with nothing": ("mislabelled", "torn"),
    "a stored chain is applied with one delta left out": ("stuck", "infected"),
    "a stored manifest is believed whoever signed it": ("mislabelled", "stuck"),
    "a version counts as stored before its manifest is": ("stuck", "infected"),
    "a relay believes a manifest whoever signed it": ("mislabelled", "stuck"),
    "a relay publishes a version before it is whole": ("mislabelled", "torn"),
    "a worker's token admits to operators' actions": ("mislabelled", "stuck"),
    "a tensor that changed is not streamed": ("mislabelled",),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.rare] * (at % 2)) for at, name in enumerate(QUICK)])
def test_a_planted_bug_is_noticed(name: str) -> None:
    _, schedules, what = hunt(name, most=150)
    assert schedules is not None, f"{name} was not noticed"
    assert what.startswith(QUICK[name]), what


def test_planted_bugs_are_taken_out_again() -> None:
    from tests.simulation.main import run_many

    for name in MUTANTS:
        with MUTANTS[name]():
            pass
    assert not run_many(range(3)).failed
