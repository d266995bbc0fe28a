"""A real vLLM that loads what is streamed to it gets the tensors that changed, and loads the blocks in which they are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.vllm.vllm_some import FAILING, STEPS
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_with_changes_are_loaded_and_the_answers_are_right(tmp_path: Path, ranks: int) -> None:
    """One rank has a tied model with biases, two an untied one."""
    steps = run_program("vllm/vllm_some.py", tmp_path, ranks, ranks=ranks)["steps"]
    failed = steps.pop(FAILING)
    assert "injected into the load" in failed["failed"]
    whole, *_, again, last = steps
    everything = set(whole["loaded"][0])
    assert {name for name in everything if name.startswith("model.layers.0.")}
    for step in (whole, again):
        assert (step["base"], step["nbytes"]) == (None, ranks * whole["wanted"])
        assert all(set(names) == everything for names in step["loaded"])
    blocks: list[tuple[str, ...]] = [("model.layers.1.",), ("model.embed_tokens.", "model.norm.", "lm_head."), ()]
    changed = [*zip((2, 3, 4), steps[1:4], blocks, strict=True), (7, last, ("model.layers.0.",))]
    for number, step, block in changed:
        assert (step["base"], step["nbytes"]) == (number - 1, ranks * step["wanted"])
        assert all(set(names) == {name for name in everything if name.startswith(block)} for names in step["loaded"])
    assert all(step["equal"] and step["verified"] == "received" for step in steps)
    answers = [step["answers"] for step in steps]
    assert sum(one != other for one, other in pairwise(answers)) >= len(STEPS) - 3
