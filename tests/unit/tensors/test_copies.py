"""Tiles and their copies: every piece lands where it belongs, bit for bit, whatever the strides; forged tables are refused."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tensors.samples import DTYPES, MEMORIES, random_bits, raw, stored

from weightsync.errors import LayoutError, PlanMismatch, ProtocolError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.pieces import Pieces
from weightsync.tensors import copies
from weightsync.tensors.copies import (
    check_tiles,
    copy_and_digest,
    copy_tiles,
    digest_memory,
    gather_tiles,
    scatter_and_digest,
    scatter_tiles,
)
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable, tiles_of
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.shards import shards_of

State = dict[str, torch.Tensor]


def pieces_from(manifest: Manifest, source: Layout, target: Layout, owners: int) -> Pieces:
    """Every target row from the source row of its tensor, cut in two at random places of the last dimension."""
    columns: dict[str, list[object]] = {name: [] for name in ("source", "region", "offset", "strides", "row", "starts", "stops")}
    for row in range(len(target)):
        whole = int(np.searchsorted(source.tensor, target.tensor[row]))
        middle = int(target.starts[row, -1] + target.stops[row, -1]) // 2
        for first, last in ((int(target.starts[row, -1]), middle), (middle, int(target.stops[row, -1]))):
            if first < last:
                starts, stops = target.starts[row].copy(), target.stops[row].copy()
                starts[-1], stops[-1] = first, last
                columns["source"].append(len(columns["row"]) % owners)
                columns["region"].append(source.region[whole])
                columns["offset"].append(int(source.offset[whole] + (starts * source.strides[whole]).sum()))
                columns["strides"].append(source.strides[whole])
                columns["row"].append(row)
                columns["starts"].append(starts)
                columns["stops"].append(stops)

    def wide(name: str) -> npt.NDArray[np.int64]:
        return np.array(columns[name], np.int64).reshape(-1, manifest.dims)

    return Pieces(
        tuple(f"owner-{i}" for i in range(owners)),
        np.array(columns["source"], np.int32),
        np.array(columns["region"], np.int32),
        np.array(columns["offset"], np.int64),
        wide("strides"),
        np.array(columns["row"], np.int32),
        wide("starts"),
        wide("stops"),
    )


def job(
    source: State, target: State, block: int, owners: int = 2
) -> tuple[Manifest, Layout, tuple[int, ...], list[list[CopyTable]], tuple[int, ...], Layout]:
    manifest, shards = shards_of(source)
    from_layout, from_addresses = layout_in_place(manifest, shards, None)
    to_layout, to_addresses = layout_in_place(manifest, shards_of(target)[1], block)
    rows = len(to_layout)
    groups = [(first, min(first + 5, rows)) for first in range(0, rows, 5)]
    pieces = pieces_from(manifest, from_layout, to_layout, owners)
    return (
        manifest,
        to_layout,
        to_addresses,
        tiles_of(manifest, pieces, to_layout, to_addresses, groups),
        from_addresses,
        from_layout,
    )


@pytest.mark.parametrize("cores", [1, 8, 12, 64])
def test_many_cores_copy_and_digest_the_same(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(copies, "_LEAST_BYTES", 64)
    source, target = states(cores, [(40, 50), (3,), (7, 9, 11), (2, 30_000), (1, 1)])
    manifest, layout, addresses, tiles, bases, _ = job(source, target, 1000)
    digests, read = (np.zeros(len(layout), np.uint64) for _ in range(2))
    tables = [table for per_source in tiles for table in per_source if len(table)]
    threads = [len(copies._shares(table.rows * table.row_bytes)) - 1 for table in tables]
    assert max(threads) == {1: 1, 8: 4, 12: 6, 64: 8}[cores]
    assert max(len(copies._shares(table.rows * table.row_bytes, 1)) - 1 for table in tables) == min(cores, 8)
    for table in tables:
        edges = copies._shares(table.rows * table.row_bytes)
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (0, len(table))
        assert copy_and_digest(table, bases, digests) == table.nbytes
    assert same(source, target)
    digest_rows(manifest, layout, addresses, 0, len(layout), read)
    assert np.array_equal(read, digests)
    assert np.array_equal(read, digest_memory(manifest, layout, addresses))


def test_a_child_process_copies_with_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(copies, "_LEAST_BYTES", 64)
    source, target = states(1, [(2, 30_000)], ("plain", "plain"))
    _, layout, _, tiles, bases, _ = job(source, target, 1000)

    def copy() -> bool:
        return all(
            copy_and_digest(table, bases, np.zeros(len(layout), np.uint64)) == table.nbytes for each in tiles for table in each
        )

    assert copy()
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if copy() else 1)
    assert os.waitpid(child, 0)[1] == 0


def same(source: State, target: State) -> bool:
    return all(np.array_equal(raw(source[name]), raw(target[name])) for name in source)


def states(seed: int, shapes: list[tuple[int, ...]], memories: tuple[str, str] | None = None) -> tuple[State, State]:
    generator = np.random.default_rng(seed)
    source, target = {}, {}
    for i, shape in enumerate(shapes):
        dtype = DTYPES[int(generator.integers(len(DTYPES)))]
        one, other = memories or (MEMORIES[generator.integers(4)], MEMORIES[generator.integers(4)])
        source[f"t{i}"] = stored(random_bits(shape, dtype, generator), one)
        target[f"t{i}"] = stored(random_bits(shape, dtype, generator), other)
    return source, target


@settings(max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.lists(st.integers(1, 7), max_size=4).map(tuple), min_size=1, max_size=6),
    st.sampled_from([16, 100, 1 << 20]),
)
def test_any_memory_to_any_memory(seed: int, shapes: list[tuple[int, ...]], block: int) -> None:
    source, target = states(seed, shapes)
    manifest, layout, addresses, tiles, bases, from_layout = job(source, target, block)
    copied = 0
    digests = np.zeros(len(layout), np.uint64)
    for per_source in tiles:
        for table in per_source:
            check_tiles(table, from_layout.regions)
            copied += copy_and_digest(table, bases, digests)
    assert same(source, target)
    assert copied == manifest.nbytes
    read = np.zeros(len(layout), np.uint64)
    digest_rows(manifest, layout, addresses, 0, len(layout), read)
    assert np.array_equal(read, digests)


@pytest.mark.parametrize("memories", [(one, other) for one in MEMORIES for other in MEMORIES])
def test_large_tiles(memories: tuple[str, str]) -> None:
    """Runs longer than a step, a block of the digest and a tile."""
    source, target = states(17, [(3, 1200, 301), (700_001,), (2, 9001), (5, 3)], memories)
    manifest, layout, _, tiles, bases, _ = job(source, target, 1 << 40, owners=1)
    assert max(int((table.rows * table.row_bytes).max()) for table in tiles[0] if len(table)) <= TILE_BYTES
    for table in tiles[0]:
        assert copy_tiles(table, bases) == table.nbytes
    assert same(source, target)
    read, digests = np.zeros(len(layout), np.uint64), np.zeros(len(layout), np.uint64)
    for table in tiles[0]:
        copy_and_digest(table, bases, digests)
    digest_rows(manifest, layout, layout_in_place(manifest, shards_of(target)[1], None)[1], 0, len(layout), read)
    assert np.array_equal(read, digests)


def test_digest_is_of_the_target_not_the_source() -> None:
    """A tile that writes where another wrote before is seen by reading the rows again."""
    source, target = states(3, [(64, 64)], ("plain", "plain"))
    manifest, layout, addresses, tiles, bases, _ = job(source, target, 1 << 20, owners=1)
    digests = np.zeros(len(layout), np.uint64)
    copy_and_digest(tiles[0][0], bases, digests)
    target["t0"].view(torch.uint8)[3, 5] ^= 1
    read = np.zeros(len(layout), np.uint64)
    digest_rows(manifest, layout, addresses, 0, len(layout), read)
    assert not np.array_equal(read, digests)


@pytest.mark.parametrize("digest", [False, True])
def test_through_a_bucket(digest: bool) -> None:
    source, target = states(5, [(7, 5), (40, 70), (3, 3, 3), (), (900,)])
    manifest, layout, addresses, tiles, bases, _ = job(source, target, 500)
    out = np.zeros(len(layout), np.uint64)
    for per_source in tiles:
        for table in per_source:
            for first in range(0, len(table), 3):
                last = min(first + 3, len(table))
                size = int((table.rows * table.row_bytes)[first:last].sum())
                bucket = np.full(size + 2, 0xA5, np.uint8)
                assert gather_tiles(table, bases, bucket.ctypes.data + 1, first, last) == size
                assert bucket[0] == bucket[-1] == 0xA5
                if digest:
                    assert scatter_and_digest(table, bucket.ctypes.data + 1, first, last, out) == size
                else:
                    assert scatter_tiles(table, bucket.ctypes.data + 1, first, last) == size
    assert same(source, target)
    if digest:
        read = np.zeros(len(layout), np.uint64)
        digest_rows(manifest, layout, addresses, 0, len(layout), read)
        assert np.array_equal(read, out)


def test_contiguous_memory_is_few_tiles() -> None:
    source, target = states(1, [(4, 8, 64)], ("plain", "plain"))
    _, _, _, tiles, _, _ = job(source, target, 1 << 20, owners=1)
    assert sum(map(len, tiles[0])) == 2  # the two halves of the last dimension, 32 runs each
    assert [int(table.rows[0]) for table in tiles[0]] == [32]


def test_stops_when_told_from_another_thread() -> None:
    size = 1 << 20
    memory = np.zeros(2 * size, np.uint8)
    count = 1 << 15  # 32 GiB of copies: would take far longer than this test may
    nothing = np.zeros(count, np.int64)
    to = np.full(count, memory.ctypes.data + size, np.int64)
    tiles = CopyTable(nothing.astype(np.int32), nothing, nothing, to, nothing, nothing + 1, nothing + size)
    stop = np.zeros(1, np.int8)
    done: list[int] = []
    worker = threading.Thread(target=lambda: done.append(copy_tiles(tiles, [memory.ctypes.data], stop)))
    assert tiles.table_address
    worker.start()
    stop[0] = 1
    worker.join(30)
    assert not worker.is_alive()
    assert done[0] < tiles.nbytes


def one_tile(**changes: int) -> CopyTable:
    values = {"region": 0, "source": 0, "source_stride": 8, "target": 1, "target_stride": 8, "rows": 2, "row_bytes": 8} | changes
    region, *rest = (np.array([value], np.int64) for value in values.values())
    return CopyTable(region.astype(np.int32), *rest)


@pytest.mark.parametrize(
    "changes",
    [
        {"region": 1},
        {"region": -1},
        {"source": -1},
        {"source": 1},
        {"source_stride": -8},
        {"source_stride": 9},
        {"rows": 0},
        {"rows": 3},
        {"row_bytes": 0},
        {"row_bytes": -4},
        {"source": 2**63 - 1},
        {"source_stride": 2**62, "rows": 5},
        {"rows": 2**62, "row_bytes": 4, "source_stride": 0},
        {"rows": 2**33, "source_stride": 2**31},
    ],
    ids=str,
)
def test_forged_tables_are_refused(changes: dict[str, int]) -> None:
    check_tiles(one_tile(), [16])
    with pytest.raises(ProtocolError):
        check_tiles(one_tile(**changes), [16])


def test_pieces_outside_their_row_are_refused() -> None:
    source, target = states(1, [(4, 6)], ("plain", "plain"))
    manifest, shards = shards_of(source)
    layout, addresses = layout_in_place(manifest, shards_of(target)[1], None)
    pieces = pieces_from(manifest, layout_in_place(manifest, shards, None)[0], layout, 1)
    groups = [(0, 1)]
    pieces.stops[0, 1] = 7
    with pytest.raises(PlanMismatch, match="outside the row"):
        tiles_of(manifest, pieces, layout, addresses, groups)
    pieces.stops[0, 1] = 3
    with pytest.raises(PlanMismatch, match="no group"):
        tiles_of(manifest, pieces, layout, addresses, [])
    with pytest.raises(LayoutError, match="addresses"):
        tiles_of(manifest, pieces, layout, (*addresses, 0), groups)
    pieces.target_row[0] = 1
    with pytest.raises(PlanMismatch, match="do not exist"):
        tiles_of(manifest, pieces, layout, addresses, groups)


def test_digests_need_keys() -> None:
    with pytest.raises(LayoutError, match="have no keys"):
        copy_and_digest(one_tile(), [0], np.zeros(1, np.uint64))


def test_strides_that_ask_for_one_copy_an_element_are_refused_before_there_is_a_table() -> None:
    shape = (2048, 2048, 2048, 4)
    manifest = Manifest([TensorSpec("w", shape, "uint8")])
    none, zeros = np.zeros(1, np.int32), np.zeros(1, np.int64)
    starts, stops = np.zeros((1, 4), np.int64), np.array([shape], np.int64)
    strides = np.array([[1 << 24, 1 << 13, 4, 1]], np.int64)
    layout = Layout(manifest, none, starts, stops, none, zeros, strides, (1 << 35,))
    forged = Pieces(("t/0",), none, none, zeros, np.array([[3, 5, 7, 11]], np.int64), none, starts, stops)
    with pytest.raises(PlanMismatch, match="separate copies"):
        tiles_of(manifest, forged, layout, [1 << 40], [(0, 1)])
