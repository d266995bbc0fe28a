"""Model families: which blocks each is made of. A family is a function from a Hugging Face configuration to rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.integrations.megatron.blocks import (
    HFConfig,
    Rules,
    attention,
    experts,
    gated_mlp,
    latent_attention,
    norms,
    prediction,
    router,
    vocabulary,
)


@dataclass(frozen=True)
class Family:
    """How models of one architecture are named and laid out.

    ``layer(config, number, stacked)`` has the rules of layer ``number``, counted from zero; Hugging Face names in them are
    relative to ``model.layers.<number>``. ``stacked`` asks for the names of Transformers' modules, which stack the experts of a
    layer, instead of a checkpoint's. ``outside(config)`` has the rules of everything that is not in a layer, with full names.
    ``prediction(config)`` has the rules of what a prediction layer adds to a layer, if its family has such.
    ``zero_centered_norms``: the checkpoint holds norm weights minus one, as Megatron does with ``layernorm_zero_centered_gamma``.
    """

    layer: Callable[[HFConfig, int, bool], Rules]
    outside: Callable[[HFConfig], Rules] = vocabulary
    prediction: Callable[[HFConfig], Rules] | None = None
    zero_centered_norms: bool = False


def _llama(config: HFConfig, _: int, __: bool) -> Rules:
    return {**norms(config), **attention(config, bias=config.attention_bias), **gated_mlp(config, bias=config.mlp_bias)}


def _qwen2(config: HFConfig, _: int, __: bool) -> Rules:
    return {**norms(config), **attention(config, qkv_bias=True), **gated_mlp(config)}


def _qwen3(config: HFConfig, _: int, __: bool) -> Rules:
    return {**norms(config), **attention(config, qk_norm=True, bias=config.attention_bias), **gated_mlp(config)}


def _qwen3_moe(config: HFConfig, number: int, stacked: bool) -> Rules:
    attended = {**norms(config), **attention(config, qk_norm=True, bias=config.attention_bias)}
    count = _experts(config)
    if number in config.mlp_only_layers or not count or (number + 1) % config.decoder_sparse_step:
        return {**attended, **gated_mlp(config)}
    return {**attended, **router(config, count), **experts(config, count, config.moe_intermediate_size, stacked=stacked)}


def _mixtral(config: HFConfig, _: int, stacked: bool) -> Rules:
    count, name = _experts(config), "mlp" if stacked else "block_sparse_moe"
    return {
        **norms(config),
        **attention(config),
        **router(config, count, name=f"{name}.gate"),
        **experts(config, count, config.intermediate_size, stacked=stacked, name=name, matrices=("w1", "w3", "w2")),
    }


def _deepseek_v3(config: HFConfig, number: int, stacked: bool) -> Rules:
    attended = {**norms(config), **latent_attention(config)}
    if number < config.first_k_dense_replace:
        return {**attended, **gated_mlp(config)}
    count, ffn = _experts(config), config.moe_intermediate_size
    shared = "mlp.shared_experts"
    return {
        **attended,
        **router(config, count, expert_bias=True),
        **experts(config, count, ffn, stacked=stacked),
        **gated_mlp(config, ffn=ffn * config.n_shared_experts, module=shared, name=shared),
    }


def _experts(config: HFConfig) -> int:
    """How many routed experts a layer has: the attribute has another name in every family."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None) is not None), 0)


FAMILIES = {
    "deepseek_v3": Family(_deepseek_v3, prediction=prediction),
    "llama": Family(_llama),
    "mixtral": Family(_mixtral),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "qwen3_moe": Family(_qwen3_moe),
}
"""Families by the ``model_type`` of a Hugging Face configuration. Add one's own here, or pass it to ``hf_state``."""
NO_VIEWS = {
    "gpt_oss": "its checkpoints alternate single columns of gate and up, so that every column would be a box: 4.4 million for "
    "the experts of gpt-oss-20b, copied two bytes at a time"
}
"""Families whose checkpoints are no views of Megatron's parameters, and why."""
