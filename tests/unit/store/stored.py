"""A trainer of several ranks that stores its versions, without a coordinator: what tests of the store need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightsync.model import Box, Layout, Manifest, TensorSpec, Version, fold
from weightsync.model.stored import StoredObject, StoredRank, VersionManifest
from weightsync.planning.coverage import coverage_of
from weightsync.publishing.copied_shards import HostPublisher
from weightsync.publishing.listed_changes import HostLists
from weightsync.store.catalog import manifest_path
from weightsync.store.objects import ObjectStore
from weightsync.store.signing import SigningKey, new_secret
from weightsync.store.writer import PublishedBytes, RankObjects
from weightsync.tensors.memory_layout import packed_layout
from weightsync.tensors.shards import Shard, dtype_name

RUN = "a-run"


def manifest_of(state: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in state.items())


def cut(state: Mapping[str, torch.Tensor], ranks: int) -> list[list[Shard]]:
    """The shards of each rank: cut along the first dimension, or the last one of every second tensor."""
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    for index, (name, tensor) in enumerate(state.items()):
        if not tensor.dim():
            shards[0].append(Shard(name, (), Box((), ()), tensor))
            continue
        dim = index % 2 * (tensor.dim() - 1)
        edges = np.linspace(0, tensor.shape[dim], ranks + 1).astype(int).tolist()
        for rank in range(ranks):
            first, last = edges[rank], edges[rank + 1]
            if last > first:
                starts, stops = [0] * tensor.dim(), list(tensor.shape)
                starts[dim], stops[dim] = first, last
                shards[rank].append(
                    Shard(name, tuple(tensor.shape), Box(tuple(starts), tuple(stops)), tensor.narrow(dim, first, last - first))
                )
    return shards


class Rank:
    def __init__(self, store: ObjectStore, number: int, manifest: Manifest, shards: Sequence[Shard], every: int) -> None:
        self.layout = packed_layout(manifest, shards)
        self.changes = HostLists(manifest, self.layout, True)
        self.memory = np.zeros(self.changes.end + 64, np.uint8)
        self.memory = self.memory[-self.memory.ctypes.data % 64 :][: self.changes.end]
        self.publisher = HostPublisher(manifest, shards, self.layout, self.memory.ctypes.data)
        self.objects = RankObjects(store, number, manifest, self.layout, every)

    def place(self, number: int, epoch: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        digests = self.publisher.place()
        self.changes.update(self.memory, np.zeros(1, np.int8))
        self.changes.placed(epoch, number)
        return digests

    def published(self) -> PublishedBytes:
        return PublishedBytes(self.memory, self.changes.changed[0] if self.changes.changed else None, lambda: None)


class StoringTrainer:
    """Holds ``state``; :meth:`publish` stores it as it is now."""

    def __init__(
        self, where: Path | str, state: Mapping[str, torch.Tensor], ranks: int = 1, every: int = 16, epoch: int = 1
    ) -> None:
        self.store, self.state, self.epoch = ObjectStore(str(where)), state, epoch
        self.key = SigningKey(new_secret())
        self.manifest = manifest_of(state)
        self.ranks = [Rank(self.store, rank, self.manifest, shards, every) for rank, shards in enumerate(cut(state, ranks))]
        self.layouts: dict[str, Layout] = {f"trainer/{rank}": one.layout for rank, one in enumerate(self.ranks)}
        self.kinds: list[tuple[str, ...]] = []
        """Of each version, the kinds of the objects that its ranks wrote."""

    def place(
        self, number: int, rank_begins: Callable[[int], None] = lambda rank: None
    ) -> tuple[Version, np.ndarray[Any, np.dtype[np.uint64]]]:
        rows = {}
        for rank, one in enumerate(self.ranks):
            rank_begins(rank)
            rows[f"trainer/{rank}"] = one.place(number, self.epoch)
        totals = coverage_of(self.manifest, self.layouts, "the trainer").total(rows)
        return Version(RUN, number, self.manifest.fingerprint, fold(totals), self.epoch), totals

    def described(
        self, version: Version, totals: np.ndarray[Any, np.dtype[np.uint64]], chains: Sequence[tuple[StoredObject, ...]]
    ) -> VersionManifest:
        ranks = tuple(StoredRank(one.layout.to_columns(), chain) for one, chain in zip(self.ranks, chains, strict=True))
        digests = totals.astype("<u8").tobytes()
        return VersionManifest(version, self.manifest.tensors, digests, ranks, time.time(), step=version.number * 10)

    def publish(self, number: int) -> Version:
        version, totals = self.place(number)
        chains = [one.objects.write(version, one.published()) for one in self.ranks]
        self.kinds.append(tuple(chain[-1].kind for chain in chains))
        assert self.store.create(manifest_path(RUN, version.order), self.key.signed(self.described(version, totals, chains)))
        for one, chain in zip(self.ranks, chains, strict=True):
            one.objects.confirm(version, chain)
        return version


def small_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(1200, 64, generator=generator).bfloat16(),
        "layers.0.weight": torch.randn(64, 96, generator=generator),
        "layers.0.scale": torch.randn(7, generator=generator),
        "layers.1.codes": torch.randint(0, 255, (33, 31), generator=generator, dtype=torch.uint8),
        "steps": torch.tensor(3),
    }


def large_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Some 40 MB: many chunks, so that readers need some of them only."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(1024, 1024, generator=generator) for i in range(10)}


def change(state: Mapping[str, torch.Tensor], share: float, seed: int) -> None:
    """Change this share of the elements, at random places."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        flat = tensor.view(-1)
        where = torch.rand(flat.numel(), generator=generator) < share
        if tensor.is_floating_point():
            flat[where] = -flat[where] - 1
        else:
            flat[where] = flat[where] + 1
