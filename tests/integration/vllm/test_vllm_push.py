"""``weightsync push --engine vllm`` and a real vLLM server: three updates from checkpoints on disk, one of which fails to load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_push_brings_a_checkpoint_to_a_server(tmp_path: Path, ranks: int) -> None:
    seen = run_program("vllm/vllm_pushes.py", ranks, tmp_path, ranks=ranks)
    first, failed, healed = seen["pushes"]
    for entry, number in ((first, 1), (healed, 3)):
        assert (entry["status"], entry["ok"], entry["verified"]) == (0, True, True), entry
        assert (entry["label"], entry["paused"]) == (f"run@{number}", False)
        assert entry["equal"], entry
        assert entry["cached"] == 0
    assert failed["warm"] > 0  # so a cache that survived the last push would have been used
    assert (failed["status"], failed["ok"], failed["paused"]) == (1, False, True)
    assert "injected into the load" in failed["answer"]
    assert failed["label"] != "run@2"
    assert seen["stranger"] == [500, 500]
