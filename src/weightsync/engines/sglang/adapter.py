"""Adapter of one SGLang rank: direct delivery, or staging of whole tensors for the loader of SGLang's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.host_staging import HostStaging
from weightsync.engines.sglang.loop import SchedulerLoop
from weightsync.engines.traced_shards import DirectShards
from weightsync.errors import LoadError
from weightsync.model import Manifest, PauseMode, Version
from weightsync.tensors.shards import Shard

__all__ = ["UNLABELLED", "SglangAdapter"]

UNLABELLED = "weightsync:none"
"""Label that SGLang reports while no version is installed: from a pause to the next resume, and after an error."""

_PATIENCE = 300.0  # seconds for a step of the commit, in addition to the coordinator's deadline


class SglangAdapter(EngineAdapter):
    """Adapter of one rank, whose scheduler and model are in this process.

    Direct delivery never calls SGLang's loader. Otherwise the rank stages buckets in host memory, and loads them on SGLang's thread
    after the coordinator has compared the digests, so nothing unverified is written into the model. It costs host memory for one
    copy of the checkpoint at each rank.

    Args:
        checkpoint: Checkpoint of the model.
        loop: Event loop of this rank's scheduler.
        install: Loads all tensors of the checkpoint into the model. Called on the scheduler's thread.
        flush: Drops the radix cache. Called on the scheduler's thread.
        label: Sets the label of the weights. Called on the scheduler's thread.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the model.
    """

    name = "sglang"
    loads_late = True
    pauses_twice = True  # any client of the server can call SGLang's /continue_generation
    sleeps = True

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        loop: SchedulerLoop,
        *,
        install: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        flush: Callable[[], bool],
        label: Callable[[str], None],
        direct: DirectShards | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._checkpoint, self._loop, self._direct = checkpoint, loop, direct
        self._install, self._flush, self._label = install, flush, label
        self._device = device if device is not None and device.type == "cuda" else None
        self._staging = HostStaging(checkpoint, "SGLang")
        self._loaded: Version | None = None

    def manifest(self) -> Manifest:
        """Return the checkpoint's manifest."""
        return self._checkpoint.manifest

    def shards(self) -> Sequence[Shard] | None:
        """Return shards over the model's parameters; ``None`` for streamed delivery."""
        return None if self._direct is None else self._direct.now()

    def device(self) -> torch.device | None:
        """Return the device for buckets, so that a trainer's GPU memory is read to GPU memory first."""
        return self._device

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Pause SGLang, and remove its label. Running requests are aborted, finished, or returned to the queue (``keep``)."""
        self._loop.pause(mode, timeout)
        self._loop.call(lambda: self._label(UNLABELLED), _PATIENCE)

    def begin(self) -> None:
        """Start a new version, with no tensors staged."""
        self._staging.begin()
        self._loaded = None

    def wake_weights(self) -> None:
        """Take released memory of the weights again, and wait until the last step has read them on the device."""
        self._loop.wake(("weights",), _PATIENCE)
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the staging memory. SGLang does not use it yet."""
        self._staging.load(tensors)

    def finish(self, version: Version) -> None:
        """Load the staged tensors on the scheduler's thread."""
        if self._direct is None or not self._staging.empty:  # all ranks of a round use the same delivery
            self._staging.check_complete()
            self._loop.call(lambda: self._install(self._staging.tensors()), _PATIENCE)
        self._loaded = version

    def wake_cache(self) -> None:
        """Take released memory of the KV cache and of CUDA graphs again."""
        self._loop.wake(("kv_cache", "cuda_graph"), _PATIENCE)

    def flush(self) -> bool:
        """Drop cached keys and values. Returns whether that succeeded.

        Ranks that do not lead set the label here, because rank 0 may continue all of them before they are told to resume.
        """
        flushed = self._loop.call(self._flush, _PATIENCE)
        if flushed and not self._loop.leads:
            self._loop.call(lambda: self._label(str(self._loaded)), _PATIENCE)
        return flushed

    def resume(self) -> None:
        """Set the label, on rank 0, and generate again.

        Raises:
            LoadError: This rank did not load the committed weights.
        """
        version = self._loaded
        if version is None:
            raise LoadError("this rank of SGLang did not load the committed weights")
        if self._loop.leads:
            self._loop.call(lambda: self._label(str(version)), _PATIENCE)
        self._loop.proceed(_PATIENCE)
