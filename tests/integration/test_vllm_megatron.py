"""Real Megatron-core ranks into a real vLLM: its tokens are those of Transformers with the gathered weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.integration.megatron_cases import Case
from tests.integration.vllm_support import run_program

pytestmark = [
    pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare,
    pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed here"),
]  # fmt: skip

WIDE: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 192,
    "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64}


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("case", "tp"),
    [
        (Case("llama", tp=2, changes=WIDE, stacked=False), 2),
        (Case("qwen3_moe", tp=2, ep=2, changes=WIDE | EXPERTS, stacked=False), 1),
        (Case("qwen3_moe", ep=2, pp=2, changes=WIDE | EXPERTS, stacked=False), 2),
    ],
    ids=["llama-tp2-to-tp2", "qwen3_moe-tp2-ep2-to-one", "qwen3_moe-ep2-pp2-to-tp2"],
)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: Case, tp: int) -> None:
    seen = run_program("vllm_megatron.py", json.dumps(asdict(case)), tp, tmp_path, ranks=tp)
    assert seen["before"] is True  # vLLM and Transformers agree at all
    assert len(seen["versions"]) == case.versions
    for entry in seen["versions"]:
        assert entry["replicas"] == [["loaded", "received", "streamed"]]
        assert entry["answers"] == entry["expected"]
        assert any(len(set(answer)) > 3 for answer in entry["answers"])
    answers = [entry["answers"] for entry in seen["versions"]]
    assert all(one != other for number, one in enumerate(answers) for other in answers[:number])
