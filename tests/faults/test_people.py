"""Holds that people who interrupt, move and hold what they like get no wrong weights: a short run on real processes.

The long one is a part of ``make faults``: ``python -m tests.faults.people``.
"""

from __future__ import annotations

import pytest
from tests.faults.people import Oracle, run_people


@pytest.mark.rare
@pytest.mark.timeout(180)
def test_every_label_means_one_step_whatever_programs_do(seed: int) -> None:
    oracle = run_people(seed, steps=6)
    assert not oracle.wrong, f"python -m tests.faults.people --seeds 1 --first {seed} --steps 6\n" + "\n".join(oracle.wrong[:10])
    assert oracle.uses
    assert oracle.published


def test_the_oracle_sees_torn_and_mislabelled_weights() -> None:
    oracle = Oracle()
    oracle.take("engine-0", {"use": 1, "values": [2.0, 3.0]})
    oracle.take("trainer/0", {"version": 2, "step": 7.0})
    oracle.take("engine-0", {"use": 2, "values": [6.0]})
    assert ["torn" in line for line in oracle.wrong] == [True, False]
