"""Base of adapters that write into an engine's parameters, or else stage a checkpoint for the engine's own loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.host_staging import HostStaging
from weightsync.engines.traced_shards import DirectShards
from weightsync.model import Manifest
from weightsync.tensors.shards import Shard

UNLABELLED = "weightsync:none"
"""Label that an engine reports while no version is installed: from a pause to the next resume, and after an error."""

COMMIT_SECONDS = 300.0
"""Time for a step of the commit, in addition to the coordinator's deadline."""


class StagedAdapter(EngineAdapter):
    """Base of an adapter for one rank of an engine that loads Hugging Face checkpoints.

    Direct delivery never calls the engine's loader. Otherwise buckets are staged in host memory, and the engine loads them after
    the coordinator has compared the digests, so nothing unverified is written into the model. It costs host memory for one copy of
    the checkpoint at each rank.

    Args:
        checkpoint: Checkpoint of the model.
        engine: Name of the engine in messages.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the model.
        draft_prefix: See :class:`~weightsync.engines.host_staging.HostStaging`.
    """

    loads_late = True
    follows = True

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        engine: str,
        direct: DirectShards | None = None,
        device: torch.device | None = None,
        draft_prefix: str | None = None,
    ) -> None:
        self._checkpoint, self._direct = checkpoint, direct
        self._device = device if device is not None and device.type == "cuda" else None
        self._staging = HostStaging(checkpoint, engine, draft_prefix)

    def manifest(self) -> Manifest:
        """Return the checkpoint's manifest."""
        return self._checkpoint.manifest

    def shards(self) -> Sequence[Shard] | None:
        """Return shards over the model's parameters; ``None`` for streamed delivery."""
        return None if self._direct is None else self._direct.now()

    def device(self) -> torch.device | None:
        """Return the device for buckets, so that a trainer's GPU memory is read to GPU memory first."""
        return self._device

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the staging memory. The engine does not use it yet."""
        self._staging.load(tensors)

    @property
    def received_direct(self) -> bool:
        """Whether the update wrote the parameters themselves: all ranks of a round use the same delivery."""
        return self._direct is not None and self._staging.empty
