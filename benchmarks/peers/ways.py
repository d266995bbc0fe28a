"""What is measured: each way to move the tensors, in the order in which it runs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["WAYS", "Paths", "Way"]


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """Where other systems' files are, for those that are not installed as packages. Empty means: import the package."""

    vllm: str = ""
    """A folder with ``packed_tensor.py`` of ``vllm/distributed/weight_transfer``."""
    nemo_rl: str = ""
    """A folder with ``packed_tensor.py`` of ``nemo_rl/utils``."""
    nccl: str = ""
    """A ``libnccl.so.2`` for M2N, which needs 2.30.5 or newer. It is loaded instead of torch's in that case's processes."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to move all tensors from one process to another."""

    name: str
    """For ``--only``."""
    label: str
    """In the table and in the picture."""
    of: Literal["floor", "weightsync", "other"]
    detail: str = ""
    mover: str = ""
    """Name in :data:`benchmarks.peers.movers.MOVERS`; empty for what :mod:`weightsync_bench` measures itself."""
    variants: tuple[dict[str, Any], ...] = ({},)
    """Settings of the mover. Each variant has processes of its own, and all of them share one row."""
    gpus: tuple[int, ...] = (2,)
    """Numbers of GPUs with which it is measured: with one, both processes share it."""
    seconds: float = 75.0
    """Deadline of a variant, from the start of its processes."""


WAYS = (
    Way(
        name="limit", label="The link's limit", of="floor", gpus=(1, 2),
        detail="the driver's copy of 2 GiB from the peer, or within the GPU that both share, for as many bytes",
    ),
    Way(
        name="flat", label="Flat NCCL broadcast", of="floor", mover="flat", detail="one contiguous buffer, pieces of 1 GiB",
    ),
    Way(name="cuda_ipc", label="weightsync, CUDA IPC", of="weightsync", gpus=(1, 2), detail="this repository", seconds=110),
    Way(
        name="streamed", label="weightsync, streamed", of="weightsync", gpus=(1,), detail="this repository, through a loader",
        seconds=110,
    ),
    Way(name="nccl", label="weightsync, NCCL", of="weightsync", detail="this repository", seconds=110),
    Way(
        name="vllm", label="vLLM's packed broadcast", of="other", mover="vllm", variants=({"buffers": 2}, {"buffers": 3}),
        detail="2 and 3 buffers of 1 GiB",
    ),
    Way(
        name="vllm_ipc", label="vLLM's packed IPC", of="other", mover="vllm_ipc", gpus=(1,),
        variants=({"buffer_bytes": 1 << 30},),  # with 4 GiB, 61 GB twice and the copies do not fit on an H200
        detail="one buffer of 1 GiB; handles by gloo; the receiver clones each tensor, as vLLM does, and copies it",
    ),
    Way(
        name="nemo_rl", label="NeMo-RL's packed engine", of="other", mover="nemo_rl", variants=({"buffers": 2}, {"buffers": 3}),
        detail="2 and 3 buffers of 2 % of the GPU's memory",
    ),
    Way(name="by_tensor", label="NCCL broadcast, one call per tensor", of="other", mover="by_tensor", detail="torch.distributed"),
    Way(name="m2n", label="NCCL M2N, one reshard per tensor", of="other", mover="m2n", detail="as vLLM calls it"),
    Way(
        name="m2n_grouped", label="NCCL M2N, grouped", of="other", mover="m2n", variants=({"group": 256},),
        detail="groups of 256 tensors",
    ),
    Way(
        name="checkpoint_engine", label="checkpoint-engine", of="other", mover="checkpoint_engine", seconds=170,
        detail="broadcast to both GPUs from pinned host memory; the copy to the host and its registration are not counted",
    ),
)  # fmt: skip
"""Floors and weightsync first, then the others, and last what takes longest to prepare."""
