"""Rank and world size of this process, from arguments, ``torch.distributed`` or the launcher, and texts that ranks exchange."""

from __future__ import annotations

import torch
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


def from_rank_zero(text: str) -> str:
    """Return what rank 0 of ``torch.distributed`` gave, on every rank; ``text`` itself if it is not initialized."""
    return texts_of_ranks(text)[0] if dist.is_available() and dist.is_initialized() else text


def texts_of_ranks(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return what each rank of ``group``, by default of ``torch.distributed``, gave. Collective, in host memory if it can be.

    Texts travel as tensors: an exchange of objects would be pickles.
    """
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    own = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [bytes(gathered.tolist()).rstrip(b"\0").decode(errors="replace") for gathered in texts]
