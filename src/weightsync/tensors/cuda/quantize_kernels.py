# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
# Triton compiles this file as its own language, so its functions have no Python type annotations.
"""Triton kernels that quantize shards of matrices, with the bits of :mod:`weightsync.tensors.formats`.

``SOURCE`` is the dtype of the shards and ``DTYPE`` that in which they are published: bfloat16 (0), float16 (1) or float32 (2).
``ALIGNED``: rows of shards and of data begin at multiples of 16 bytes, and shards begin and end at columns that are multiples of
128. ``ROWS`` and ``COLUMNS`` are those of a block, 0 for all.

Launch them with ``enable_fp_fusion=False``: a product and a sum are rounded one after the other. Rounding to bfloat16 and to FP8
is done with integers, so that Triton's interpreter, which has neither, gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 128
"""Rows and columns of the part of a matrix that one program works on. Tiles begin at multiples of it."""

TABLE_ROWS = 20
"""Rows of the table, ``int64[20, shards]``. Rows and columns are those of the matrix; a cell is a block that the shard touches:

0. address of the shard
1. elements between its rows
2. to 5. first row, end, first column, end
6. number of its first tile
7. tiles side by side
8. number of its first cell
9. cells side by side
10. 11. row and column, in blocks, of its first cell
12. address of the data
13. elements between rows of the data
14. address of the scales that the shard publishes
15. scales side by side
16. to 19. which cells these are: first row, end, first column, end
"""

_TILE = tl.constexpr(TILE)


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(number):
    return number.to(tl.int32, bitcast=True)


@triton.jit
def _rounded(number, DTYPE: tl.constexpr):
    """Round to the nearest value of ``DTYPE``, ties to even. NaN stays NaN."""
    if DTYPE == 0:
        bits = _bits(number)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return _number(tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits, even))
    elif DTYPE == 1:
        return number.to(tl.float16).to(tl.float32)
    else:
        return number


@triton.jit
def _values(row, shards, top, left, SOURCE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tile's values in ``DTYPE``, as float32; zeros outside the shard."""
    begin, end = tl.load(row + 2 * shards), tl.load(row + 3 * shards)
    first, last = tl.load(row + 4 * shards), tl.load(row + 5 * shards)
    if ALIGNED:  # hints count in the function where a value is made
        first, last = tl.multiple_of(first, 128), tl.multiple_of(last, 128)
    rows, columns = top + tl.arange(0, _TILE), left + tl.arange(0, _TILE)
    inside = ((rows >= begin) & (rows < end))[:, None] & ((columns >= first) & (columns < last))[None, :]
    at = (rows - begin)[:, None] * tl.load(row + shards) + (columns - first)[None, :]
    base = tl.load(row)
    if SOURCE == 0:
        pointers = base.to(tl.pointer_type(tl.uint16)) + at
    elif SOURCE == 1:
        pointers = base.to(tl.pointer_type(tl.float16)) + at
    else:
        pointers = base.to(tl.pointer_type(tl.float32)) + at
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (16, 16)), (1, 16))
    value = tl.load(pointers, mask=inside, other=0)
    value = _number(value.to(tl.int32) << 16) if SOURCE == 0 else value.to(tl.float32)
    if SOURCE != DTYPE:
        value = _rounded(value, DTYPE)
    return value


