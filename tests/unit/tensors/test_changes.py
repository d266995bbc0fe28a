"""Changed words: found, listed, and applied through any cut of the tensors, undone bit for bit; broken lists are refused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import Aborted, ProtocolError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.tensors.change_kernels import CHANGE_BLOCK
from weightsync.tensors.changes import Changes, blocks_of, find
from weightsync.tensors.copies import copy_tiles
from weightsync.tensors.copy_table import CopyTable, tiles_of
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.shards import Shard, shard, torch_dtype

SPECS = (
    TensorSpec("cube", (3, 5, 7), "uint8"),
    TensorSpec("embed", (130, 96), "bfloat16"),
    TensorSpec("line", (9001,), "uint8"),
    TensorSpec("narrow", (33, 3), "float32"),
    TensorSpec("scalar", (), "float64"),
    TensorSpec("wide", (5, 4099), "uint8"),
)
MANIFEST = Manifest(SPECS)
HERE = Host("here", "here")
NEVER = np.zeros(1, np.int8)
SHARES = (0.0, 0.0005, 0.01, 0.2, 0.4, 0.6, 1.0)


def cut(spec: TensorSpec, rank: int, ranks: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and shape of a rank's part of a tensor, cut along ``dim``."""
    if len(spec.shape) <= dim:
        return (0,) * len(spec.shape), spec.shape
    first, last = spec.shape[dim] * rank // ranks, spec.shape[dim] * (rank + 1) // ranks
    starts, shape = [0] * len(spec.shape), list(spec.shape)
    starts[dim], shape[dim] = first, last - first
    return tuple(starts), tuple(shape)


class Target(NamedTuple):
    """An engine rank that holds the columns, or the rows, of a version; every other tensor of it is stored transposed."""

    shards: list[Shard]
    layout: Layout
    addresses: tuple[int, ...]
    changes: Changes

    def bytes(self) -> list[bytes]:
        return [one.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in self.shards]

    def digests(self) -> npt.NDArray[np.uint64]:
        out = np.zeros(len(self.layout), np.uint64)
        digest_rows(MANIFEST, self.layout, self.addresses, 0, len(out), out)
        return out


class Region:
    """What a trainer rank publishes, and the lists behind it."""

    def __init__(self, seed: int, room: int = 1 << 20) -> None:
        whole = [
            shard(spec.name, torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)), spec.shape, (0,) * len(spec.shape))
            for spec in SPECS
        ]
        self.layout = packed_layout(MANIFEST, whole)
        self.nbytes = self.layout.regions[0]
        draw = np.random.default_rng(seed)
        self.memory = np.zeros(self.nbytes + 2 * room, np.uint8)
        self.shards = self.memory[: self.nbytes]
        self.shards[:] = draw.integers(0, 256, self.nbytes)
        self.before = self.shards.copy()
        self.ends = np.zeros(blocks_of(self.nbytes), np.uint32)
        self.payload = self.memory[self.nbytes :].view(np.uint16)

    def change(self, seed: int, share: float) -> None:
        draw = np.random.default_rng(seed)
        self.shards[draw.random(self.nbytes) < share] ^= 0x55

    def find(self) -> int | None:
        return find(self.before, self.shards, self.ends, self.payload, NEVER)

    def target(self, rank: int, ranks: int, dim: int, *, swapped: bool) -> Target:
        shards = []
        for index, spec in enumerate(SPECS):
            starts, shape = cut(spec, rank, ranks, dim)
            memory = torch.zeros(shape, dtype=torch_dtype(spec.dtype))
            if swapped and index % 2 and len(shape) == 2:
                memory = torch.zeros(shape[::-1], dtype=memory.dtype).T
            shards.append(shard(spec.name, memory, spec.shape, starts))
        layout, addresses = layout_in_place(MANIFEST, shards, 4096)
        plan = plan_transfer(MANIFEST, [SourceRank("source", HERE, self.layout)], [TargetRank("target", HERE, layout)])
        pieces: Pieces = plan.pieces("target")
        tables = tiles_of(MANIFEST, pieces, layout, addresses, [(0, len(layout))])[0]
        for table in tables:
            copy_tiles(table, [self.before.ctypes.data])
        changes = Changes(tables, self.nbytes, self.ends)
        changes.allocate()
        copy_tiles(changes.table(self.nbytes), [self.memory.ctypes.data])
        changes.check()
        return Target(shards, layout, addresses, changes)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.4, 0.6, 1.0]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_changes_lead_to_the_new_version_and_back(seed: int, share: float, ranks: int, dim: int, swapped: bool) -> None:
    region = Region(seed)
    old = region.before.copy()
    region.change(seed + 1, share)
    used = region.find()
    assert used is not None and used <= region.nbytes // 2, "lists are longer than the version"
    assert np.array_equal(region.before, region.shards)
    region.before = old
    for rank in range(ranks):
        target = region.target(rank, ranks, dim, swapped=swapped)
        base, before = target.digests(), target.bytes()
        fresh = region.target(rank, ranks, dim, swapped=swapped)
        for table in fresh.changes.tables:
            copy_tiles(table, [region.shards.ctypes.data])
        predicted, applied = base.copy(), base.copy()
        target.changes.predict(predicted, NEVER)
        assert target.bytes() == before, "predicting changed the parameters"
        target.changes.apply(applied, NEVER)
        assert target.bytes() == fresh.bytes()
        assert np.array_equal(applied, fresh.digests()) and np.array_equal(predicted, applied)
        reverted = base.copy()
        target.changes.revert(reverted, NEVER)
        assert target.bytes() == before and np.array_equal(reverted, base)


