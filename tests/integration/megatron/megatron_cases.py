"""What the Megatron tests run, on both sides of the pipe between them: Hugging Face configurations, meshes. Imports no Megatron."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MESHES", "PADDED", "TIED", "VOCABULARY", "Case", "expert_count", "fsdp_values", "hf_config"]

VOCABULARY, PADDED = 250, 256
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """A model at a mesh. ``changes`` are to the family's configuration.

    With ``cp``, ranks are in context-parallel groups; attention that computes so is TransformerEngine's, and has no weights.
    ``mtp`` is the number of prediction layers. ``first_stage`` layers are in the first pipeline stage, if not as many as in the
    others. With ``contradictions``, changes to the configuration that hf_state alone is given, nothing is published: what it raises
    for each of them is told. With ``fsdp``, Transformers' own module is sharded by Megatron-FSDP instead. With ``bridge``, hf_state
    is given that bridge; with ``exported``, the wanted tensors are what Megatron-Bridge itself gathers. With ``lora``, the model
    has Megatron-Bridge's LoRA of that rank; base and adapter are published apart, the adapter with twice that as its alpha.
    """

    family: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    cp: int = 1
    first_stage: int | None = None
    mtp: int = 0
    dtype: str = "bfloat16"
    changes: dict[str, Any] = field(default_factory=dict)
    versions: int = 3
    forward: bool = False
    stacked: bool = True
    contradictions: list[dict[str, Any]] = field(default_factory=list)
    fsdp: bool = False
    bridge: str = ""
    exported: bool = False
    lora: int = 0

    def __hash__(self) -> int:
        """By its name."""
        return hash(str(self))

    @property
    def world(self) -> int:
        """Processes."""
        return max(self.tp, self.ep * self.etp) * self.pp * self.dp * self.cp

    def layers_of(self, stage: int, chunk: int, count: int) -> int:
        """Number of the first layer of a chunk of a pipeline stage, in a model of ``count`` layers."""
        if self.first_stage is None:
            return (chunk * self.pp + stage) * (count // (self.pp * self.vpp))
        return 0 if stage == 0 else self.first_stage + (stage - 1) * ((count - self.first_stage) // (self.pp - 1))

    def __str__(self) -> str:
        names = ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")
        sizes = {name: getattr(self, name) for name in names} | {"mtp": 2 * self.mtp}
        mesh = "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        mesh = f"fsdp-{mesh}" if self.fsdp else mesh
        mesh = f"{self.bridge}-{mesh}" if self.bridge else mesh
        mesh = f"lora{self.lora}-{mesh}" if self.lora else mesh
        uneven = [] if self.first_stage is None else [f"first{self.first_stage}"]
        return "-".join([self.family, mesh or "one", *uneven, *map(str, self.changes)]) + ("" if self.stacked else "-checkpoint")


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
        "glm4_moe": (
            transformers.Glm4MoeConfig,
            {
                "head_dim": 16,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "moe_intermediate_size": 48,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "attention_bias": True,
                "partial_rotary_factor": 0.5,
                "use_qk_norm": True,
            },
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
    return int({"qwen3_moe": 8, "mixtral": 4, "deepseek_v3": 8, "glm4_moe": 8}.get(hf.model_type, 0))


def fsdp_values(name: str, version: int, shape: tuple[int, ...]) -> Any:
    """What a tensor of a model that Megatron-FSDP shards holds in a version, as bfloat16. The first is exact in float32 too."""
    import torch

    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))).bfloat16().float()
    for _ in range(1, version):
        values += 1
    return values.bfloat16()


def _meshes(ranks: int) -> Iterator[Case]:
    """Every family at every mesh of at most ``ranks`` processes."""
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    pipelines = [(pp, vpp) for pp in sizes for vpp in (1, 2) if vpp == 1 or pp == 2]
    for pp, vpp in pipelines:
        dense = [(tp, 1, 1) for tp in sizes]
        cut = [(tp, ep, etp) for tp in sizes for ep in sizes for etp in sizes]
        for families, meshes in ((("llama", "qwen2", "qwen3"), dense), (("qwen3_moe", "mixtral", "deepseek_v3"), cut)):
            for family in families:
                for tp, ep, etp in meshes:
                    case = Case(family, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, versions=1)
                    if case.world <= ranks:
                        yield case


MESHES = list(_meshes(4))
