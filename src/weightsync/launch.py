"""Which rank of how many this process is: as told, as torch.distributed knows, or as the launcher said."""

from __future__ import annotations

import torch.distributed as dist

from weightsync.config import launched_place
from weightsync.errors import ConfigurationError

__all__ = ["place_in_world"]


def place_in_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: an argument, else what ``torch.distributed`` or else torchrun or else Slurm says, else 0 of 1.

    Raises :class:`~weightsync.errors.ConfigurationError` for a rank that is none of so many, and for half of a launcher's pair.
    """
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            found = dist.get_rank(), dist.get_world_size()
        else:
            found = launched_place() or (0, 1)
        rank, world_size = found[0] if rank is None else rank, found[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is not one of {world_size} ranks")
    return rank, world_size
