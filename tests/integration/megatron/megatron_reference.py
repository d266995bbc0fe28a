"""The reference: all ranks' raw Megatron parameters, gathered and converted to Hugging Face names in the plainest way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.integration.megatron.megatron_cases import Case, expert_count, hf_config

__all__ = ["adapter_reference", "reference", "stacked"]

Tensors = dict[str, torch.Tensor]


def reference(case: Case, folder: Path, version: int) -> Tensors:
    """The Hugging Face state dict of the model that the ranks hold."""
    hf = hf_config(case.family, case.changes)
    whole = {name.replace(".to_wrap.", "."): value for name, value in _gathered(case, folder, version, hf).items()}
    whole = {name: value for name, value in whole.items() if ".adapter." not in name}
    out: Tensors = {}
    embedding = whole.pop("embedding.word_embeddings.weight")[0]
    out["model.embed_tokens.weight"] = embedding[: hf.vocab_size]
    if "output_layer.weight" in whole:
        output = whole.pop("output_layer.weight")[0]
        if hf.tie_word_embeddings:
            assert torch.equal(output, embedding)
        out["lm_head.weight"] = output[: hf.vocab_size]
    else:
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    out["model.norm.weight"] = whole.pop("decoder.final_layernorm.weight")[0]
    for number in range(hf.num_hidden_layers):
        prefix = f"decoder.layers.{number}."
        layer = {name.removeprefix(prefix): whole.pop(name) for name in list(whole) if name.startswith(prefix)}
        out |= {f"model.layers.{number}.{name}": value for name, value in _layer(layer, hf).items()}
    if case.mtp:
        last = f"model.layers.{hf.num_hidden_layers}."
        layer = {name.removeprefix("mtp.layers.0."): whole.pop(name) for name in list(whole) if name.startswith("mtp.layers.0.")}
        out |= {last + name: layer.pop(name)[0] for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
        out[last + "shared_head.norm.weight"] = layer.pop("final_layernorm.weight")[0]
        inner = {name.removeprefix("transformer_layer."): value for name, value in layer.items()}
        out |= {last + name: value for name, value in _layer(inner, hf).items()}
        out[last + "embed_tokens.weight"] = out["model.embed_tokens.weight"]
        out[last + "shared_head.head.weight"] = out["lm_head.weight"]
    assert not whole, f"the reference converts no {sorted(whole)}"
    return out


def adapter_reference(case: Case, folder: Path, version: int) -> Tensors:
    """The adapter of the model that the ranks hold, under PEFT's names."""
    hf = hf_config(case.family, case.changes)
    out: Tensors = {}
    whole = _gathered(case, folder, version, hf)
    for name, gathered in whole.items():
        match = re.fullmatch(r"decoder\.layers\.([0-9]+)\.(.+)\.adapter\.linear_out\.weight", name)
        if match:  # B has the rows of the layer's weight, and each tensor in it has the same A
            into, _ = whole[name.replace("linear_out", "linear_in")]
            for label, matrix in _layer({f"{match[2]}.weight": gathered}, hf).items():
                module = f"base_model.model.model.layers.{match[1]}.{label.removesuffix('.weight')}"
                out |= {f"{module}.lora_A.weight": into, f"{module}.lora_B.weight": matrix}
    return out


def _gathered(case: Case, folder: Path, version: int, hf: Any) -> dict[str, tuple[torch.Tensor, list[torch.Tensor]]]:
    """By global Megatron name, the parameter put together along its dimension, and the ranks' parts."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    dims: dict[str, int] = {}
    for rank in range(case.world):
        tp, pp, ep, etp, cut = json.loads((folder / f"place-{rank}.json").read_text())
        for label, value in load_file(folder / f"{version}-{rank}.safetensors").items():
            chunk, _, name = label.partition("/")
            first = case.layers_of(pp, int(chunk), hf.num_hidden_layers)
            name = re.sub(r"(?<=^decoder\.layers\.)[0-9]+", lambda match, first=first: str(first + int(match[0])), name)  # type: ignore[misc]
            expert = re.search(r"local_experts\.([0-9]+)", name)
            if expert:
                number = ep * (expert_count(hf) // case.ep) + int(expert[1])
                name = name.replace(expert[0], f"local_experts.{number}")
            dims[name] = cut[label]
            at = (etp if expert else tp) if cut[label] >= 0 else 0
            before = parts.setdefault(name, {}).setdefault(at, value)
            assert torch.equal(before, value), f"copies of {name} differ"
    whole = {}
    for name, by_rank in parts.items():
        ordered = [by_rank[at] for at in sorted(by_rank)]
        whole[name] = (torch.cat(ordered, dims[name]) if dims[name] >= 0 else ordered[0], ordered)
    return whole


def stacked(tensors: Tensors) -> Tensors:
    """The same under the names of Transformers' modules, which stack the experts of a layer."""
    out: Tensors = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.([0-9]+)\.(\w+)\.weight", name)
        if match:
            kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(match[3], match[3])
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[kind] = value
        else:
            out[name.replace("block_sparse_moe.", "mlp.")] = value
    for prefix, each in experts.items():
        ordered = [each[number] for number in sorted(each)]
        gates_up = [torch.cat([one["gate_proj"], one["up_proj"]]) for one in ordered]
        out[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(gates_up)
        out[f"{prefix}mlp.experts.down_proj"] = torch.stack([one["down_proj"] for one in ordered])
    return out


def _layer(layer: dict[str, tuple[torch.Tensor, list[torch.Tensor]]], hf: Any) -> Tensors:
    plain = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.linear_fc2.bias": "mlp.down_proj.bias",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    }
    if hf.model_type == "mixtral":
        plain["mlp.router.weight"] = "block_sparse_moe.gate.weight"
    if hf.model_type == "deepseek_v3":
        plain |= {
            "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
            "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
            "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
            "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
            "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
            "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        }
    out: Tensors = {}
    for name, (value, parts) in layer.items():
        kind = name.rpartition(".")[2]
        if name in plain:
            out[plain[name]] = value
        elif name.startswith("self_attention.linear_qkv."):
            groups, heads = hf.num_key_value_heads, hf.num_attention_heads
            extent = value.shape[0] // (heads + 2 * groups)
            grouped = value.view(groups, heads // groups + 2, extent, *value.shape[1:])
            query, key, values = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            out[f"self_attn.q_proj.{kind}"] = query.reshape(heads * extent, *value.shape[1:])
            out[f"self_attn.k_proj.{kind}"] = key.reshape(groups * extent, *value.shape[1:])
            out[f"self_attn.v_proj.{kind}"] = values.reshape(groups * extent, *value.shape[1:])
        elif ".linear_fc1." in name:
            halves = [part.chunk(2) for part in parts]
            path, gate, up = name.partition(".linear_fc1.")[0].replace("local_experts.", ""), "gate_proj", "up_proj"
            if hf.model_type == "mixtral":
                path, gate, up = path.replace("mlp.", "block_sparse_moe."), "w1", "w3"
            out[f"{path}.{gate}.{kind}"] = torch.cat([half[0] for half in halves])
            out[f"{path}.{up}.{kind}"] = torch.cat([half[1] for half in halves])
        elif name.startswith("mlp.experts."):
            path, down = name.partition(".linear_fc2.")[0].replace("local_experts.", ""), "down_proj"
            if hf.model_type == "mixtral":
                path, down = path.replace("mlp.", "block_sparse_moe."), "w2"
            out[f"{path}.{down}.{kind}"] = value
        else:
            raise AssertionError(f"the reference converts no {name}")
    return out
