"""Experts that vLLM's own balancing moves between two ranks, between rounds and in them: every slot holds its version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import none_outlives

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).parent / "vllm_moving.py"

pytestmark = [pytest.mark.vllm, pytest.mark.rare, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("parallel", "kind"),
    [({"tensor_parallel_size": 2}, "now"), ({"tensor_parallel_size": 2}, "background"), ({"data_parallel_size": 2}, "now")],
    ids=str,
)
def test_every_slot_of_every_rank_holds_what_was_published_of_its_expert(
    tmp_path: Path, parallel: dict[str, int], kind: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with none_outlives():
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(tmp_path), str(rank), "2", json.dumps(parallel), kind],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            )
            for rank in range(2)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=380)[0] for process in processes]
    for process, out in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out[-3000:]
        [seen] = [json.loads(line.removeprefix("RESULT ")) for line in out.splitlines() if line.startswith("RESULT ")]
        assert seen["wrong"] == [], "after a round, or after a step that rebalanced"
        assert seen["moved"] >= 6, "vLLM did rebalance"
        assert len({json.dumps(experts) for experts in seen["maps"]}) >= 4, "and each round found other places"
        assert all(seen["held"]), "but not in the middle of a round"
        assert seen["audits"] == ["moved"] * 4 + ["same"], "what moved is not compared with what was installed"
        if seen["results"]:  # the rank that publishes
            assert [each[:3] for each in seen["results"]] == [[number, "direct", "installed"] for number in range(1, 7)]
            bases = [each[3] for each in seen["results"]]
            assert bases == [None] * 5 + [5], "after a rebalancing all bytes cross, and otherwise what changed"
