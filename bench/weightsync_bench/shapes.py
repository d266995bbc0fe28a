"""Names, shapes and dtypes of real models' tensors, from their configurations, for planning. No weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weightsync.errors import ConfigurationError
from weightsync.model import TensorSpec

_Shapes = dict[str, tuple[int, ...]]
_Count = Annotated[int, Meta(ge=1, le=1 << 24)]
_MOST_TENSORS = 1 << 20


class ModelConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a Hugging Face ``config.json`` that determine shapes."""

    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    vocab_size: _Count
    intermediate_size: _Count = 1
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_qk_norm: bool = False
    model_type: str = ""
    num_experts: _Count | None = None
    """Also named ``n_routed_experts`` and ``num_local_experts``."""
    moe_intermediate_size: _Count | None = None
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    decoder_sparse_step: _Count = 1
    kv_lora_rank: _Count | None = None
    """Set for latent attention, with the next four."""
    q_lora_rank: _Count | None = None
    qk_nope_head_dim: _Count = 128
    qk_rope_head_dim: _Count = 64
    v_head_dim: _Count = 128


_QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}
_QWEN3_MOE: dict[str, Any] = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_key_value_heads": 4}
_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
}  # fmt: skip

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {**_QWEN3, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 12288},
    "qwen3-30b-a3b": {**_QWEN3_MOE, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_QWEN3_MOE, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
                        "moe_intermediate_size": 1536},
    "glm-4.5-air": {"model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
                    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "intermediate_size": 10944,
                    "num_experts": 128, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
                    "attention_bias": True},
    "deepseek-v3": {**_DEEPSEEK, "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128,
                    "num_experts": 256, "first_k_dense_replace": 3},
    "kimi-k2": {**_DEEPSEEK, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_experts": 384,
                "first_k_dense_replace": 1},
}  # fmt: skip
"""Configurations by name, as far as shapes depend on them."""


