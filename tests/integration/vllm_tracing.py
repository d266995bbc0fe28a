# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""Prints, for some of vLLM's own model classes, whether a traced layout gives the bits that their own ``load_weights`` gives.

``python vllm_tracing.py FOLDER RANK RANKS``, with vLLM installed. Models are built as vLLM's workers build them, without an engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
import transformers

COMMON = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
INNER = {"moe_intermediate_size": 32}
MODELS = {
    "dense, grouped query": ("LlamaConfig", {"num_key_value_heads": 2}),
    "norms of queries and keys": ("Qwen3Config", {"num_key_value_heads": 4}),
    "tied, biased": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": ("Qwen3MoeConfig", {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2} | INNER),
    "fused in the checkpoint": ("Phi3Config", {"num_key_value_heads": 2}),
}  # fmt: skip


def build(config, device):
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()  # one model to an engine, vLLM thinks
    with set_default_torch_dtype(torch.bfloat16), torch.device(device):
        return initialize_model(config)


def install(manifest, checkpoint, shards, ranks):
    """By the project's own plan and copies; what one rank of several holds is no plan, so there by hand."""
    from tests.integration.tracing_delivery import deliver, scramble

    scramble(shards, torch.Generator().manual_seed(1))
    if ranks == 1:
        deliver(manifest, checkpoint, [shards])
    for shard in shards if ranks > 1 else ():
        places = tuple(slice(start, stop) for start, stop in zip(shard.box.starts, shard.box.stops, strict=True))
        shard.tensor.copy_(checkpoint[shard.name][places])


def compare(name, folder, rank, ranks):
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from weightsync.engines.hf_checkpoint import checkpoint_of
    from weightsync.tracing.tracer import trace_loader

    kind, more = MODELS[name]
    torch.manual_seed(11)
    config = getattr(transformers, kind)(**(COMMON | more))
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if rank == 0:
        made.save_pretrained(folder)
    torch.distributed.barrier()
    asked = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32, tensor_parallel_size=ranks)
    chosen = asked.create_engine_config()
    manifest = checkpoint_of(str(folder), None, chosen.model_config.hf_config).manifest
    from safetensors.torch import load_file

    checkpoint = load_file(folder / "model.safetensors")
    with set_current_vllm_config(chosen):
        twin, wanted, engine = build(chosen, "meta"), build(chosen, "cpu"), build(chosen, "cpu")
        traced = trace_loader(twin.load_weights, twin, manifest)
        for model in (wanted, engine):  # as every engine that serves once did; so its padding is zero
            model.load_weights(checkpoint.items())
        shards = traced.shards(engine)
        changed = {key: torch.randn_like(value) for key, value in checkpoint.items()}
        wanted.load_weights(changed.items())
        install(manifest, changed, shards, ranks)
    values = dict(engine.named_parameters())
    different = [
        parameter
        for parameter, value in wanted.named_parameters()
        if not torch.equal(value.view(torch.int16), values[parameter].view(torch.int16))
    ]
    return {
        "model": type(engine).__name__, "reason": traced.reason(ranks), "different": different, "parameters": len(values),
        "tensors": len(manifest),
    }  # fmt: skip


def main(folder, rank, ranks):
    torch.set_num_threads(1)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{folder}/meeting", rank, "gloo")
        initialize_model_parallel(ranks)
    for place, name in enumerate(MODELS):
        found = compare(name, Path(folder) / str(place), rank, ranks)
        print("RESULT " + json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
