# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
# Triton compiles this file as its own language, so its functions have no Python type annotations.
"""Triton kernels of the additive digest and of the tile copy. The other files of this folder build their tables."""

from __future__ import annotations

import triton
import triton.language as tl

DIGEST_COLUMNS = 8
"""Rows of the digest table, ``int64[8, items]``:

0. address of the window's first position
1. stride between runs
2. stride between elements
3. position key of the first run
4. key step
5. output row << 32 | runs
6. first byte << 32 | end byte (both within the window)
7. first C index << 8 | log2(itemsize) << 4 | path (0: whole 16-byte quads, 1: words, 2: bytes)
"""

COPY_COLUMNS = 4
"""Rows of the copy table, ``int64[4, tiles]``: source, target, source stride << 32 | target stride, runs << 32 | bytes of a run.

A tile has at most 2^16 bytes; strides are below 2^31.
"""


_BLOCK = tl.constexpr(4096)  # words of the C table


@triton.jit
def row_weight(key, seed, second):
    """Compute R(key) of the digest: splitmix64 with two seeds, made odd."""
    x = key + seed
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 + second
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


@triton.jit
def _bytes_below(count):
    """Return a word whose lowest ``count`` bytes (0 to 4) are ones."""
    return ((tl.full(count.shape, 1, tl.uint64) << (count * 8).to(tl.uint64)) - 1).to(tl.uint32)


@triton.jit
def _word_masks(byte, low, high):
    """Mask of the bytes in ``[low, high)`` of the word at position ``byte``."""
    first = tl.minimum(tl.maximum(low - byte, 0), 4)
    last = tl.minimum(tl.maximum(high - byte, 0), 4)
    return _bytes_below(last) & (_bytes_below(first) ^ 0xFFFFFFFF)


