"""Real Megatron-core ranks into a real vLLM: its tokens are those of Transformers with the gathered weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.integration.megatron.megatron_cases import Case
from tests.integration.vllm.vllm_support import run_program

pytestmark = [
    pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare,
    pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed here"),
]  # fmt: skip

WIDE: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 192,
    "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
ONE_GROUP = WIDE | {"num_key_value_heads": 1}


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("case", "engine", "layers"),
    [
        (Case("llama", tp=2, changes=WIDE, stacked=False), TP2, [4, 4]),
        (Case("llama", tp=2, changes=ONE_GROUP, stacked=False), TP2, [4, 4]),  # each rank has the one key head
        (Case("llama", tp=2, changes=WIDE, stacked=False), PP2, [2, 2]),
        (Case("qwen3_moe", tp=2, ep=2, changes=WIDE | EXPERTS, stacked=False), {}, [4]),
        (Case("qwen3_moe", ep=2, pp=2, changes=WIDE | EXPERTS, stacked=False), TP2, [4, 4]),
        (Case("qwen3_moe", ep=2, changes=WIDE | EXPERTS, stacked=False), PP2, [2, 2]),
    ],
    ids=[
        "llama-tp2-to-tp2", "llama-tp2-to-tp2-of-one-key-head", "llama-tp2-to-pp2", "qwen3_moe-tp2-ep2-to-one",
        "qwen3_moe-ep2-pp2-to-tp2", "qwen3_moe-ep2-to-pp2",
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(tmp_path: Path, case: Case, engine: dict[str, Any], layers: list[int]) -> None:
    seen = run_program("vllm/vllm_megatron.py", json.dumps(asdict(case)), json.dumps(engine), tmp_path, ranks=len(layers))
    assert seen["layers"] == layers
    assert seen["before"] is True  # vLLM and Transformers agree at all
    assert len(seen["versions"]) == case.versions
    for entry in seen["versions"]:
        assert entry["replicas"] == [["loaded", "received", "streamed"]]
        assert entry["answers"] == entry["expected"]
        assert any(len(set(answer)) > 3 for answer in entry["answers"])
    answers = [entry["answers"] for entry in seen["versions"]]
    assert all(one != other for number, one in enumerate(answers) for other in answers[:number])
