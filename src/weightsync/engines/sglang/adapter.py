"""Adapter of one SGLang rank: direct delivery, or staging of whole tensors for the loader of SGLang's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.sglang.loop import SchedulerLoop
from weightsync.engines.staged_adapter import COMMIT_SECONDS, UNLABELLED, StagedAdapter
from weightsync.engines.traced_shards import DirectShards
from weightsync.errors import LoadError
from weightsync.model import PauseMode, Version


class SglangAdapter(StagedAdapter):
    """Adapter of one rank, whose scheduler and model are in this process. Staged tensors are loaded on SGLang's thread.

    Args:
        checkpoint: Checkpoint of the model.
        loop: Event loop of this rank's scheduler.
        install: Loads all tensors of the checkpoint into the model. Called on the scheduler's thread.
        flush: Drops the caches. Called on the scheduler's thread.
        label: Sets the label of the weights. Called on the scheduler's thread.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the model.
    """

    name = "sglang"
    pauses_twice = True  # rank 0 continues all ranks, also those whose own resume fails
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
        super().__init__(checkpoint, "SGLang", direct, device)
        self._loop, self._install, self._flush, self._label = loop, install, flush, label
        self._loaded: Version | None = None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Pause SGLang, and remove its label. Running requests are aborted, finished, or returned to the queue (``keep``)."""
        self._loop.pause(mode, timeout)
        self._loop.call(lambda: self._label(UNLABELLED), COMMIT_SECONDS)

    def begin(self) -> None:
        """Start a new version, with no tensors staged."""
        super().begin()
        self._loaded = None

    def wake_weights(self) -> None:
        """Take released memory of the weights again, and wait until the last step has read them on the device."""
        self._loop.wake(("weights",), COMMIT_SECONDS)
        super().wake_weights()

    def finish(self, version: Version) -> None:
        """Load the staged tensors on the scheduler's thread."""
        if not self.received_direct:
            self.check_complete()
            self._loop.call(lambda: self._install(self.staged()), COMMIT_SECONDS)
        self._loaded = version

    def wake_cache(self) -> None:
        """Take released memory of the KV cache and of CUDA graphs again."""
        self._loop.wake(("kv_cache", "cuda_graph"), COMMIT_SECONDS)

    def flush(self) -> bool:
        """Drop cached keys and values. Returns whether that succeeded.

        Ranks that do not lead set the label here, because rank 0 may continue all of them before the coordinator asks them to.
        """
        flushed = self._loop.call(self._flush, COMMIT_SECONDS)
        if flushed and not self._loop.leads:
            self._loop.call(lambda: self._label(str(self._loaded)), COMMIT_SECONDS)
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
            self._loop.call(lambda: self._label(str(version)), COMMIT_SECONDS)
        self._loop.proceed(COMMIT_SECONDS)
