"""The trainer: a small language model under FSDP2, AdamW, text made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from examples.demo.oracle import save_checkpoint
from examples.demo.tokenizer import build_tokenizer, token_stream

__all__ = ["BETAS", "RATE", "Training", "batches", "shard_model"]

_SEQUENCE = 48
_BATCH = 8
_STREAM = 60_000
RATE = 4e-3
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


def batches(seed: int, rank: int) -> Iterator[torch.Tensor]:
    """Yield batches of the demo's text, other ones for each ``rank``."""
    text = torch.tensor(token_stream(build_tokenizer(seed), seed, _STREAM))
    picks = torch.Generator().manual_seed(seed * 1009 + rank)
    while True:
        starts = torch.randint(len(text) - _SEQUENCE, (_BATCH,), generator=picks)
        yield torch.stack([text[start : start + _SEQUENCE] for start in starts.tolist()])


class Training:
    """One rank's part of the training; every rank calls :meth:`step` and :meth:`save` equally often."""

    dtype = None
    """What is published has the dtype of the parameters."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = self.state = model
        shard_model(model)
        model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
        self._batches = batches(seed, dist.get_rank())

    def step(self) -> float:
        """One batch of this rank's own, one optimizer step. Returns the loss averaged over ranks, before the step."""
        batch = next(self._batches)
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def save(self, directory: Path, version: int) -> None:
        """Save the oracle's checkpoint of ``version`` (see :func:`~examples.demo.oracle.save_checkpoint`)."""
        save_checkpoint(self.model, directory, version)
