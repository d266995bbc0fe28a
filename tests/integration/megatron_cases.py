"""What the Megatron tests run, on both sides of the pipe between them: Hugging Face configurations, meshes. Imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["PADDED", "VOCABULARY", "Case", "expert_count", "hf_config"]

VOCABULARY, PADDED = 250, 256


@dataclass(frozen=True)
class Case:
    """A model at a mesh. ``changes`` are to the family's configuration."""

    family: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    dtype: str = "bfloat16"
    changes: dict[str, Any] = field(default_factory=dict)
    versions: int = 3
    forward: bool = False
    stacked: bool = True

    @property
    def world(self) -> int:
        """Processes."""
        return max(self.tp, self.ep * self.etp) * self.pp * self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "etp": self.etp, "dp": self.dp}
        mesh = "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        return "-".join([self.family, mesh or "one", *map(str, self.changes)]) + ("" if self.stacked else "-checkpoint")


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def hf_config(family: str, changes: dict[str, Any]) -> Any:
    """A small configuration of the family."""
    import transformers

    own: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, {}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
        ),
        "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
        "deepseek_v3": (
            transformers.DeepseekV3Config,
            {
                "n_routed_experts": 8,
                "n_shared_experts": 2,
                "moe_intermediate_size": 32,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 8,
                "v_head_dim": 10,
                "num_key_value_heads": 8,
            },
        ),
    }
    kind, more = own[family]
    return kind(**{**_COMMON, **more, **changes})


def expert_count(hf: Any) -> int:
    """Experts of a layer, 0 without any."""
    return int({"qwen3_moe": 8, "mixtral": 4, "deepseek_v3": 8}.get(hf.model_type, 0))