def test_only_the_lists_that_a_rank_needs_are_read() -> None:
    region = Region(0)
    region.shards[CHANGE_BLOCK : CHANGE_BLOCK + 80 : 2] ^= 1  # rows of embed that the last of three ranks does not hold
    assert region.find() == 80
    assert [region.target(rank, 3, 0, swapped=False).changes.words for rank in range(3)] == [80, 80, 0]


def test_a_word_costs_four_bytes() -> None:
    region = Region(0)
    region.shards[: 2 * 40 : 2] ^= 1  # 40 words of the first block
    assert region.find() == 80


def test_a_list_that_finds_no_room_is_no_list() -> None:
    region = Region(0)
    region.payload = region.payload[:1000]
    region.change(1, 0.5)
    assert region.find() is None
    assert np.array_equal(region.before, region.shards), "the next version is compared with this one"


def test_a_search_that_is_stopped_raises() -> None:
    region = Region(0)
    with pytest.raises(Aborted):
        find(region.before, region.shards, region.ends, region.payload, np.ones(1, np.int8))


def test_an_update_that_is_stopped_raises_and_is_undone() -> None:
    region = Region(0)
    old = region.before.copy()
    region.change(1, 0.3)
    region.find()
    region.before = old
    target = region.target(0, 1, 0, swapped=False)
    base, before = target.digests(), target.bytes()
    target.changes.predict(base.copy(), NEVER)
    with pytest.raises(Aborted):
        target.changes.apply(base.copy(), np.ones(1, np.int8))
    reverted = base.copy()
    target.changes.revert(reverted, NEVER)
    assert target.bytes() == before and np.array_equal(reverted, base)


def wrong_order(places: npt.NDArray[np.uint16]) -> None:
    places[:2] = places[1::-1].copy()


def repeated(places: npt.NDArray[np.uint16]) -> None:
    places[1] = places[0]


def outside(places: npt.NDArray[np.uint16]) -> None:
    places[-1] = CHANGE_BLOCK // 2


@pytest.mark.parametrize("spoil", [wrong_order, repeated, outside])
def test_places_that_are_not_in_order_are_refused(spoil: object) -> None:
    region = Region(0)
    old = region.before.copy()
    region.change(1, 0.01)
    region.find()
    region.before = old
    assert callable(spoil)
    spoil(region.payload[: int(region.ends[0]) // 2])
    with pytest.raises(ProtocolError, match="changes of block 0"):
        region.target(0, 1, 0, swapped=False)


@pytest.mark.parametrize("ends", [[5, 4], [3, 3], [0, 1 << 20], [0]])
def test_ends_that_are_none_are_refused(ends: list[int]) -> None:
    with pytest.raises(ProtocolError, match="lists"):
        Changes([CopyTable.empty()], 2 * CHANGE_BLOCK, np.array(ends, np.uint32))


def test_a_plan_that_reads_beyond_the_region_is_refused() -> None:
    region = Region(0)
    tables = region.target(0, 1, 0, swapped=False).changes.tables
    with pytest.raises(ProtocolError, match="beyond"):
        Changes(tables, 64, np.zeros(1, np.uint32))
