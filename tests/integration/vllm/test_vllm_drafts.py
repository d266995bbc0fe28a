"""Holds that what guesses for a real vLLM, a model of its own or a head, is updated too: guesses show which weights it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("program", [["drafts"], ["heads", "eagle"], ["heads", "mtp"]], ids="-".join)
def test_a_draft_is_updated_by_a_prefix_rule(tmp_path: Path, program: list[str]) -> None:
    seen = run_program(f"vllm/vllm_{program[0]}.py", *program[1:], tmp_path, ranks=1)
    assert len(seen["rounds"]) == 3
    for entry in seen["rounds"]:
        assert entry["equal"], entry  # whatever was guessed
        assert (entry["state"], entry["delivery"]) == ("loaded", "streamed")
        assert entry["guessed"] > 0
        if entry["alike"]:
            assert entry["right"] == entry["guessed"], entry
        else:
            assert entry["right"] < entry["guessed"] / 2, entry
