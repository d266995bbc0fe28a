"""Rules for the blocks of a Transformer: which Hugging Face tensors each parameter of a Megatron-core module holds.

Every function returns :data:`Rules` for one block, made from the Hugging Face configuration. Where Megatron's local and
TransformerEngine modules have different names for the same thing, both are there. Experts are named ``mlp.experts.<number in the
whole model>.<parameter>``, however Megatron groups them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from weightsync.integrations.megatron.packing import Packing, Part

HFConfig: TypeAlias = Any
"""A configuration object of Transformers, or any object with the same attributes."""
Rules = Mapping[str, Packing]
"""By the name of a Megatron parameter, the Hugging Face tensors that it holds."""
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the matrices of a gated MLP."""


def whole(name: str, *shape: int, dim: int = 0, cut: bool = False, dtype: str | None = None) -> Packing:
    """Return the packing of one tensor as it is, which tensor parallelism cuts along ``dim`` if ``cut``."""
    return Packing((Part(name, shape),), dim, cut, dtype=dtype)


def norm(name: str, extent: int) -> Packing:
    """Return the packing of a norm's weight."""
    return Packing((Part(name, (extent,)),), cut=False, norm=True)


def head_dim(config: HFConfig) -> int:
    """Return the extent of one attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def vocabulary(config: HFConfig) -> Rules:
    """Return the rules of embedding, output layer and last norm."""
    shape = (int(config.vocab_size), int(config.hidden_size))
    embedding = "model.embed_tokens.weight"
    output = embedding if config.tie_word_embeddings else "lm_head.weight"
    return {
        "embedding.word_embeddings.weight": Packing((Part(embedding, shape),), padded=True),
        "output_layer.weight": Packing((Part(output, shape),), padded=True),
        "decoder.final_layernorm.weight": norm("model.norm.weight", shape[1]),
    }


def norms(config: HFConfig) -> Rules:
    """Return the rules of the norms before attention and MLP: modules of their own, or fused into the linear layer after them."""
    before = norm("input_layernorm.weight", config.hidden_size)
    after = norm("post_attention_layernorm.weight", config.hidden_size)
    return {
        "input_layernorm.weight": before,
        "self_attention.linear_qkv.layer_norm_weight": before,
        "pre_mlp_layernorm.weight": after,
        "mlp.linear_fc1.layer_norm_weight": after,
    }


def attention(config: HFConfig, *, qkv_bias: bool = False, bias: bool = False, qk_norm: bool = False) -> Rules:
    """Return the rules of grouped-query attention: one parameter holds, for each group, its queries, its key and its value."""
    heads, groups, extent = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    hidden = config.hidden_size
    rules = {
        "self_attention.linear_qkv.weight": _grouped("weight", heads, groups, extent, (hidden,)),
        "self_attention.linear_proj.weight": whole("self_attn.o_proj.weight", hidden, heads * extent, dim=1, cut=True),
    }
    if qkv_bias or bias:
        rules["self_attention.linear_qkv.bias"] = _grouped("bias", heads, groups, extent, ())
    if bias:
        rules["self_attention.linear_proj.bias"] = whole("self_attn.o_proj.bias", hidden)
    if qk_norm:
        rules["self_attention.q_layernorm.weight"] = norm("self_attn.q_norm.weight", extent)
        rules["self_attention.k_layernorm.weight"] = norm("self_attn.k_norm.weight", extent)
    return rules


def _grouped(kind: str, heads: int, groups: int, extent: int, columns: tuple[int, ...]) -> Packing:
    """Return the packing of queries, key and value of one group after the other."""
    each, parts = heads // groups, list[Part]()
    for group in range(groups):
        parts.append(Part(f"self_attn.q_proj.{kind}", (heads * extent, *columns), group * each * extent, each * extent))
        keys_values = (f"self_attn.k_proj.{kind}", f"self_attn.v_proj.{kind}")
        parts += (Part(name, (groups * extent, *columns), group * extent, extent) for name in keys_values)
    return Packing(tuple(parts))


def gated_mlp(config: HFConfig, *, bias: bool = False, ffn: int | None = None, module: str = "mlp", name: str = "mlp") -> Rules:
    """Return the rules of a gated MLP, ``module`` in Megatron and ``name`` in Hugging Face. One parameter holds gate and up."""
    hidden, ffn = config.hidden_size, ffn or config.intermediate_size
    gate_up = (Part(f"{name}.gate_proj.weight", (ffn, hidden)), Part(f"{name}.up_proj.weight", (ffn, hidden)))
    rules = {
        f"{module}.linear_fc1.weight": Packing(gate_up, interleaved=True),
        f"{module}.linear_fc2.weight": whole(f"{name}.down_proj.weight", hidden, ffn, dim=1, cut=True),
    }
    if bias:
        biases = (Part(f"{name}.gate_proj.bias", (ffn,)), Part(f"{name}.up_proj.bias", (ffn,)))
        rules[f"{module}.linear_fc1.bias"] = Packing(biases, interleaved=True)
        rules[f"{module}.linear_fc2.bias"] = whole(f"{name}.down_proj.bias", hidden)
    return rules


def latent_attention(config: HFConfig) -> Rules:
    """Return the rules of multi-head latent attention. Megatron's spec decides whether a rank's down-projections are cut."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    keys, position, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    key_norm = norm("self_attn.kv_a_layernorm.weight", rank)
    rules = {
        "self_attention.linear_kv_down_proj.weight": whole(
            "self_attn.kv_a_proj_with_mqa.weight", rank + position, hidden, cut=True
        ),
        "self_attention.kv_layernorm.weight": key_norm,
        "self_attention.linear_kv_up_proj.layer_norm_weight": key_norm,
        "self_attention.linear_kv_up_proj.weight": whole("self_attn.kv_b_proj.weight", heads * (keys + values), rank, cut=True),
        "self_attention.linear_proj.weight": whole("self_attn.o_proj.weight", hidden, heads * values, dim=1, cut=True),
    }
    queries, low = heads * (keys + position), config.q_lora_rank
    if low is None:
        return {**rules, "self_attention.linear_q_proj.weight": whole("self_attn.q_proj.weight", queries, hidden, cut=True)}
    query_norm = norm("self_attn.q_a_layernorm.weight", low)
    return {
        **rules,
        "self_attention.linear_q_down_proj.weight": whole("self_attn.q_a_proj.weight", low, hidden, cut=True),
        "self_attention.q_layernorm.weight": query_norm,
        "self_attention.linear_q_up_proj.layer_norm_weight": query_norm,
        "self_attention.linear_q_up_proj.weight": whole("self_attn.q_b_proj.weight", queries, low, cut=True),
    }


