"""Staging copy of a checkpoint in host memory, for an engine that loads the whole checkpoint after it was verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.errors import LoadError, few


class HostStaging:
    """Stages copies of a checkpoint's tensors, from :meth:`load` to :meth:`tensors`. Not thread-safe.

    The memory is reused for later versions.

    Args:
        checkpoint: The checkpoint.
        engine: Name of the engine in messages.
        draft_prefix: Tensors whose names start with it belong to the draft model. If empty, the draft model loads from all
            tensors, like the main model. ``None`` without a draft model.
    """

    def __init__(self, checkpoint: HfCheckpoint, engine: str, draft_prefix: str | None = None) -> None:
        self._checkpoint, self._engine, self._draft_prefix = checkpoint, engine, draft_prefix
        self._memory: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived since :meth:`begin`."""
        return not self._arrived

    def begin(self) -> None:
        """Start a new version: mark all tensors as missing."""
        self._arrived.clear()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy ``tensors`` into the staging memory. They may be reused when this returns."""
        index, manifest = self._checkpoint.manifest.index, self._checkpoint.manifest
        for sent, tensor in tensors:
            name = manifest[index[sent]].name
            own = self._memory.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = self._memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            own.copy_(tensor)
            self._arrived.add(name)

    def check_complete(self) -> None:
        """Check that every tensor has arrived.

        Raises:
            LoadError: Tensors are missing. The message names at most five.
        """
        missing = [spec.name for spec in self._checkpoint.manifest if spec.name not in self._arrived]
        if missing:
            raise LoadError(f"nothing was loaded into {self._engine}: {len(missing)} tensors were not received: {few(missing)}")

    def tensors(self, *, draft: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to load into the model, or into the ``draft`` model, by their names in the checkpoint's files.

        Raises:
            LoadError: Tensors are missing.
        """
        self.check_complete()
        prefix = self._draft_prefix
        index, manifest = self._checkpoint.manifest.index, self._checkpoint.manifest
        for name in self._checkpoint.names:
            if not prefix or name.startswith(prefix) is draft:
                yield name.removeprefix(prefix or ""), self._memory[manifest[index[name]].name]
