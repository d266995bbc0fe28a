"""Names, shapes and dtypes of real models' tensors, for planning in benchmarks and tests. No weights."""

from __future__ import annotations

from weightsync.model import TensorSpec

__all__ = ["one_trillion", "qwen3_8b", "qwen3_30b_a3b"]

_Shapes = dict[str, tuple[int, ...]]


def _specs(shapes: _Shapes, dtype: str = "bfloat16") -> list[TensorSpec]:
    return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


def _ends(hidden: int, vocabulary: int) -> _Shapes:
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def _grouped_query(layer: str, hidden: int, heads: int, kv_heads: int, head: int) -> _Shapes:
    return {
        f"{layer}.self_attn.q_proj.weight": (heads * head, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * head, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * head, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * head),
        f"{layer}.self_attn.q_norm.weight": (head,),
        f"{layer}.self_attn.k_norm.weight": (head,),
    }


def _latent(layer: str, hidden: int) -> _Shapes:
    return {
        f"{layer}.self_attn.q_a_proj.weight": (1536, hidden),
        f"{layer}.self_attn.q_a_layernorm.weight": (1536,),
        f"{layer}.self_attn.q_b_proj.weight": (64 * 192, 1536),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (512 + 64, hidden),
        f"{layer}.self_attn.kv_a_layernorm.weight": (512,),
        f"{layer}.self_attn.kv_b_proj.weight": (64 * 256, 512),
        f"{layer}.self_attn.o_proj.weight": (hidden, 64 * 128),
    }


def _norms(layer: str, hidden: int) -> _Shapes:
    return {f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,)}


def _gated(mlp: str, hidden: int, inner: int) -> _Shapes:
    return {
        f"{mlp}.gate_proj.weight": (inner, hidden),
        f"{mlp}.up_proj.weight": (inner, hidden),
        f"{mlp}.down_proj.weight": (hidden, inner),
    }


def qwen3_8b() -> list[TensorSpec]:
    """Qwen3-8B: dense, 399 tensors, 16.4 GB in bfloat16."""
    shapes = _ends(4096, 151936)
    for number in range(36):
        layer = f"model.layers.{number}"
        shapes |= _norms(layer, 4096) | _grouped_query(layer, 4096, 32, 8, 128) | _gated(f"{layer}.mlp", 4096, 12288)
    return _specs(shapes)


def qwen3_30b_a3b() -> list[TensorSpec]:
    """Qwen3-30B-A3B: a mixture of 128 experts in 48 layers, 18,867 tensors, 61.1 GB in bfloat16."""
    shapes = _ends(2048, 151936)
    for number in range(48):
        layer = f"model.layers.{number}"
        shapes |= _norms(layer, 2048) | _grouped_query(layer, 2048, 32, 4, 128)
        shapes[f"{layer}.mlp.gate.weight"] = (128, 2048)
        for expert in range(128):
            shapes |= _gated(f"{layer}.mlp.experts.{expert}", 2048, 768)
    return _specs(shapes)


def one_trillion() -> list[TensorSpec]:
    """A model like Kimi-K2: 384 experts in 60 of 61 layers, latent attention, 1.03e12 parameters in 69,915 bfloat16 tensors."""
    hidden = 7168
    shapes = _ends(hidden, 163840)
    for number in range(61):
        layer = f"model.layers.{number}"
        shapes |= _norms(layer, hidden) | _latent(layer, hidden)
        if number == 0:
            shapes |= _gated(f"{layer}.mlp", hidden, 18432)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (384, hidden)
        shapes |= _gated(f"{layer}.mlp.shared_experts", hidden, 2048)
        for expert in range(384):
            shapes |= _gated(f"{layer}.mlp.experts.{expert}", hidden, 2048)
    return _specs(shapes)
