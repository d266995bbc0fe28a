"""A real vLLM that its framework owns: rounds run inside the framework's own calls of the workers, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.rare
@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_run_inside_the_frameworks_calls(tmp_path: Path, ranks: int) -> None:
    seen = run_program("vllm/vllm_called.py", ranks, tmp_path, ranks=ranks)
    assert seen["before"] is True
    assert "has not joined a coordinator: call weightsync_join first" in seen["not joined"]
    assert [answer["rank"] for answer in seen["ready"]] == list(range(ranks))
    assert all(answer["delivery"] == "streamed" and "on cpu" in answer["reason"] for answer in seen["ready"])
    assert "token-' cannot be read: No such file or directory" in seen["no token"]
    assert seen["joined"][0] == seen["joined"][1]
    assert [(entry["verified"], entry["equal"]) for entry in seen["rounds"]] == [("received", True)] * 2
    answers, seconds = seen["again"]
    assert [(answer["number"], answer["verified"], answer["nbytes"]) for answer in answers] == [(2, "received", 0)] * ranks
    assert seconds < 10
    assert "no update to version 3 came within 1 s" in seen["no update"]
    assert "rollout-0: " in seen["no call"]
    assert "did not let the update in" in seen["no call"]
    assert seen["kept"] is True
    assert "injected into the load" in seen["failed"]
    assert "the engine's call raised" in seen["failed"]
    assert [(answer["number"], answer["nbytes"] > 0) for answer in seen["retried"]] == [(4, True)] * ranks
    assert seen["retried equal"] is True
    assert seen["equal"] is True
    assert "has not joined" in seen["left"]
