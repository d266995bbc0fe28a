"""A rank of QLoRA: PEFT trains an adapter over a base that bitsandbytes holds in 4 bits, and the adapter is published alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import weightsync
from weightsync.errors import ConfigurationError

IDS = torch.arange(1, 25)[None]


def quantized(directory: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The checkpoint in ``directory`` in NF4, as bitsandbytes quantizes it while it is loaded."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=config, dtype=dtype)


def adapted(base: Any) -> Any:
    """A PEFT model over a quantized base."""
    torch.manual_seed(3)
    prepared = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    return get_peft_model(prepared, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def train(model: Any, steps: int = 5) -> None:
    """Optimizer steps, after which the adapter changes the answers."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def refused(model: Any) -> str:
    """Why the base is not published."""
    try:
        weightsync.base_weights(model)
    except ConfigurationError as error:
        return str(error)
    return ""


def main(rank: int, world_size: int, directory: str, coordinator: str) -> None:
    torch.set_num_threads(1)
    model = adapted(quantized(directory))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        base = {parameter for parameter in model.parameters() if not parameter.requires_grad}
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=base)
        fully_shard(model, mesh=mesh, ignored_params=base)
    seen: dict[str, Any] = {"refused": refused(model), "logits": []}
    with weightsync.Adapters(model, base=None, coordinator=coordinator, rank=rank, world_size=world_size, source="qlora") as math:
        for _ in range(2):
            train(model)
            result = math.publish("alice/math", timeout=60)
            with torch.no_grad():
                seen["logits"].append(model(input_ids=IDS).logits[0, -1].float().tolist())
            (replica,) = result.replicas
            seen["verified"] = [replica.verified, replica.error]
    print(json.dumps(seen), flush=True)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
