"""A real vLLM that loads what is streamed to it gets the tensors that changed, and loads the blocks in which they are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.vllm.vllm_some import ALL, FAILING, SCRIBBLED, STEPS
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_with_changes_are_loaded_and_the_answers_are_right(tmp_path: Path, ranks: int) -> None:
    """One rank has a tied model with biases, two an untied one."""
    steps = run_program("vllm/vllm_some.py", tmp_path, ranks, ranks=ranks)["steps"]
    whole = steps[0]
    everything = set(whole["loaded"][0])
    assert {name for name in everything if name.startswith("model.layers.0.")}
    assert (whole["base"], whole["nbytes"]) == (None, ranks * whole["wanted"])
    first, second, outside = "model.layers.0.", "model.layers.1.", ("model.embed_tokens.", "model.norm.", "lm_head.")
    blocks: list[tuple[str, ...]] = [("",), (second,), outside, (), (first,), (second,), (first,), ("",)]
    for number, step in enumerate(steps[1:], start=1):
        assert (step["base"], step["nbytes"]) == (number, ranks * step["wanted"])
    for number, (step, block) in enumerate(zip(steps, blocks, strict=True)):
        for rank, names in enumerate(step["loaded"]):
            wanted = ("",) if number in (ALL, SCRIBBLED) or (number == FAILING and rank == 0) else block
            assert set(names) == {name for name in everything if name.startswith(wanted)}
    assert all(step["equal"] and step["verified"] == "received" for step in steps)
    answers = [step["answers"] for step in steps]
    assert sum(one != other for one, other in pairwise(answers)) >= len(STEPS) - 3
