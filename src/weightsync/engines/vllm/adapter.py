"""Adapter of one vLLM worker: direct delivery, or staging of whole tensors. Rank 0 also controls the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.host_staging import HostStaging
from weightsync.engines.traced_shards import DirectShards
from weightsync.engines.vllm.controls import Controls
from weightsync.errors import LoadError
from weightsync.model import Manifest, PauseMode, Version
from weightsync.tensors.shards import Shard

__all__ = ["UNLABELLED", "VllmWorkerAdapter"]

UNLABELLED = "weightsync:none"
"""Label that vLLM reports while no version is installed: from a pause to the next resume, and after an error."""

_PATIENCE = 300.0  # seconds for a step of the commit, in addition to the coordinator's deadline


class VllmWorkerAdapter(EngineAdapter):
    """Adapter with direct delivery if possible. Otherwise it stages buckets in host memory for vLLM to load.

    Direct delivery never calls vLLM's loader. With streamed delivery vLLM loads on the worker's thread between two steps, after
    the coordinator has compared the digests, so nothing unverified is written into the model. It costs host memory for one copy
    of the checkpoint at each rank. :meth:`staged` and :meth:`loaded` are called on the worker's thread.

    Args:
        checkpoint: Checkpoint of the model.
        controls: Controls of the whole engine, for rank 0 only. The coordinator waits for all ranks at each step of a round, so
            one rank is sufficient for them.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the worker's model.
        draft_prefix: Tensors whose names start with it belong to the draft model, which vLLM loads separately. If empty, the
            draft model loads from all tensors, like the main model.
    """

    name = "vllm"
    loads_late = True
    pauses_twice = True  # any client of the server can call vLLM's /resume

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        controls: Controls | None,
        direct: DirectShards | None = None,
        device: torch.device | None = None,
        draft_prefix: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._controls = controls
        self._direct = direct
        self._device = device if device is not None and device.type == "cuda" else None
        self._staging = HostStaging(checkpoint, "vLLM", draft_prefix)
        self._loaded: set[bool] = set()  # True for the draft model, False for the main model
        self._version: Version | None = None

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
        """On rank 0, pause the engine and remove its label."""
        if self._controls is not None:
            deadline = Deadline(timeout)
            self._controls.pause(mode, timeout)
            self._controls.label(UNLABELLED, deadline.remaining("pausing"))

    def begin(self) -> None:
        """Start a new version, with no tensors staged."""
        self._staging.begin()
        self._loaded.clear()

    def wake_weights(self) -> None:
        """Wait until vLLM's last step has read the weights on the device, before they are overwritten."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the staging memory. vLLM does not use it yet."""
        self._staging.load(tensors)

    def finish(self, version: Version) -> None:
        """On rank 0, let every worker load its staged tensors. An error of any worker fails the commit through rank 0."""
        if self._direct is not None and self._staging.empty:  # all ranks of a round use the same delivery, which was direct
            self._loaded = {False}
        else:
            self._staging.check_complete()
            if self._controls is not None:
                self._controls.install(_PATIENCE)
        self._version = version

    def flush(self) -> bool:
        """On rank 0, drop cached keys and values. Returns whether that succeeded."""
        return self._controls is None or self._controls.flush(_PATIENCE)

    def resume(self) -> None:
        """On rank 0, set the label and resume the engine.

        Raises:
            LoadError: This worker did not load the committed weights.
        """
        if len(self._loaded) < 1 + self.has_draft:
            raise LoadError("this vLLM worker did not load the committed weights")
        if self._controls is not None:
            self._controls.label(str(self._version), _PATIENCE)
            self._controls.resume(_PATIENCE)

    # The following run on the worker's thread.

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint includes a draft model."""
        return self._staging.has_draft

    def staged(self, *, draft: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to load into the model, or into the ``draft`` model, by their names in the checkpoint's files.

        Raises:
            LoadError: Tensors are missing.
        """
        return self._staging.tensors(draft=draft)

    def loaded(self, *, draft: bool = False) -> None:
        """Report that the worker has loaded the staged tensors into its model, or into its ``draft`` model."""
        self._loaded.add(draft)
