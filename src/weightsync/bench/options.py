"""What ``weightsync bench`` was asked for."""

from __future__ import annotations

import msgspec

from weightsync.errors import ConfigurationError

__all__ = ["BenchOptions"]


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Raises :class:`~weightsync.errors.ConfigurationError` for sizes that cannot be measured."""

    suite: str = "cpu"
    """``cpu`` (all of the following), ``plan`` (digest and planning) or ``transfer`` (whole rounds);
    ``gpu``: whole rounds between GPUs."""
    size: int = 1 << 30
    """Bytes of the model."""
    tensors: int = 0
    """Only cases with so many tensors; 0 for all."""
    only: tuple[str, ...] = ()
    """Only cases whose names contain one of these."""
    rounds: int = 5
    """Rounds that are measured, after the one that sets up."""
    json: bool = False
    model: str = "qwen3-8b"
    """Suite ``gpu``: ``qwen3-30b-a3b``, ``qwen3-8b``, or the path of a Hugging Face ``config.json``."""
    source: str = "fsdp=1"
    """Suite ``gpu``: how many trainer ranks."""
    target: str = "tp=1"
    """Suite ``gpu``: how many engine ranks."""
    placement: str = "colocated"
    """Suite ``gpu``: whether they share GPUs."""
    delivery: str = ""
    """Suite ``gpu``: ``direct``, ``streamed``, or both."""
    transport: str = "cuda_ipc"
    """Suite ``gpu``: ``cuda_ipc``, ``nixl``, or ``nccl`` (to other GPUs only)."""
    bucket_bytes: int = 0
    """Suite ``gpu``, streamed: of one staging bucket; 0: from the free memory."""
    buffers: int = 2
    """Suite ``gpu``, streamed."""

    def __post_init__(self) -> None:
        """Check each value."""
        if self.size < 1 << 20:
            raise ConfigurationError(f"a benchmark needs at least 1 MiB, not {self.size} bytes")
        if self.rounds < 1:
            raise ConfigurationError("a benchmark needs at least one round")
        if self.delivery not in ("", "direct", "streamed"):
            raise ConfigurationError(f"delivery is direct or streamed, not {self.delivery!r}")
        if self.transport not in ("cuda_ipc", "nccl", "nixl"):
            raise ConfigurationError(f"transport is cuda_ipc, nccl or nixl, not {self.transport!r}")
        if self.transport == "nccl" and self.placement != "separate":
            raise ConfigurationError("NCCL does not send from a GPU to itself: give placement separate with transport nccl")
        if self.bucket_bytes < 0 or self.buffers not in (1, 2):
            raise ConfigurationError("bucket_bytes must not be negative, and there are 1 or 2 buffers")
