"""What a ``WeightSource`` of vLLM's trainer interface yields, of either shape that vLLM has had, as shards to publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TorchShard

from weightsync.errors import ConfigurationError, few
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.placements import box_of
from weightsync.tensors.shards import Shard, ShardedState, dtype_name

ParameterMeta: TypeAlias = Any
"""``ParamMeta``: name, dtype and shape. From vLLM 0.33 on also ``owners``, ``mesh_shape`` and ``placements``."""


class StagedSource(ShardedState):
    """The part of a source that this rank publishes, in host memory: one copy of it.

    A source of vLLM 0.33 may yield pieces (``iter_local``): each rank publishes its own, where its metadata places it. The first of
    a whole tensor's owners publishes it, which is rank 0 for a source that names none.

    Raises:
        ConfigurationError: Ranks hold parts of the model by the names that they say (``held_names`` of vLLM 0.29 to 0.32).
    """

    def __init__(self, source: Any, rank: int) -> None:  # noqa: ANN401 - vLLM's
        held = getattr(source, "held_names", None)
        if held is not None and held() is not None:
            raise ConfigurationError("a WeightSource whose ranks hold parts of the model is not supported: use a ModuleSource")
        metadata = source.metadata() if callable(source.metadata) else source.metadata  # a method until vLLM 0.32
        self._source = source
        local = getattr(source, "implements_iter_local", None)
        self._local = local is not None and local()
        self._manifest = Manifest(TensorSpec(meta.name, tuple(meta.shape), dtype_name(meta.dtype)) for meta in metadata)
        self._shards = [
            Shard(meta.name, tuple(meta.shape), box, torch.empty(box.shape, dtype=meta.dtype))
            for meta in metadata
            if (box := self._box(meta, rank)) is not None
        ]
        self._staged = {shard.name: shard.tensor for shard in self._shards}
        self.alone = all(self._publishers(meta) == (0,) for meta in metadata)
        """Whether rank 0 publishes everything: known on every rank."""

    def _pieces(self, meta: ParameterMeta) -> Sequence[Any] | None:
        """The placements of the pieces that are yielded; ``None`` for whole tensors."""
        return getattr(meta, "placements", None) if self._local else None

    def _publishers(self, meta: ParameterMeta) -> tuple[int, ...]:
        owners: tuple[int, ...] = getattr(meta, "owners", None) or (0,)
        return owners if self._pieces(meta) is not None else (min(owners),)

    def _box(self, meta: ParameterMeta, rank: int) -> Box | None:
        publishers, placements = self._publishers(meta), self._pieces(meta)
        if rank not in publishers:
            return None
        if placements is None:
            return Box.whole(tuple(meta.shape))
        coordinate = np.unravel_index(publishers.index(rank), meta.mesh_shape)
        plain = [TorchShard(placement.dim) if hasattr(placement, "dim") else Replicate() for placement in placements]
        return box_of(meta.name, tuple(meta.shape), tuple(meta.mesh_shape), plain, [int(index) for index in coordinate])

    def stage(self) -> None:
        """Walk the source, to its end on every rank, since that may be a collective, and keep what this rank publishes.

        Raises:
            ConfigurationError: It does not yield what its metadata declares.
        """
        wrong, lacking, source = dict[str, str](), set(self._staged), self._source
        walk = source.iter_local if self._local else getattr(source, "iter_full", lambda: source)
        for name, tensor in walk():
            place = self._staged.get(name)
            if place is None:
                if name not in self._manifest.index:
                    wrong[name] = "is not in its metadata"
            elif tensor.shape != place.shape:
                wrong[name] = f"has shape {list(tensor.shape)} instead of {list(place.shape)}"
            else:
                place.copy_(tensor.detach())
            lacking.discard(name)
        wrong |= dict.fromkeys(sorted(lacking), "was declared and did not come")
        if wrong:
            first = few((f"{name} {what}" for name, what in wrong.items()), joint="; ")
            raise ConfigurationError(f"the WeightSource yields {len(wrong)} tensors otherwise than it declares: {first}")

    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        """Return the manifest and this rank's shards: always the same objects."""
        return self._manifest, self._shards
