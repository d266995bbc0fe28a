"""Base of adapters that write into an engine's parameters, or else stage a checkpoint for the engine's own loader."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.traced_shards import DirectShards
from weightsync.errors import LoadError, few
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
    the checkpoint at each rank, which is reused for later versions: of these only the tensors that changed need to arrive.

    Args:
        checkpoint: Checkpoint of the model.
        engine: Name of the engine in messages.
        direct: Shards over the model's parameters; ``None`` for streamed delivery.
        device: Device of the model.
        draft_prefix: Tensors whose names start with it belong to the draft model. If empty, the draft model loads from all
            tensors, like the main model. ``None`` without a draft model.
    """

    loads_late = True
    loads_some = True  # also after a sleep: the staging memory holds all tensors
    follows = True

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        engine: str,
        direct: DirectShards | None = None,
        device: torch.device | None = None,
        draft_prefix: str | None = None,
    ) -> None:
        self._checkpoint, self._engine, self._direct, self._draft_prefix = checkpoint, engine, direct, draft_prefix
        self.repacks = direct is not None and direct.repacks
        if self.repacks:
            self.no_source = f"{engine} keeps some weights in another layout than the checkpoint"
        self._device = device if device is not None and device.type == "cuda" else None
        self._memory: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self.kept: frozenset[str] = frozenset()
        """The tensors that are as they were in the version before, in an update that brings the others."""

    def manifest(self) -> Manifest:
        """Return the checkpoint's manifest."""
        return self._checkpoint.manifest

    def shards(self) -> Sequence[Shard] | None:
        """Return shards over the model's parameters; ``None`` for streamed delivery."""
        return None if self._direct is None else self._direct.now()

    def device(self) -> torch.device | None:
        """Return the device for buckets, so that a trainer's GPU memory is read to GPU memory first."""
        return self._device

    def wake_weights(self) -> None:
        """Wait until the engine's last step has read the weights on the device, before they are overwritten."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        """Start a new version, with no tensors staged."""
        self._arrived.clear()
        self.kept = frozenset()

    def keep(self, names: Collection[str]) -> None:
        """Take these tensors as they were staged for the version before."""
        self.kept = frozenset(names) & self._memory.keys()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the staging memory. The engine does not use it yet."""
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
        missing = [spec.name for spec in self._checkpoint.manifest if spec.name not in self._arrived | self.kept]
        if missing:
            raise LoadError(f"nothing was loaded into {self._engine}: {len(missing)} tensors were not received: {few(missing)}")

    def staged(self, *, draft: bool = False, changed: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to load into the model, or into the ``draft`` model, by their names in the checkpoint's files.

        With ``changed`` only those of blocks (``model.layers.3``) in which a tensor has changed. What is in no block counts as one.
        Runs on the thread that runs the model.

        Raises:
            LoadError: Tensors are missing.
        """
        self.check_complete()
        prefix = self._draft_prefix
        index, manifest = self._checkpoint.manifest.index, self._checkpoint.manifest
        blocks = {_block(name) for name in self._checkpoint.names if manifest[index[name]].name in self._arrived}
        for name in self._checkpoint.names:
            if changed and _block(name) not in blocks:
                continue
            if not prefix or name.startswith(prefix) is draft:
                yield name.removeprefix(prefix or ""), self._memory[manifest[index[name]].name]

    @property
    def received_direct(self) -> bool:
        """Whether the update wrote the parameters themselves: all ranks of a round use the same delivery."""
        return self._direct is not None and not self._arrived and not self.kept


def _block(name: str) -> str:
    """The block of a tensor: its name up to the first number; empty if there is none."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered[0] if numbered else ""
