"""Options of ``weightsync bench``."""

from __future__ import annotations

import msgspec

from weightsync.errors import ConfigurationError


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a benchmark.

    Raises:
        ConfigurationError: A value is invalid.
    """

    suite: str = "cpu"
    """``plan`` (digest and planning), ``transfer`` (whole rounds), ``cpu`` (both of these) or ``gpu`` (rounds between GPUs)."""
    size: int = 1 << 30
    """Bytes of the model."""
    tensors: int = 0
    """Only cases with this number of tensors; 0 for all."""
    only: tuple[str, ...] = ()
    """Only cases whose names contain one of these."""
    rounds: int = 5
    """Measured rounds, after a first one for setup."""
    runs: int = 1
    """How often to run the cases. From two on, a second table has the median of the runs, and their range."""
    json: bool = False
    model: str = "qwen3-8b"
    """Suite ``gpu``: ``qwen3-30b-a3b``, ``qwen3-8b``, or the path of a Hugging Face ``config.json``."""
    source: str = "fsdp=1"
    """Suite ``gpu``: trainer ranks, ``fsdp=N``."""
    target: str = "tp=1"
    """Suite ``gpu``: engine ranks, ``tp=N``."""
    placement: str = "colocated"
    """Suite ``gpu``: whether trainer and engine ranks share GPUs: ``colocated`` or ``separate``."""
    delivery: str = ""
    """Suite ``gpu``: ``direct`` or ``streamed``; empty for both."""
    transport: str = "cuda_ipc"
    """Suite ``gpu``: ``cuda_ipc``, ``nixl``, or ``nccl`` (to other GPUs only)."""
    bucket_bytes: int = 0
    """Suite ``gpu``, streamed: bytes of a staging bucket; 0 selects by free memory."""
    buffers: int = 2
    """Suite ``gpu``, streamed: number of staging buffers."""
    masters: bool = False
    """Suite ``gpu``: trainer ranks hold float32, published as bfloat16."""

    def __post_init__(self) -> None:
        """Check each value."""
        if self.size < 1 << 20:
            raise ConfigurationError(f"a benchmark needs at least 1 MiB, not {self.size} bytes")
        if self.rounds < 1:
            raise ConfigurationError("a benchmark needs at least one round")
        if self.runs < 1 or (self.runs > 1 and self.suite == "gpu"):
            raise ConfigurationError("runs must be at least 1, and 1 for suite gpu")
        if self.delivery not in ("", "direct", "streamed"):
            raise ConfigurationError(f"delivery must be direct or streamed, not {self.delivery!r}")
        if self.transport not in ("cuda_ipc", "nccl", "nixl"):
            raise ConfigurationError(f"transport must be cuda_ipc, nccl or nixl, not {self.transport!r}")
        if self.transport == "nccl" and self.placement != "separate":
            raise ConfigurationError("NCCL cannot send from a GPU to itself: use placement separate with transport nccl")
        if self.bucket_bytes < 0 or self.buffers not in (1, 2):
            raise ConfigurationError("bucket_bytes must not be negative, and buffers must be 1 or 2")
