"""Layouts with memory behind them: what pieces do to bytes, element by element and without any of the planner's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import Plan, SourceRank, TargetRank
from weightsync.protocol.messages import Host

Bytes = npt.NDArray[np.uint8]
Shard = tuple[str, Sequence[int], Sequence[int]]
HERE = Host("here", "here/0")


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def layout_of(manifest: Manifest, shards: Sequence[Shard], transposed: bool = False, gap: int = 0) -> Layout:
    """One region a shard, in the order given and sorted by tensor; ``transposed`` stores it in Fortran order."""
    rows = sorted(enumerate(shards), key=lambda item: (manifest.index[item[1][0]], item[0]))
    dims = manifest.dims
    tensor = np.array([manifest.index[name] for _, (name, _, _) in rows], np.int32)
    starts = np.zeros((len(rows), dims), np.int64)
    stops = np.ones((len(rows), dims), np.int64)
    strides = np.zeros((len(rows), dims), np.int64)
    regions = []
    for row, (_, (_name, begin, end)) in enumerate(rows):
        if begin:
            starts[row, -len(begin) :], stops[row, -len(end) :] = begin, end
        step = int(manifest.itemsizes[tensor[row]])
        for dim in range(dims) if transposed else reversed(range(dims)):
            strides[row, dim] = step
            step *= int(stops[row, dim] - starts[row, dim])
        regions.append(step + gap)
    return Layout(
        manifest,
        tensor,
        starts,
        stops,
        np.arange(len(rows), dtype=np.int32),
        np.full(len(rows), gap, np.int64),
        strides,
        tuple(regions),
    )


def whole(manifest: Manifest, transposed: bool = False) -> Layout:
    """One rank that holds everything."""
    return layout_of(manifest, [(one.name, (0,) * len(one.shape), one.shape) for one in manifest if one.size], transposed)


def ranks_of(layouts: Mapping[str, Layout], hosts: Mapping[str, Host] | None = None) -> list[SourceRank]:
    return [SourceRank(name, (hosts or {}).get(name, HERE), layout) for name, layout in layouts.items()]


def targets_of(layouts: Mapping[str, Layout], hosts: Mapping[str, Host] | None = None) -> list[TargetRank]:
    return [TargetRank(name, (hosts or {}).get(name, HERE), layout) for name, layout in layouts.items()]


def source_bytes(plan: Plan) -> dict[str, int]:
    """Bytes that each source of a plan delivers in total, including zeros."""
    load = dict.fromkeys((rank.member for rank in plan.sources), 0)
    for target in plan.targets:
        pieces = plan.pieces(target.member)
        nbytes = pieces.sizes() * plan.manifest.itemsizes[target.layout.tensor[pieces.target_row]]
        for number, amount in enumerate(np.bincount(pieces.source, weights=nbytes, minlength=len(pieces.sources))):
            load[pieces.sources[number]] += int(amount)
    return load


def contents(manifest: Manifest, seed: int) -> list[Bytes]:
    """Random bytes for every tensor, ``uint8[elements in C order, itemsize]``."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 256, (one.size, int(size)), np.uint8) for one, size in zip(manifest, manifest.itemsizes, strict=True)
    ]


def _elements(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    return list(product(*(range(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True))))


def memory_of(manifest: Manifest, layout: Layout, tensors: list[Bytes]) -> list[Bytes]:
    """The regions of a rank that holds its shards of ``tensors``."""
    regions = [np.zeros(size, np.uint8) for size in layout.regions]
    for row in range(len(layout)):
        index = int(layout.tensor[row])
        size, shape = int(manifest.itemsizes[index]), manifest.shapes[index].tolist()
        for at in _elements(layout.starts[row], layout.stops[row]):
            place = int(layout.offset[row] + np.dot(np.array(at) - layout.starts[row], layout.strides[row]))
            regions[layout.region[row]][place : place + size] = tensors[index][int(np.ravel_multi_index(at, shape))]
    return regions


def deliver(manifest: Manifest, target: Layout, pieces: Pieces, sources: Mapping[str, list[Bytes]]) -> list[Bytes]:
    """Copy every piece element by element; raise if an element is written twice or lies outside its row."""
    regions = [np.zeros(size, np.uint8) for size in target.regions]
    written: set[tuple[int, tuple[int, ...]]] = set()
    assert np.all(np.diff(pieces.target_row) >= 0)
    for piece in range(len(pieces)):
        row = int(pieces.target_row[piece])
        size = int(manifest.itemsizes[target.tensor[row]])
        held = sources[pieces.sources[pieces.source[piece]]][pieces.source_region[piece]]
        for at in _elements(pieces.starts[piece], pieces.stops[piece]):
            assert (row, at) not in written
            written.add((row, at))
            assert np.all(at >= target.starts[row])
            assert np.all(at < target.stops[row])
            begin = int(pieces.source_offset[piece] + np.dot(np.array(at) - pieces.starts[piece], pieces.source_strides[piece]))
            assert begin + size <= len(held)
            place = int(target.offset[row] + np.dot(np.array(at) - target.starts[row], target.strides[row]))
            regions[target.region[row]][place : place + size] = held[begin : begin + size]
    assert len(written) == int(target.sizes().sum())
    return regions


def check_plan(manifest: Manifest, plan: Plan, seed: int = 1) -> None:
    """Run the plan on random bytes: every target must end up with exactly the bytes that its layout describes."""
    tensors = contents(manifest, seed)
    sources = {rank.member: memory_of(manifest, rank.layout, tensors) for rank in plan.sources}
    for rank in plan.targets:
        pieces = plan.pieces(rank.member)
        got = deliver(manifest, rank.layout, pieces, sources)
        for mine, expected in zip(got, memory_of(manifest, rank.layout, tensors), strict=True):
            assert np.array_equal(mine, expected)
        again = Pieces.from_columns(manifest, rank.layout, len(pieces.sources), pieces.to_columns())
        assert again.digest == pieces.digest
        assert plan.nbytes(rank.member) == int((pieces.sizes() * manifest.itemsizes[rank.layout.tensor[pieces.target_row]]).sum())


def digests_of(manifest: Manifest, layout: Layout, tensors: list[Bytes]) -> npt.NDArray[np.uint64]:
    """A sum over bytes, each times an odd number that depends on its global position: additive over boxes, as the real one."""
    sums = np.zeros(len(layout), np.uint64)
    for row in range(len(layout)):
        index = int(layout.tensor[row])
        shape = manifest.shapes[index].tolist()
        chosen = [int(np.ravel_multi_index(at, shape)) for at in _elements(layout.starts[row], layout.stops[row])]
        values = tensors[index]
        weights = np.random.default_rng(index).integers(0, 2**63, values.shape, np.uint64) | np.uint64(1)
        sums[row] = (values.astype(np.uint64) * weights)[chosen].sum(dtype=np.uint64)
    return sums
