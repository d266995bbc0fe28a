"""The optimizer's part, on one rank or sharded over several by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from examples.grpo.learning import Batch, advantages, policy_loss
from examples.grpo.policy import log_probabilities
from examples.grpo.settings import Settings
from weightsync_rollouts import Sample

__all__ = ["Learner"]

_CLIP = 1.0


class Learner:
    """Every rank calls :meth:`learn` equally often; the first brings the batch."""

    def __init__(self, model: PreTrainedModel, wish: Settings) -> None:
        self.model = model
        self._updates = wish.updates
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._world > 1:
            mesh = init_device_mesh("cpu", (self._world,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=wish.rate, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(self, groups: Sequence[Sequence[tuple[Sample, float]]]) -> tuple[float, float]:
        """Several steps on one batch. Returns the first one's loss and the share of ratios cut off in all, both over all ranks."""
        batch = self._shared(groups)
        mine = batch.part(self._rank, self._world)
        tokens = float(batch.mask.sum())
        first, clipped = 0.0, 0
        for update in range(self._updates):
            loss = policy_loss(log_probabilities(self.model, mine.tokens), mine)
            (loss.total * (self._world / tokens)).backward()  # type: ignore[no-untyped-call]  # FSDP2 averages over ranks
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad()
            total = torch.tensor([float(loss.total.detach()), float(loss.clipped)])
            if self._world > 1:
                dist.all_reduce(total)
            first = float(total[0]) / tokens if update == 0 else first
            clipped += int(total[1])
        return first, clipped / (tokens * self._updates)

    def _shared(self, groups: Sequence[Sequence[tuple[Sample, float]]]) -> Batch:
        """The first rank's batch, on every rank."""
        parts: tuple[torch.Tensor, ...] = ()
        if self._rank == 0:
            pairs = [pair for group in groups for pair in group]
            weights = [weight for group in groups for weight in advantages([got for _, got in group])]
            batch = Batch.of([sample for sample, _ in pairs], weights)
            if self._world == 1:
                return batch
            parts = (batch.tokens, batch.sampled, batch.weight, batch.mask)
        shape = torch.tensor(list(parts[0].shape) if parts else [0, 0])
        dist.broadcast(shape, src=0)
        rows, length = shape.tolist()
        if not parts:
            floats = (torch.empty(rows, length - 1) for _ in range(3))
            parts = (torch.empty(rows, length, dtype=torch.long), *floats)
        for part in parts:
            dist.broadcast(part, src=0)
        return Batch(*parts)
