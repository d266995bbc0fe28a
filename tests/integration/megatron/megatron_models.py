"""Real Megatron-core models on the CPU for the tests: any mesh, a Hugging Face configuration, known weights."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.integration.megatron.megatron_cases import PADDED, Case, expert_count, hf_config
from torch import nn

__all__ = ["build", "fill", "initialize", "wrapped"]

_LAYER = re.compile(r"(decoder|mtp)\.layers\.([0-9]+)\.(.+)")
_EXPERT = re.compile(r"\.local_experts\.([0-9]+)\.")


def initialize(case: Case) -> None:
    """Make Megatron's process groups."""
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp if case.vpp > 1 else None,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )


def build(case: Case) -> list[nn.Module]:
    """The chunks of this rank."""
    hf = hf_config(case.family, case.changes)
    config = _config(hf, case)
    chunks: list[nn.Module] = []
    for stage in range(case.vpp):
        virtual = stage if case.vpp > 1 else None
        spec = _spec(hf, config, virtual)
        chunks.append(
            GPTModel(
                config,
                spec,
                mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False, vp_stage=virtual) if case.mtp else None,
                vocab_size=PADDED,
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
                share_embeddings_and_output_weights=hf.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=int(hf.rope_parameters["rope_theta"]),
                parallel_output=False,
                vp_stage=virtual,
            )
        )
    return chunks


def wrapped(chunks: list[nn.Module]) -> list[nn.Module]:
    """The same as Megatron's get_model() returns them, which converts what is not in the model's dtype: the norms."""
    models = [Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk for chunk in chunks]  # type: ignore[union-attr]
    for model in models:
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module._maintain_float32_expert_bias()  # as it does itself when weights are loaded
    return models


def _config(hf: Any, case: Case) -> TransformerConfig:
    dtype = getattr(torch, case.dtype)
    given: dict[str, Any] = dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.dtype == "bfloat16",
        add_bias_linear=bool(getattr(hf, "mlp_bias", False)),
        add_qkv_bias=hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        normalization="RMSNorm",
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=case.first_stage,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    count = expert_count(hf)
    if not count:
        return TransformerConfig(**given)
    given |= dict(
        num_moe_experts=count,
        moe_ffn_hidden_size=hf.intermediate_size if hf.model_type == "mixtral" else hf.moe_intermediate_size,
        moe_router_topk=hf.num_experts_per_tok,
        moe_token_dispatcher_type="allgather",
        moe_layer_freq=[int(number >= _dense_layers(hf)) for number in range(hf.num_hidden_layers)],
    )
    if hf.model_type not in ("deepseek_v3", "glm4_moe"):
        return TransformerConfig(**given)
    given |= dict(
        moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    if hf.model_type == "glm4_moe":
        return TransformerConfig(**given)
    given |= dict(
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        rope_type="rope",
        mtp_num_layers=case.mtp or None,
    )
    return MLATransformerConfig(**given)


def _dense_layers(hf: Any) -> int:
    return len(getattr(hf, "mlp_only_layers", None) or ()) or int(getattr(hf, "first_k_dense_replace", 0))


def _spec(hf: Any, config: TransformerConfig, stage: int | None) -> Any:
    if expert_count(hf):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
        if config.multi_latent_attention:  # whose core has no weights, and exists in TransformerEngine only
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = IdentityOp
        return block
    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")


@torch.no_grad()
def fill(chunks: list[nn.Module], version: int) -> None:
    """Give every parameter values that depend on what it is in the whole model, so that copies are equal, and on ``version``."""
    tensor, expert_tensor = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    for chunk in chunks:
        tensors = [*chunk.named_parameters(), *((name, value) for name, value in chunk.named_buffers() if "expert_bias" in name)]
        for name, value in tensors:
            rank = expert_tensor if ".experts." in name else tensor
            cut = rank if getattr(value, "tensor_model_parallel", False) else 0
            match = _LAYER.fullmatch(name)
            if match:
                layer: Any = chunk.get_submodule(f"{match[1]}.layers.{match[2]}")
                name = f"{match[1]}.{layer.layer_number}.{match[3]}"
                expert = _EXPERT.search(name)
                if expert:
                    numbers = getattr(layer, "transformer_layer", layer).mlp.local_expert_indices
                    name = name.replace(expert[0], f".{numbers[int(expert[1])]}.")
            if chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{cut}/{version}".encode()))
            values = torch.randn(value.shape, generator=generator) * 0.1
            value.copy_(values + 1 if "norm" in name else values)
