"""Holds that people who interrupt, move and hold what they like get no wrong weights: a short run on real processes.

The long one is a part of ``make faults``: ``python -m tests.faults.people``.
"""

from __future__ import annotations

import pytest
from tests.faults.people import Judgement, run_people


@pytest.mark.timeout(180)
def test_every_label_means_one_step_whatever_programs_do(seed: int) -> None:
    judge = run_people(seed, steps=6)
    assert not judge.wrong, f"python -m tests.faults.people --seeds 1 --first {seed} --steps 6\n" + "\n".join(judge.wrong[:10])
    assert judge.uses
    assert judge.published


def test_the_judge_sees_torn_and_mislabelled_weights() -> None:
    judge = Judgement()
    judge.take("engine-0", {"use": 1, "values": [2.0, 3.0]})
    judge.take("trainer/0", {"version": 2, "step": 7.0})
    judge.take("engine-0", {"use": 2, "values": [6.0]})
    assert ["torn" in line for line in judge.wrong] == [True, False]
