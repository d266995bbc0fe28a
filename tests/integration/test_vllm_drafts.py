"""Holds that a speculative decoder's own model is updated with the model, in a real vLLM: its guesses show which weights it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare]


@pytest.mark.timeout(420)
def test_a_draft_model_is_updated_by_a_prefix_rule(tmp_path: Path) -> None:
    seen = run_program("vllm_drafts.py", tmp_path, ranks=1)
    for entry in seen["rounds"]:
        assert entry["equal"], entry  # whatever was guessed
        assert (entry["state"], entry["delivery"]) == ("loaded", "streamed")
        assert entry["guessed"] > 0
        if entry["alike"]:
            assert entry["right"] == entry["guessed"], entry
        else:
            assert entry["right"] < entry["guessed"] / 2, entry
