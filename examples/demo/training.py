"""The trainer: a small language model under FSDP2, AdamW, text made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from examples.demo.oracle import checkpoint_path, save_checkpoint
from examples.demo.records import Order
from examples.demo.settings import RATE, OptimizerName
from examples.demo.tokenizer import build_tokenizer, token_stream
from weightsync.model import FIRST_EPOCH

__all__ = ["BETAS", "Training", "batches", "shard_model"]

_SEQUENCE = 48
_BATCH = 8
_STREAM = 60_000
BETAS = (0.9, 0.95)


def shard_model(model: PreTrainedModel) -> None:
    """FSDP2 over all ranks of the default group, layer by layer.

    Weights stay bfloat16. They are multiplied in float32, which a CPU without bfloat16 units does several times faster, and
    gradients are averaged in float32.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def batches(seed: int, rank: int, epoch: int = FIRST_EPOCH) -> Iterator[torch.Tensor]:
    """Yield batches of the demo's text, other ones for each ``rank`` and in each ``epoch``."""
    text = torch.tensor(token_stream(build_tokenizer(seed), seed, _STREAM))
    picks = torch.Generator().manual_seed(seed * 1009 + rank + 1_000_003 * (epoch - FIRST_EPOCH))
    while True:
        starts = torch.randint(len(text) - _SEQUENCE, (_BATCH,), generator=picks)
        yield torch.stack([text[start : start + _SEQUENCE] for start in starts.tolist()])


def optimizers(model: PreTrainedModel, rate: float, name: OptimizerName) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or, with ``muon``, for those that are no hidden layer's matrix."""
    everything = list(model.parameters())
    matrices = [value for key, value in model.model.layers.named_parameters() if value.dim() == 2] if name == "muon" else []
    taken = {id(value) for value in matrices}
    rest = [value for value in everything if id(value) not in taken]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=rate, betas=BETAS, weight_decay=0.0)]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0))
    return made


class Training:
    """One rank's part of the training; every rank calls :meth:`step` and :meth:`save` equally often.

    With ``masters`` weights are float32, and published in bfloat16; otherwise they are bfloat16.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        epoch: int = FIRST_EPOCH,
        *,
        rate: float = RATE,
        optimizer: OptimizerName = "adamw",
        masters: bool = False,
    ) -> None:
        self.model = self.state = model.float() if masters else model
        self.dtype = torch.bfloat16 if masters else None
        shard_model(model)
        model.train()
        self._optimizer, *self._more = optimizers(model, rate, optimizer)
        self.batches = batches(seed, dist.get_rank(), epoch)

    def step(self) -> float:
        """One batch of this rank's own, one optimizer step. Returns the loss averaged over ranks, before the step."""
        batch = next(self.batches)
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in (self._optimizer, *self._more):
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def save(self, directory: Path, version: Order) -> None:
        """Save the oracle's checkpoint of ``version`` (see :func:`~examples.demo.oracle.save_checkpoint`)."""
        save_checkpoint(self.model, directory, version, self.dtype)

    def save_optimizer(self, directory: Path, version: Order) -> None:
        """Save this rank's part of the optimizer's state beside the checkpoint of ``version``."""
        state = self._optimizer.state_dict()["state"]
        tensors = {f"{index}.{key}": _local(value) for index, entry in state.items() for key, value in entry.items()}
        save_file(tensors, _optimizer_path(directory, version))

    def resume(self, directory: Path, version: Order) -> None:
        """Go on from the checkpoint of ``version`` and the optimizer's state beside it, with as many ranks as saved them."""
        whole = StateDictOptions(full_state_dict=True, strict=False)  # a tied head is stored once
        weights: dict[str, Any] = {**load_file(checkpoint_path(directory, version))}
        set_model_state_dict(self.model, weights, options=whole)
        saved = load_file(_optimizer_path(directory, version))
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, parameter in enumerate(self.model.parameters()):
            state[index] = {"step": saved[f"{index}.step"]}
            for key in ("exp_avg", "exp_avg_sq"):
                state[index][key] = torch.zeros_like(parameter, requires_grad=False)
                _local(state[index][key]).copy_(saved[f"{index}.{key}"])
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer_path(directory: Path, version: Order) -> Path:
    return checkpoint_path(directory, version).with_suffix(f".optimizer-{dist.get_rank()}")
