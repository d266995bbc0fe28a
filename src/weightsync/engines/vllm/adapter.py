"""One vLLM worker's rank, as weightsync sees it: written directly, or it stages whole tensors; rank 0 also drives the engine."""

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
"""The label that vLLM shows while no version is installed: between a pause and the resume after it, and after a failure."""

_PATIENCE = 300.0  # seconds for a step of the commit, whose deadline the coordinator keeps besides


class VllmWorkerAdapter(EngineAdapter):
    """Is written directly where ``direct`` says that this is right; else takes buckets into host memory, for vLLM to load.

    Written directly, vLLM's loader is never called. Streamed to, loading is vLLM's own, on the worker's own thread, between two
    steps (:meth:`staged` and :meth:`loaded` are called there), when all was verified: nothing is written into the model before the
    coordinator compared the digests. That costs host memory for one copy of the checkpoint at each rank. ``controls`` are given
    to rank 0 alone: the coordinator waits for all ranks at each step of a round, so it is enough that one of them does what
    concerns the whole engine. ``device`` is that of the worker's model. With a ``draft_prefix``, tensors whose names begin with it
    are those of a speculative decoder's own model, which vLLM loads apart; with an empty one that model takes what it needs from
    all tensors, as the model does.
    """

    name = "vllm"
    loads_late = True
    pauses_twice = True  # vLLM's own /resume is open to whoever reaches the server

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
        self._loaded: set[bool] = set()  # of the draft model, and not
        self._version: Version | None = None

    def manifest(self) -> Manifest:
        """The checkpoint's."""
        return self._checkpoint.manifest

    def shards(self) -> Sequence[Shard] | None:
        """Boxes of the checkpoint in the model's own parameters; ``None``: stream."""
        return None if self._direct is None else self._direct.now()

    def device(self) -> torch.device | None:
        """Where buckets are lent: what a trainer has in GPU memory is read there first."""
        return self._device

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Rank 0: pause the engine, and take the label away."""
        if self._controls is not None:
            deadline = Deadline(timeout)
            self._controls.pause(mode, timeout)
            self._controls.label(UNLABELLED, deadline.remaining("pausing"))

    def begin(self) -> None:
        """Nothing has arrived yet."""
        self._staging.begin()
        self._loaded.clear()

    def wake_weights(self) -> None:
        """About to be written: wait for what vLLM's last step still reads of the weights on the device."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the staging; vLLM does not see it yet."""
        self._staging.load(tensors)

    def finish(self, version: Version) -> None:
        """Rank 0: let every worker load what it staged. The commit is that of all ranks, so rank 0 answers for all."""
        if self._direct is not None and self._staging.empty:  # all ranks of a round have one delivery, and this was written
            self._loaded = {False}
        else:
            self._staging.check_complete()
            if self._controls is not None:
                self._controls.install(_PATIENCE)
        self._version = version

    def flush(self) -> bool:
        """Rank 0: drop cached keys and values, and look at the answer."""
        return self._controls is None or self._controls.flush(_PATIENCE)

    def resume(self) -> None:
        """Rank 0: label and resume. Refused by a rank that was not told to load."""
        if len(self._loaded) < 1 + self.has_draft:
            raise LoadError("this vLLM worker never loaded the weights that were committed")
        if self._controls is not None:
            self._controls.label(str(self._version), _PATIENCE)
            self._controls.resume(_PATIENCE)

    # From here on: on the worker's own thread.

    @property
    def has_draft(self) -> bool:
        """Whether some of what is staged is a draft model's."""
        return self._staging.has_draft

    def staged(self, *, draft: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """What to load into the model, or into the ``draft`` model, under the names of its checkpoint's files.

        Raises :class:`~weightsync.errors.LoadError` unless everything has come.
        """
        return self._staging.tensors(draft=draft)

    def loaded(self, *, draft: bool = False) -> None:
        """The worker's model, or its ``draft`` model, holds what was staged."""
        self._loaded.add(draft)
