"""One copy of a checkpoint in host memory, for an engine that loads all of it at once when it has arrived and is verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.errors import LoadError

__all__ = ["HostStaging"]

_SHOWN = 5


class HostStaging:
    """Keeps copies of the tensors of ``checkpoint`` from :meth:`load` on, until they are taken by :meth:`tensors`.

    With a ``draft_prefix``, tensors whose names begin with it are those of a speculative decoder's own model; with an empty one
    that model takes what it needs from all tensors, as the model does. ``engine`` is its name in messages. The memory is kept from
    one version to the next. Not thread-safe: calls come one at a time.
    """

    def __init__(self, checkpoint: HfCheckpoint, engine: str, draft_prefix: str | None = None) -> None:
        self._checkpoint, self._engine, self._draft_prefix = checkpoint, engine, draft_prefix
        self._memory: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()

    @property
    def has_draft(self) -> bool:
        """Whether some of what is staged is a draft model's."""
        return self._draft_prefix is not None

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived since :meth:`begin`."""
        return not self._arrived

    def begin(self) -> None:
        """Nothing has arrived yet."""
        self._arrived.clear()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy ``tensors``, which are lent until this returns."""
        index, manifest = self._checkpoint.manifest.index, self._checkpoint.manifest
        for sent, tensor in tensors:
            name = manifest[index[sent]].name
            own = self._memory.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = self._memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            own.copy_(tensor)
            self._arrived.add(name)

    def check_complete(self) -> None:
        """Raise :class:`~weightsync.errors.LoadError` unless every tensor has arrived."""
        missing = [spec.name for spec in self._checkpoint.manifest if spec.name not in self._arrived]
        if missing:
            raise LoadError(
                f"nothing was loaded into {self._engine}: {len(missing)} tensors were not received: {', '.join(missing[:_SHOWN])}"
                f"{', ...' if len(missing) > _SHOWN else ''}"
            )

    def tensors(self, *, draft: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """What to load into the model, or into the ``draft`` model, under the names of its checkpoint's files.

        Raises :class:`~weightsync.errors.LoadError` unless everything has come.
        """
        self.check_complete()
        prefix = self._draft_prefix
        index, manifest = self._checkpoint.manifest.index, self._checkpoint.manifest
        for name in self._checkpoint.names:
            if not prefix or name.startswith(prefix) is draft:
                yield name.removeprefix(prefix or ""), self._memory[manifest[index[name]].name]
