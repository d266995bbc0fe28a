"""The families that the guide adds hold what Transformers has, on every rank of a mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.integrations.megatron_standins import Model

from weightsync import manifest_of
from weightsync.integrations.megatron import FAMILIES, hf_state

transformers = pytest.importorskip("transformers")
GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/megatron.md"
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    """Run the guide's code, and take away what it adds."""
    before = dict(FAMILIES)
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), GUIDE.name, "exec"), {})
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def megatron(whole: dict[str, torch.Tensor], tp: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What rank ``tp`` holds of a model in Hugging Face's plainest names, in Megatron's order."""
    rank, size = tp
    out = {
        "embedding.word_embeddings.weight": whole["model.embed_tokens.weight"].chunk(size)[rank],
        "output_layer.weight": whole["lm_head.weight"].chunk(size)[rank],
        "decoder.final_layernorm.weight": whole["model.norm.weight"],
    }
    for number in range(2):
        there, here = f"model.layers.{number}.", f"decoder.layers.{number}."
        query, key, value = (whole[f"{there}self_attn.{kind}_proj.weight"].chunk(2) for kind in "qkv")  # by group
        grouped = torch.cat([rows for group in range(2) for rows in (query[group], key[group], value[group])])
        gate, up = (whole[f"{there}mlp.{kind}_proj.weight"].chunk(size)[rank] for kind in ("gate", "up"))
        out |= {
            here + "input_layernorm.weight": whole[there + "input_layernorm.weight"],
            here + "pre_mlp_layernorm.weight": whole[there + "post_attention_layernorm.weight"],
            here + "self_attention.linear_qkv.weight": grouped.chunk(size)[rank],
            here + "self_attention.linear_proj.weight": whole[there + "self_attn.o_proj.weight"].chunk(size, 1)[rank],
            here + "mlp.linear_fc1.weight": torch.cat([gate, up]),
            here + "mlp.linear_fc2.weight": whole[there + "mlp.down_proj.weight"].chunk(size, 1)[rank],
        }
    return out


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_families_of_the_guide(family: str, size: int) -> None:
    kind = {"mistral": transformers.MistralConfig, "phi3": transformers.Phi3Config}[family]
    module = transformers.AutoModelForCausalLM.from_config(kind(**SIZES), dtype=torch.float32)
    held = dict(module.state_dict())
    plain = dict(held)
    for name, value in held.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", value.split([16, 8, 8]), strict=True):
                plain[name.replace("qkv", part)] = rows
        if "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), value.chunk(2), strict=True):
                plain[name.replace("gate_up", part)] = rows
    seen = {name: torch.full_like(value, torch.nan) for name, value in held.items()}
    config = kind(**SIZES)
    config.head_dim = 4
    for rank in range(size):
        state = hf_state(Model(config, megatron(plain, (rank, size)), tp=(rank, size)), config=config)
        manifest, shards = state.declare()
        assert manifest == manifest_of(module)
        for one in shards:
            seen[one.name][tuple(map(slice, one.box.starts, one.box.stops))] = one.tensor
    assert all(torch.equal(seen[name], value) for name, value in held.items())