@triton.jit
def _place(table, shards, owners):
    """The table's column for this program, and where its tile begins."""
    number = tl.program_id(0).to(tl.int64)
    row = table + tl.load(owners + number)
    local, across = number - tl.load(row + 6 * shards), tl.load(row + 7 * shards)
    top = (tl.load(row + 2 * shards) // _TILE + local // across) * _TILE
    left = (tl.load(row + 4 * shards) // _TILE + local % across) * _TILE
    return row, top, left


@triton.jit
def _cells(row, shards, top, left, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of the tile's cells in the shard's grid, and which the shard touches. Blocks have ``ROWS`` and ``COLUMNS``.

    One cell, or with ``ROWS`` 1 some for each row.
    """
    if ROWS == 1:
        rows = top + tl.arange(0, _TILE)
        live = (rows >= tl.load(row + 2 * shards)) & (rows < tl.load(row + 3 * shards))
        across = rows - tl.load(row + 10 * shards)
        if COLUMNS == 0:
            along = tl.zeros((1,), tl.int64)
            touched = along == 0
        else:
            block = left // COLUMNS + tl.arange(0, _TILE // COLUMNS)
            touched = ((block + 1) * COLUMNS > tl.load(row + 4 * shards)) & (block * COLUMNS < tl.load(row + 5 * shards))
            along = block - tl.load(row + 11 * shards)
        return across[:, None], along[None, :], live[:, None] & touched[None, :]
    else:
        across = top * 0
        along = left * 0
        if ROWS:
            across = top // ROWS - tl.load(row + 10 * shards)
        if COLUMNS:
            along = left // COLUMNS - tl.load(row + 11 * shards)
        return across, along, across >= 0


@triton.jit(do_not_specialize=["shards"])
def maxima_kernel(
    table,
    shards,
    owners,
    maxima,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the largest absolute value of each cell to ``maxima``, zeros before, as bits of float32: NaN is larger than Inf."""
    row, top, left = _place(table, shards, owners)
    bits = _bits(_values(row, shards, top, left, SOURCE, DTYPE, ALIGNED)) & 0x7FFFFFFF
    across, along, live = _cells(row, shards, top, left, ROWS, COLUMNS)
    to = maxima + tl.load(row + 8 * shards) + across * tl.load(row + 9 * shards) + along
    if ROWS == 1:
        if COLUMNS == 0:
            tl.atomic_max(to, tl.max(bits, axis=1)[:, None], mask=live, sem="relaxed")
        else:
            grouped = tl.reshape(bits, (_TILE, _TILE // COLUMNS, COLUMNS))
            tl.store(to, tl.max(grouped, axis=2), mask=live)
    else:
        largest = tl.max(tl.max(bits, axis=1), axis=0)
        if ROWS:
            tl.store(to, largest)
        else:
            tl.atomic_max(to, largest, sem="relaxed")


@triton.jit
def _fp8(number):
    """Codes of the nearest values of E4M3, ties to even, for numbers from -448 to 448."""
    bits = _bits(number)
    size = bits & 0x7FFFFFFF
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    denormal = _bits(_number(size) + 16384.0) - (141 << 23)  # the sum rounds to multiples of the smallest one
    return tl.where(size < (121 << 23), denormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _e2m1(number):
    """Codes of the nearest values of E2M1; of two as near, the one with the even mantissa. Saturates."""
    bits = _bits(number)
    size = _number(bits & 0x7FFFFFFF)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def _codes(value, factor, DTYPE: tl.constexpr, PACKED: tl.constexpr, DIVIDES: tl.constexpr):
    if DIVIDES:
        scaled = _rounded(tl.div_rn(value, factor), DTYPE)
        if PACKED == 8:
            scaled = tl.minimum(tl.maximum(scaled, -8.0), 7.0)
            return ((scaled + 12582912.0) - 12582912.0).to(tl.int32) + 8  # the sum rounds to integers, ties to even
        else:
            return _fp8(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    elif PACKED == 2:
        return _e2m1(value * factor)
    else:
        return _fp8(tl.minimum(tl.maximum(value * factor, -448.0), 448.0))


@triton.jit(do_not_specialize=["shards"])
def encode_kernel(
    table,
    shards,
    owners,
    factors,
    scales,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Write the data of the shards, with the ``factors`` (float32) of cells, and the ``scales`` that they publish."""
    row, top, left = _place(table, shards, owners)
    value = _values(row, shards, top, left, SOURCE, DTYPE, ALIGNED)
    across, along, live = _cells(row, shards, top, left, ROWS, COLUMNS)
    cell = tl.load(row + 8 * shards) + across * tl.load(row + 9 * shards) + along
    if ROWS == 1:
        factor = tl.load(factors + cell, mask=live, other=1.0)
        if COLUMNS == 0:
            codes = _codes(value, factor, DTYPE, PACKED, DIVIDES)
        else:
            grouped = tl.reshape(value, (_TILE, _TILE // COLUMNS, COLUMNS))
            codes = tl.reshape(_codes(grouped, factor[:, :, None], DTYPE, PACKED, DIVIDES), (_TILE, _TILE))
    else:
        codes = _codes(value, tl.load(factors + cell), DTYPE, PACKED, DIVIDES)
    if PACKED > 1:
        parts = tl.reshape(codes, (_TILE, _TILE // PACKED, PACKED))
        codes = tl.sum(parts << (4 * tl.arange(0, PACKED))[None, None, :], axis=2)
    begin, end = tl.load(row + 2 * shards), tl.load(row + 3 * shards)
    first, last = tl.load(row + 4 * shards), tl.load(row + 5 * shards)
    if ALIGNED:
        first, last = tl.multiple_of(first, 128), tl.multiple_of(last, 128)
    first, last = first // PACKED, last // PACKED
    rows, columns = top + tl.arange(0, _TILE), left // PACKED + tl.arange(0, _TILE // PACKED)
    inside = ((rows >= begin) & (rows < end))[:, None] & ((columns >= first) & (columns < last))[None, :]
    at = (rows - begin)[:, None] * tl.load(row + 13 * shards) + (columns - first)[None, :]
    data = tl.load(row + 12 * shards)
    if PACKED == 8:
        pointers = data.to(tl.pointer_type(tl.int32)) + at
    else:
        pointers = data.to(tl.pointer_type(tl.uint8)) + at
        codes = codes.to(tl.uint8)
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (16, 16)), (1, 16))
    tl.store(pointers, codes, mask=inside)
    low, left_of = tl.load(row + 16 * shards), tl.load(row + 18 * shards)
    published = live & (across >= low) & (across < tl.load(row + 17 * shards))
    published &= (along >= left_of) & (along < tl.load(row + 19 * shards))
    to = (across - low) * tl.load(row + 15 * shards) + along - left_of
    scale = tl.load(scales + cell, mask=published, other=0)
    tl.store(tl.load(row + 14 * shards).to(scales.dtype) + to, scale, mask=published)
