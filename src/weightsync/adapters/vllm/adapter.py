"""One vLLM worker's rank, as weightsync sees it: it stages whole tensors; rank 0 also drives the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from weightsync.adapters.vllm.checkpoint import Checkpoint
from weightsync.adapters.vllm.controls import Controls
from weightsync.errors import LoadError
from weightsync.messages import PauseMode
from weightsync.model import Manifest, Version
from weightsync.roles.adapter import EngineAdapter

__all__ = ["UNLABELLED", "VllmWorkerAdapter"]

UNLABELLED = "weightsync:none"
"""The label that vLLM shows while no version is installed: between a pause and the resume after it, and after a failure."""

_PATIENCE = 300.0  # seconds for a step of the commit, whose deadline the coordinator keeps besides
_SHOWN = 5


class VllmWorkerAdapter(EngineAdapter):
    """Takes buckets into host memory and lets vLLM load them when all were verified.

    Loading is vLLM's own, on the worker's own thread, between two steps (:meth:`staged` and :meth:`loaded` are called there).
    So nothing is written into the model before the coordinator compared the digests. Costs host memory for one copy of the
    checkpoint at each rank. ``controls`` are given to rank 0 alone: the coordinator waits for all ranks at each step of a
    round, so it is enough that one of them does what concerns the whole engine.
    """

    name = "vllm"

    def __init__(self, checkpoint: Checkpoint, controls: Controls | None) -> None:
        self._checkpoint = checkpoint
        self._controls = controls
        self._memory: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self._loaded = False
        self._version: Version | None = None

    def manifest(self) -> Manifest:
        """The checkpoint's."""
        return self._checkpoint.manifest

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Rank 0: pause the engine, and take the label away."""
        self._arrived.clear()
        self._loaded = False
        if self._controls is not None:
            self._controls.pause(mode, timeout)
            self._controls.label(UNLABELLED, timeout)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the staging; vLLM does not see it yet."""
        for name, tensor in tensors:
            own = self._memory.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = self._memory[name] = torch.empty_like(tensor)
            own.copy_(tensor)
            self._arrived.add(name)

    def finish(self, version: Version) -> None:
        """Rank 0: let every worker load. The commit of the replica is that of all ranks, so rank 0 answers for all."""
        self._complete()
        if self._controls is not None:
            self._controls.install(_PATIENCE)
        self._version = version

    def flush(self) -> bool:
        """Rank 0: drop cached keys and values, and look at the answer."""
        return self._controls is None or self._controls.flush(_PATIENCE)

    def resume(self) -> None:
        """Rank 0: label and resume. Refused by a rank that was not told to load."""
        if not self._loaded:
            raise LoadError("this vLLM worker never loaded the weights that were committed")
        if self._controls is not None:
            self._controls.label(str(self._version), _PATIENCE)
            self._controls.resume(_PATIENCE)

    # From here on: on the worker's own thread.

    def staged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What to load, under the names of the checkpoint's files. Raises :class:`~weightsync.errors.LoadError` unless complete."""
        self._complete()
        index, manifest = self._checkpoint.manifest.index, self._checkpoint.manifest
        for name in self._checkpoint.names:
            yield name, self._memory[manifest[index[name]].name]

    def loaded(self) -> None:
        """The worker's model holds what was staged."""
        self._loaded = True

    def _complete(self) -> None:
        missing = [spec.name for spec in self._checkpoint.manifest if spec.name not in self._arrived]
        if missing:
            raise LoadError(
                f"nothing was loaded into vLLM: {len(missing)} tensors were not received: {', '.join(missing[:_SHOWN])}"
                f"{', ...' if len(missing) > _SHOWN else ''}"
            )
