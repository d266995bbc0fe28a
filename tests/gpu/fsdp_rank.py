"""A rank of a real FSDP2 training: ``python -m tests.gpu.fsdp_rank RANK WORLD FOLDER VERSIONS``.

A Transformers model under ``fully_shard``, over NCCL; an optimizer step before every version, which is published in place. Rank 0
then writes the whole weights, gathered by FSDP itself, to ``FOLDER/VERSION.safetensors``. The environment says where the
coordinator is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import weightsync

__all__ = ["build"]


def build(device: str) -> PreTrainedModel:
    """The model: odd sizes, which two ranks cannot share evenly."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=211, hidden_size=64, intermediate_size=93, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config)
    torch.nn.Module.to(made, device, torch.bfloat16)
    return made


def main() -> None:
    rank, world, folder, versions = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, device_id=device)
    model = build(f"cuda:{rank}")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with weightsync.Trainer(model) as trainer:
        for version in range(1, versions + 1):
            ids = torch.randint(3, 211, (2, 17), device=device, generator=torch.Generator(device).manual_seed(version * 10 + rank))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result = trainer.publish(version, timeout=60)
            whole = {}
            for name, value in model.state_dict().items():
                whole[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()
            if rank == 0:
                save_file(whole, folder / f"{version}.safetensors")
                (replica,) = result.replicas
                seen = [replica.delivery, list(replica.transports), replica.verified, trainer._role.live]
                print("RESULT " + json.dumps(seen), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