def router(config: HFConfig, count: int, *, name: str = "mlp.gate", expert_bias: bool = False) -> Rules:
    """Return the rules of the router over ``count`` experts, with the bias that balances them."""
    rules = {"mlp.router.weight": whole(f"{name}.weight", count, config.hidden_size)}
    if expert_bias:
        rules["mlp.router.expert_bias"] = whole(f"{name}.e_score_correction_bias", count, dtype="float32")
    return rules


def prediction(config: HFConfig) -> Rules:
    """Return the rules of what a prediction layer (MTP) has around its Transformer layer."""
    hidden = config.hidden_size
    return {
        "enorm.weight": norm("enorm.weight", hidden),
        "hnorm.weight": norm("hnorm.weight", hidden),
        "eh_proj.weight": whole("eh_proj.weight", hidden, 2 * hidden, cut=True),
        "final_layernorm.weight": norm("shared_head.norm.weight", hidden),
    }


def experts(
    config: HFConfig, count: int, ffn: int, *, stacked: bool, name: str = "mlp", matrices: Sequence[str] = GATE_UP_DOWN
) -> Rules:
    """Return the rules of routed gated experts, each with names of its own or ``stacked`` as in modules of Transformers 5.

    An expert's own names begin with that of the MLP, ``name``, and end with those of its ``matrices``: gate, up and down.
    """
    rules = dict[str, Packing]()
    hidden = config.hidden_size
    gates_up, downs = (count, 2 * ffn, hidden), (count, hidden, ffn)
    for expert in range(count):
        module = f"mlp.experts.{expert}"
        if stacked:
            first = Part("mlp.experts.gate_up_proj", gates_up, 0, ffn, (expert,))
            second = Part("mlp.experts.gate_up_proj", gates_up, ffn, ffn, (expert,))
            last = Part("mlp.experts.down_proj", downs, index=(expert,))
        else:
            gate, up, down = (f"{name}.experts.{expert}.{matrix}.weight" for matrix in matrices)
            first, second, last = Part(gate, (ffn, hidden)), Part(up, (ffn, hidden)), Part(down, (hidden, ffn))
        rules[f"{module}.linear_fc1.weight"] = Packing((first, second), interleaved=True)
        rules[f"{module}.linear_fc2.weight"] = Packing((last,), dim=1)
    return rules
