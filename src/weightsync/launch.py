"""Rank and world size of this process, from arguments, ``torch.distributed`` or the launcher."""

from __future__ import annotations

import torch.distributed as dist

from weightsync.config import launched_place
from weightsync.errors import ConfigurationError


def place_in_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: the arguments, else those of ``torch.distributed``, torchrun or Slurm, else 0 and 1.

    Raises:
        ConfigurationError: The rank is outside the world size, or a launcher set only one of the two.
    """
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            rank_and_size = dist.get_rank(), dist.get_world_size()
        else:
            rank_and_size = launched_place() or (0, 1)
        rank, world_size = rank_and_size[0] if rank is None else rank, rank_and_size[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is out of range for {world_size} ranks")
    return rank, world_size