@triton.jit
def _digest_quads(address, stride, key, key_step, runs, first, wide, weights, seed, second, out, QUADS: tl.constexpr):
    """Digest runs of whole, aligned 16-byte quads: ``wide`` of them from ``first`` on.

    A lane keeps its column from step to step, so the loop only sums R times word and C is multiplied in once at the end.
    """
    group = QUADS // wide
    lane = tl.arange(0, QUADS)
    run = lane // wide
    quad = first + lane % wide
    last = tl.where(run < group, runs, 0)  # lanes beyond the last whole run of a step are idle
    word = tl.arange(0, 4)
    keys = key + run.to(tl.uint64) * key_step
    key_step = key_step * group.to(tl.uint64)
    lanes = address + run.to(tl.int64) * stride + quad * 16
    stride = stride * group
    sums = tl.zeros((QUADS, 4), tl.uint64)
    for _ in range(0, runs, group):
        pointers = tl.multiple_of(lanes, 16).to(tl.pointer_type(tl.uint32))[:, None] + word[None, :]
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (16, 16)), (1, 4))
        values = tl.load(pointers, mask=(run < last)[:, None], other=0)
        sums += row_weight(keys, seed, second)[:, None] * values.to(tl.uint64)
        run += group
        keys += key_step
        lanes += stride
    factors = weights + tl.multiple_of(quad * 4, 4)[:, None] + word[None, :]
    factors = tl.load(tl.max_contiguous(tl.multiple_of(factors, (16, 16)), (1, 4))).to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.atomic_add(out, tl.sum(tl.sum(sums * factors, axis=1), axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _digest_words(
    address,
    stride,
    element,
    key,
    key_step,
    runs,
    low,
    high,
    shift,
    weights,
    seed,
    second,
    out,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Digest all other runs, one lane for each word: read whole and masked (``UNIT`` 4), or assembled from bytes (``UNIT`` 1)."""
    first = low // 4
    words = (high + 3) // 4 - first
    magic = ((1 << 32) + words.to(tl.int64) - 1) // words  # division as multiplication, exact for so few words
    lane = tl.arange(0, LANES)
    size = (1 << shift) - 1
    sums = tl.zeros((LANES,), tl.uint64)
    for start in range(0, runs * words, LANES):
        index = (start + lane).to(tl.int64)
        run = (index * magic) >> 32
        word = (first + index - run * words).to(tl.int32)
        wanted = run < runs
        byte = word * 4
        base = address + run * stride
        if UNIT == 4:
            values = tl.load((base + byte).to(tl.pointer_type(tl.uint32)), mask=wanted, other=0)
            values = (values & _word_masks(byte, low, high)).to(tl.uint64)
        else:
            values = tl.zeros((LANES,), tl.uint64)
            for part in tl.static_range(4):
                at = byte + part
                pointers = (base + (at >> shift).to(tl.int64) * element + (at & size)).to(tl.pointer_type(tl.uint8))
                values += tl.load(pointers, mask=wanted & (at >= low) & (at < high), other=0).to(tl.uint64) << (8 * part)
        factors = tl.load(weights + word, mask=wanted, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        sums += row_weight(key + run.to(tl.uint64) * key_step, seed, second) * factors * values
    tl.atomic_add(out, tl.sum(sums, axis=0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["items", "first"])  # one compilation for every table
def digest_kernel(table, items, first, weights, out, QUADS: tl.constexpr):
    """Add one item's digest to ``out[row]``. An item is a window of at most ``QUADS`` 16-byte quads of some runs.

    ``weights`` are the words of :class:`~weightsync.tensors.digest.DigestConstants`: the C table and two seeds of R.
    """
    item = table + first + tl.program_id(0)
    address = tl.load(item)
    stride = tl.load(item + items)
    element = tl.load(item + 2 * items)
    key = tl.load(item + 3 * items).to(tl.uint64)
    key_step = tl.load(item + 4 * items).to(tl.uint64)
    packed = tl.load(item + 5 * items)
    bounds = tl.load(item + 6 * items)
    kind = tl.load(item + 7 * items).to(tl.int32)
    runs = (packed & 0xFFFFFFFF).to(tl.int32)
    row = packed >> 32
    low = (bounds >> 32).to(tl.int32)
    high = (bounds & 0xFFFFFFFF).to(tl.int32)
    path = kind & 15
    shift = (kind >> 4) & 15
    column = kind >> 8
    seeds = (weights + _BLOCK).to(tl.pointer_type(tl.uint64))
    seed, second = tl.load(seeds), tl.load(seeds + 1)
    factors, total = weights + column, out + row

    if path == 0:
        wide = (high - low) // 16
        _digest_quads(address, stride, key, key_step, runs, low // 16, wide, factors, seed, second, total, QUADS)
    elif path == 1:
        _digest_words(address, stride, element, key, key_step, runs, low, high, shift, factors, seed, second, total, 4, QUADS)
    else:
        _digest_words(address, stride, element, key, key_step, runs, low, high, shift, factors, seed, second, total, 1, QUADS)


@triton.jit
def _copy_runs(source, target, source_stride, target_stride, runs, run_bytes, UNIT: tl.constexpr, LANES: tl.constexpr):
    """Copy one tile in lanes of 16 bytes (``UNIT`` 16) or of one element of ``UNIT`` bytes."""
    units = run_bytes // UNIT
    total = runs * units
    # Division by a scalar as multiplication: exact, because a tile has at most 2^16 units.
    magic = ((1 << 32) + units.to(tl.int64) - 1) // units
    lane = tl.arange(0, LANES)
    for start in range(0, total, LANES):
        index = (start + lane).to(tl.int64)
        run = (index * magic) >> 32
        column = (index - run * units) * UNIT
        wanted = index < total
        reads = source + run * source_stride + column
        writes = target + run * target_stride + column
        if UNIT == 16:
            word = tl.arange(0, 4)
            load = tl.multiple_of(reads, 16).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
            store = tl.multiple_of(writes, 16).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
            load = tl.max_contiguous(tl.multiple_of(load, (16, 16)), (1, 4))
            store = tl.max_contiguous(tl.multiple_of(store, (16, 16)), (1, 4))
            tl.store(store, tl.load(load, mask=wanted[:, None]), mask=wanted[:, None])
        else:
            kind: tl.constexpr = tl.int32 if UNIT == 4 else (tl.int16 if UNIT == 2 else tl.int8)
            tl.store(writes.to(tl.pointer_type(kind)), tl.load(reads.to(tl.pointer_type(kind)), mask=wanted), mask=wanted)


@triton.jit
def _copy_tile(tile, tiles, LANES: tl.constexpr):
    """Copy one tile in the widest unit that its addresses, strides and run length allow."""
    source = tl.load(tile)
    target = tl.load(tile + tiles)
    strides = tl.load(tile + 2 * tiles)
    packed = tl.load(tile + 3 * tiles)
    source_stride = strides >> 32
    target_stride = strides & 0xFFFFFFFF
    runs = (packed >> 32).to(tl.int32)
    run_bytes = (packed & 0xFFFFFFFF).to(tl.int32)
    odd = source | target | source_stride | target_stride | run_bytes.to(tl.int64)
    if odd & 15 == 0:
        _copy_runs(source, target, source_stride, target_stride, runs, run_bytes, 16, LANES)
    elif odd & 3 == 0:
        _copy_runs(source, target, source_stride, target_stride, runs, run_bytes, 4, LANES)
    elif odd & 1 == 0:
        _copy_runs(source, target, source_stride, target_stride, runs, run_bytes, 2, LANES)
    else:
        _copy_runs(source, target, source_stride, target_stride, runs, run_bytes, 1, LANES)


@triton.jit(do_not_specialize=["tiles", "first"])
def copy_kernel(table, tiles, first, LANES: tl.constexpr):
    """Copy one tile."""
    _copy_tile(table + first + tl.program_id(0), tiles, LANES)


@triton.jit(do_not_specialize=["tiles", "first", "last"])
def copy_few_kernel(table, tiles, first, last, LANES: tl.constexpr):
    """Copy the tiles from ``first`` to ``last`` with any number of programs. A small number leaves room for other kernels."""
    for tile in range(first + tl.program_id(0), last, tl.num_programs(0)):
        _copy_tile(table + tile, tiles, LANES)
