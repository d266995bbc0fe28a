"""The trainer: a small language model under FSDP2, AdamW, text made from a seed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from examples.demo.tokenizer import build_tokenizer, token_stream

__all__ = ["Training", "shard_model"]

_SEQUENCE = 48
_BATCH = 8
_STREAM = 60_000
_RATE = 4e-3


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


class Training:
    """One rank's part of the training; every rank calls :meth:`step` equally often."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        shard_model(model)
        model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._text = torch.tensor(token_stream(build_tokenizer(seed), seed, _STREAM))
        self._picks = torch.Generator().manual_seed(seed * 1009 + dist.get_rank())

    def step(self) -> float:
        """One batch of this rank's own, one optimizer step. Returns the loss averaged over ranks, before the step."""
        starts = torch.randint(len(self._text) - _SEQUENCE, (_BATCH,), generator=self._picks)
        batch = torch.stack([self._text[start : start + _SEQUENCE] for start in starts.tolist()])
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()
