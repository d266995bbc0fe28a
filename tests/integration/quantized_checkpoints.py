"""Small models, and their checkpoints quantized offline, for the tests with engines that serve quantized weights."""

from __future__ import annotations

import torch
from tests.unit.tensors.quantized_references import NAMES, reference

from weightsync.tensors.quantization import fused_group

SIZES = {
    "vocab_size": 101, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}


def quantized(plain: dict[str, torch.Tensor], kind: str = "fp8-block") -> dict[str, torch.Tensor]:
    """The same checkpoint, quantized offline."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        if "_proj.weight" in name:
            names = [name.removesuffix("weight") + part for part in NAMES[kind]]
            group, _ = fused_group(name)
            largest = max(other.abs().max() for key, other in plain.items() if fused_group(key)[0] == group)
            tensors |= dict(zip(names, reference(kind, tensor, largest), strict=True))
        else:
            tensors[name] = tensor
    return tensors
