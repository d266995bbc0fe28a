# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""Prints, for some of vLLM's own model classes, whether a traced layout gives the bits that their own ``load_weights`` gives.

``python vllm_tracing.py FOLDER RANK RANKS PARALLEL``, with vLLM installed. PARALLEL has arguments of its engine as JSON. Models are
built as vLLM's workers build them, without an engine.
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
    """By the project's own plan of all ranks and its copies. What the others hold is filled too, in memory of this process."""
    from tests.integration.tracing.tracing_delivery import deliver, scramble

    from weightsync.model import Box
    from weightsync.tensors.shards import Shard

    scramble(shards, torch.Generator().manual_seed(1))
    everyone = [None] * ranks
    torch.distributed.all_gather_object(everyone, [(one.name, one.shape, one.box.starts, one.box.stops) for one in shards])
    layouts = [
        [Shard(name, shape, Box(starts, stops), torch.empty(Box(starts, stops).shape, dtype=checkpoint[name].dtype))
         for name, shape, starts, stops in boxes]
        for boxes in everyone
    ]  # fmt: skip
    layouts[torch.distributed.get_rank()] = shards
    deliver(manifest, checkpoint, layouts)


def compare(name, folder, rank, ranks, parallel):
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
    asked = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32, **parallel)
    chosen = asked.create_engine_config()
    manifest = checkpoint_of(str(folder), None, chosen.model_config.hf_config).manifest
    from safetensors.torch import load_file

    checkpoint = load_file(folder / "model.safetensors")
    with set_current_vllm_config(chosen):
        device = (
            "cpu" if "enable_expert_parallel" in parallel else "meta"
        )  # where vLLM counts the experts of a rank by a tensor's values
        twin, wanted, engine = build(chosen, device), build(chosen, "cpu"), build(chosen, "cpu")
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
        "tensors": len(manifest), "held": len({shard.name for shard in shards}),
    }  # fmt: skip


def main(folder, rank, ranks, parallel):
    torch.set_num_threads(1)
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if "data_parallel_size" in parallel:
        parallel["data_parallel_rank"] = rank
    chosen = VllmConfig(parallel_config=ParallelConfig(**parallel))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    alone = (1, 0) if "data_parallel_size" in parallel else (ranks, rank)
    with set_current_vllm_config(chosen):
        init_distributed_environment(*alone, local_rank=rank, backend="gloo")
        initialize_model_parallel(parallel.get("tensor_parallel_size", 1), parallel.get("pipeline_parallel_size", 1))
    for place, name in enumerate(MODELS):
        if "enable_expert_parallel" in parallel and name != "experts":
            continue
        found = compare(name, Path(folder) / str(place), rank, ranks, parallel)
        print("RESULT " + json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