def read_configuration(model: str) -> dict[str, Any]:
    """Return the configuration of a model.

    Args:
        model: A name of :data:`CONFIGURATIONS`, or the path of a ``config.json``.

    Raises:
        ConfigurationError: ``model`` is neither.
    """
    if model in CONFIGURATIONS:
        return CONFIGURATIONS[model]
    try:
        settings: dict[str, Any] = msgspec.json.decode(Path(model).read_bytes(), type=dict[str, Any])
    except OSError:
        raise ConfigurationError(
            f"unknown model {model!r}: give {', '.join(CONFIGURATIONS)}, or the path of a config.json"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{model} is not a config.json: {error}") from None
    return settings


def tensors_of(settings: Mapping[str, Any], dtype: str = "bfloat16") -> list[TensorSpec]:
    """Return the tensors of a decoder by its configuration, without biases of routers and scales of quantization.

    Covers attention with grouped queries or latent attention, dense and mixture layers, shared experts.

    Args:
        settings: A ``config.json``, decoded. The text part of a model of several modalities is taken.
        dtype: Element type of all tensors.

    Raises:
        ConfigurationError: A key is missing or invalid.
    """
    config = _configuration(settings)
    return [TensorSpec(name, shape, dtype) for name, shape in _shapes(config, config.num_experts or 0).items()]


def tensor_counts(settings: Mapping[str, Any], dtype: str = "bfloat16") -> list[tuple[TensorSpec, int]]:
    """Return the same tensors, but of the experts of a layer only the first, with the number of experts."""
    config = _configuration(settings)
    experts = config.num_experts or 1
    return [(TensorSpec(name, shape, dtype), experts if ".experts." in name else 1) for name, shape in _shapes(config, 1).items()]


def check_heads(settings: Mapping[str, Any], tp: int) -> None:
    """Check that engines can cut a model's attention into ``tp`` parts.

    Raises:
        ConfigurationError: They cannot: a rank would hold a part of a head.
    """
    config = _configuration(settings)
    heads, keys = config.num_attention_heads, config.num_key_value_heads or 1
    if config.kv_lora_rank is not None:
        keys = 1  # latent attention has no heads of keys
    if heads % tp or (keys % tp and tp % keys):
        raise ConfigurationError(
            f"engines refuse tp={tp} for {heads} attention heads and {keys} of keys and values: tp must divide the first, and "
            "divide the others or be a multiple of them"
        )


def _configuration(settings: Mapping[str, Any]) -> ModelConfiguration:
    text = settings.get("text_config")
    keys = {
        "num_experts" if name in ("n_routed_experts", "num_local_experts") else name: value
        for name, value in (text if isinstance(text, Mapping) else settings).items()
        if value is not None
    }
    try:
        config = msgspec.convert(keys, ModelConfiguration)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the model's configuration does not say what its shapes are: {error}") from None
    if config.num_hidden_layers * (10 + 3 * (config.num_experts or 0)) > _MOST_TENSORS:
        raise ConfigurationError(f"the model's configuration describes more than {_MOST_TENSORS:,} tensors")
    return config


def _shapes(config: ModelConfiguration, experts: int) -> _Shapes:
    """Return shapes by name, of each layer's experts the first ``experts``."""
    hidden = config.hidden_size
    shapes: _Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes |= _grouped_query(layer, config) if config.kv_lora_rank is None else _latent(layer, config)
        shapes |= _feed_forward(f"{layer}.mlp", number, config, experts)
    return shapes


def _grouped_query(layer: str, config: ModelConfiguration) -> _Shapes:
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = config.head_dim or hidden // heads
    keys = (config.num_key_value_heads or heads) * head
    attention = f"{layer}.self_attn"
    shapes: _Shapes = {
        f"{attention}.q_proj.weight": (heads * head, hidden),
        f"{attention}.k_proj.weight": (keys, hidden),
        f"{attention}.v_proj.weight": (keys, hidden),
        f"{attention}.o_proj.weight": (hidden, heads * head),
    }
    if config.attention_bias or config.model_type.startswith("qwen2"):
        shapes |= {f"{attention}.{name}_proj.bias": (heads * head if name == "q" else keys,) for name in "qkv"}
    if config.use_qk_norm or config.model_type.startswith("qwen3"):
        shapes |= {f"{attention}.q_norm.weight": (head,), f"{attention}.k_norm.weight": (head,)}
    return shapes


def _latent(layer: str, config: ModelConfiguration) -> _Shapes:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank or 0
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    attention = f"{layer}.self_attn"
    shapes: _Shapes = {
        f"{attention}.kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, hidden),
        f"{attention}.kv_a_layernorm.weight": (latent,),
        f"{attention}.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        f"{attention}.o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        return shapes | {f"{attention}.q_proj.weight": (query, hidden)}
    return shapes | {
        f"{attention}.q_a_proj.weight": (config.q_lora_rank, hidden),
        f"{attention}.q_a_layernorm.weight": (config.q_lora_rank,),
        f"{attention}.q_b_proj.weight": (query, config.q_lora_rank),
    }


def _feed_forward(mlp: str, layer: int, config: ModelConfiguration, experts: int) -> _Shapes:
    hidden = config.hidden_size
    if config.num_experts is None or layer < config.first_k_dense_replace or (layer + 1) % config.decoder_sparse_step:
        return _gated(mlp, hidden, config.intermediate_size)
    inner = config.moe_intermediate_size or config.intermediate_size
    shapes: _Shapes = {f"{mlp}.gate.weight": (config.num_experts, hidden)}
    if config.n_shared_experts:
        shapes |= _gated(f"{mlp}.shared_experts", hidden, inner * config.n_shared_experts)
    for expert in range(experts):
        shapes |= _gated(f"{mlp}.experts.{expert}", hidden, inner)
    return shapes


def _gated(mlp: str, hidden: int, inner: int) -> _Shapes:
    return {
        f"{mlp}.gate_proj.weight": (inner, hidden),
        f"{mlp}.up_proj.weight": (inner, hidden),
        f"{mlp}.down_proj.weight": (hidden, inner),
    }


def qwen3_8b() -> list[TensorSpec]:
    """Qwen3-8B: dense, 399 tensors, 16.4 GB in bfloat16."""
    return tensors_of(CONFIGURATIONS["qwen3-8b"])


def qwen3_30b_a3b() -> list[TensorSpec]:
    """Qwen3-30B-A3B: a mixture of 128 experts in 48 layers, 18,867 tensors, 61.1 GB in bfloat16."""
    return tensors_of(CONFIGURATIONS["qwen3-30b-a3b"])


def qwen3_30b_a3b_24_layers() -> list[TensorSpec]:
    """Tensors of the first half of Qwen3-30B-A3B's layers, for GPUs on which the whole does not fit twice."""
    return tensors_of({**CONFIGURATIONS["qwen3-30b-a3b"], "num_hidden_layers": 24})


def one_trillion() -> list[TensorSpec]:
    """Kimi-K2: 384 experts in 60 of 61 layers, latent attention, 1.03e12 parameters in 69,915 bfloat16 tensors."""
    return tensors_of(CONFIGURATIONS["kimi-k2"])
