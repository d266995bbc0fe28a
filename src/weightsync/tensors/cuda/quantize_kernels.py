# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
# Triton compiles this file as its own language, so its functions have no Python type annotations.
"""Triton kernel that quantizes shards of matrices, with the bits of :mod:`weightsync.tensors.formats`.

``SOURCE`` is the dtype of the shards and ``DTYPE`` that in which they are published: bfloat16 (0), float16 (1) or float32 (2).
``ALIGNED``: rows of shards and of data begin at multiples of 16 bytes, and shards begin and end at columns that are multiples of
128. ``ROWS`` and ``COLUMNS`` are those of a block, 0 for all. ``TALL`` and ``WIDE`` are those of a tile, the part of a matrix that
is in registers. Tiles begin at multiples of them, but where a block is a row: there a program walks along its rows, in ``CHUNKS``.

Launch it with ``enable_fp_fusion=False``: a product and a sum are rounded one after the other. Rounding to bfloat16 and to FP8
is done with integers, so that Triton's interpreter, which has neither, gives the same bits. GPUs that round to FP8 do it.
"""

from __future__ import annotations

import triton
import triton.language as tl

TABLE_COLUMNS = 23
"""Columns of the table, ``int64[shards, 23]``. Rows and columns are those of the matrix; a cell is a block that the shard touches:

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
20. address of what else it publishes, the shape or the scale of the whole matrix; 0 if nothing
21. 22. rows and columns of the matrix
"""


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
def _inside(row, top, left, ALIGNED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):
    """Rows and columns of the tile in the shard, in elements of ``PACKED`` values, and which of them it has."""
    begin, end = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    first, last = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    if ALIGNED:  # hints count in the function where a value is made
        first, last = tl.multiple_of(first, 128), tl.multiple_of(last, 128)
    rows, columns = top + tl.arange(0, TALL), left // PACKED + tl.arange(0, WIDE // PACKED)
    first, last = first // PACKED, last // PACKED
    inside = ((rows >= begin) & (rows < end))[:, None] & ((columns >= first) & (columns < last))[None, :]
    return (rows - begin)[:, None].to(tl.int64), (columns - first)[None, :], inside


@triton.jit
def _values(
    row, top, left, SOURCE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The tile's values in ``DTYPE``, as float32, in groups if a row has several cells; zeros outside the shard."""
    down, along, inside = _inside(row, top, left, ALIGNED, TALL, WIDE, 1)
    base, at = tl.load(row), down * tl.load(row + 1) + along
    pointers = base.to(tl.pointer_type(tl.uint16 if SOURCE == 0 else (tl.float16 if SOURCE == 1 else tl.float32))) + at
    if ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (16, 16)), (1, 8))
    value = tl.load(pointers, mask=inside, other=0)
    value = _number(value.to(tl.int32) << 16) if SOURCE == 0 else value.to(tl.float32)
    if SOURCE != DTYPE:
        value = _rounded(value, DTYPE)
    return tl.reshape(value, (TALL, WIDE // GROUP, GROUP)) if GROUP else value


@triton.jit
def _place(table, owners, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """This program's row of the table, its number in the shard, and where its first tile begins."""
    number = tl.program_id(0).to(tl.int64)
    row = table + tl.load(owners + number).to(tl.int64) * 23
    local, across, left = number - tl.load(row + 6), tl.load(row + 7), tl.load(row + 4)
    top = (tl.load(row + 2) // TALL + local // across) * TALL
    if ALIGNED:
        left = tl.multiple_of(left, 128)
    if ROWS != 1 or COLUMNS:
        left = (left // WIDE + local % across) * WIDE
    return row, local, top.to(tl.int32), left.to(tl.int32)


@triton.jit
def _cells(row, top, left, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Rows and columns of the tile's cells in the shard's grid, and which the shard touches. Blocks have ``ROWS`` and ``COLUMNS``.

    One cell, or with ``ROWS`` 1 some for each row.
    """
    if ROWS == 1:
        rows = top + tl.arange(0, TALL)
        block = left // COLUMNS + tl.arange(0, WIDE // COLUMNS) if COLUMNS else tl.zeros((1,), tl.int64)
        live = ((rows >= tl.load(row + 2)) & (rows < tl.load(row + 3)))[:, None] & (block >= 0)[None, :]
        if COLUMNS:
            live &= (((block + 1) * COLUMNS > tl.load(row + 4)) & (block * COLUMNS < tl.load(row + 5)))[None, :]
        return (rows - tl.load(row + 10))[:, None], (block - tl.load(row + 11))[None, :], live
    else:
        across = top // ROWS - tl.load(row + 10) if ROWS else tl.load(row + 10) * 0
        along = left // COLUMNS - tl.load(row + 11) if COLUMNS else tl.load(row + 11) * 0
        return across, along, across >= 0


@triton.jit
def _largest(value, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Largest absolute values of cells, as bits of float32: NaN is larger than Inf."""
    bits = _bits(value) & 0x7FFFFFFF
    if ROWS != 1:
        return tl.max(tl.max(bits, axis=1), axis=0)
    else:
        return tl.max(bits, axis=2) if GROUP else tl.max(bits, axis=1)[:, None]


@triton.jit
def _small(number, BITS: tl.constexpr, SHIFT: tl.constexpr, LEAST: tl.constexpr):
    """Codes of the nearest values of a format of ``BITS``, ties to even, for numbers within it.

    It has ``SHIFT`` bits fewer than float32 after the point, in which ``LEAST`` is the exponent of its smallest normal number.
    """
    bits = _bits(number)
    size = bits & 0x7FFFFFFF
    normal = (size - ((LEAST - 1) << 23) + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT
    denormal = _bits(_number(size) + 2.0 ** (LEAST + SHIFT - 127)) - ((LEAST + SHIFT) << 23)  # the sum rounds to its steps
    return tl.where(size < (LEAST << 23), denormal, normal) | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def _exponent(number):
    """Biased exponent of the smallest power of two that is not below ``number``; 0 up to 2^-127."""
    bits = _bits(number)
    return tl.where(bits > 0x400000, (bits >> 23) + ((bits & 0x7FFFFF) > 0).to(tl.int32), 0)


@triton.jit
def _scaled(largest, whole, DTYPE: tl.constexpr, RULE: tl.constexpr, PACKED: tl.constexpr):
    """Scales of cells, as they are published, and the factors of their values."""
    if RULE == "block":
        scale = tl.div_rn(tl.maximum(largest, 0.0001), 448.0)
        return scale, tl.div_rn(1.0, scale)
    elif RULE == "power" or RULE == "mx":
        least = tl.maximum(largest, 0.0001) if RULE == "power" else largest
        exponent = _exponent(tl.div_rn(least, 448.0 if PACKED == 1 else 6.0))
        return exponent.to(tl.uint8), tl.where(exponent == 0, 1.0, _number((254 - exponent) << 23))
    elif RULE == "nvfp4":
        scale = tl.div_rn(tl.div_rn(largest, 6.0), whole)
        code = _small(tl.minimum(tl.maximum(scale, 0.015625), 448.0), 8, 20, 121)
        return code.to(tl.uint8), tl.div_rn(tl.div_rn(1.0, whole), _number((code << 20) + (120 << 23)))
    else:
        scale = _rounded(tl.div_rn(largest, 7.5 if PACKED == 8 else 448.0), DTYPE)
        scale = tl.where(scale == 0, 2.0**-7 if DTYPE == 0 else (2.0**-10 if DTYPE == 1 else 2.0**-23), scale)
        return (_bits(scale) >> 16).to(tl.int16) if DTYPE == 0 else scale.to(tl.float16 if DTYPE == 1 else tl.float32), scale


@triton.jit
def _quotient(value, factor, DTYPE: tl.constexpr):
    """Quotients in ``DTYPE``, of numbers in it.

    That of two numbers of 8 bits is never halfway between two such numbers, but at least 2^-17 of it away. So a product with the
    reciprocal, within 2^-22 of it, rounds to the same bfloat16. One that is denormal may not, and is zero in FP8 and INT4.
    """
    if DTYPE == 0:
        up = tl.where(factor < 2.0**-100, 2.0**64, 1.0)  # else a reciprocal overflows
        return _number((_bits((value * up) * tl.div_rn(1.0, factor * up)) + 0x8000) & -65536)
    else:
        return _rounded(tl.div_rn(value, factor), DTYPE)


@triton.jit
def _codes(value, factor, DTYPE: tl.constexpr, RULE: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr):
    scaled = _quotient(value, factor, DTYPE) if RULE == "divide" else value * factor
    if PACKED == 8:  # the sum rounds to integers, ties to even
        return _bits(tl.minimum(tl.maximum(scaled, -8.0), 7.0) + 12582912.0) - (0x4B400000 - 8)
    elif PACKED == 2:
        return _small(tl.minimum(tl.maximum(scaled, -6.0), 6.0), 4, 22, 127)
    else:
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else _small(scaled, 8, 20, 121)


@triton.jit
def _write(
    row, top, left, value, factor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, RULE: tl.constexpr, PACKED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode a tile, and write it to the data."""
    codes = _codes(value, factor, DTYPE, RULE, PACKED, NATIVE)
    if PACKED == 8:
        low, high = tl.split(tl.reshape(codes, (TALL, WIDE // 8, 2, 2, 2)))
        low, high = tl.split(low | high << 4)
        low, high = tl.split(low | high << 8)
        codes = low | high << 16
    elif PACKED == 2:
        low, high = tl.split(tl.reshape(codes, (TALL, WIDE // 2, 2)))
        codes = (low | high << 4).to(tl.uint8)
    else:
        codes = tl.reshape(codes, (TALL, WIDE)).to(tl.uint8)
    down, along, inside = _inside(row, top, left, ALIGNED, TALL, WIDE, PACKED)
    pointers = tl.load(row + 12).to(tl.pointer_type(codes.dtype)) + down * tl.load(row + 13) + along
    if ALIGNED and PACKED < 8:  # a thread writes what it read, 8 values
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (8 // PACKED, 8 // PACKED)), (1, 8 // PACKED))
    tl.store(pointers, codes, mask=inside)


@triton.jit
def quantize_kernel(
    table, owners, maxima, wholes, bad,
    SOURCE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr, GIVEN: tl.constexpr, RULE: tl.constexpr, PACKED: tl.constexpr,
    INVERSE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write what the shards publish, and to ``bad`` the smallest number of one that is not finite.

    ``GIVEN``: ``maxima`` are those of the cells; else each is computed here. ``wholes`` are those of the shards, for NVFP4, whose
    scale of the matrix is published as it is, or with ``INVERSE`` its reciprocal. ``NATIVE``: the GPU rounds to FP8.

    With the rule ``maxima``, only write the largest absolute value of each cell to ``maxima``, zeros before, as bits.
    """
    group: tl.constexpr = COLUMNS if ROWS == 1 else 0
    row, local, top, left = _place(table, owners, ALIGNED, ROWS, COLUMNS, TALL, WIDE)
    value = _values(row, top, left, SOURCE, DTYPE, ALIGNED, TALL, WIDE, group)
    across, along, live = _cells(row, top, left, ROWS, COLUMNS, TALL, WIDE)
    cell = maxima + tl.load(row + 8) + across * tl.load(row + 9) + along
    if GIVEN:
        largest = tl.load(cell, mask=live, other=0)
    else:
        largest = _largest(value, ROWS, group)
        for chunk in range(1, CHUNKS):
            more = _values(row, top, left + chunk * WIDE, SOURCE, DTYPE, ALIGNED, TALL, WIDE, group)
            largest = tl.maximum(largest, _largest(more, ROWS, group))
    if RULE == "maxima":
        if ROWS:
            tl.store(cell, largest, mask=live)
        else:
            tl.atomic_max(cell, largest, sem="relaxed")
    else:
        owner, other = tl.load(owners + tl.program_id(0)), tl.load(row + 20)
        tl.atomic_min(bad + across * 0 + along * 0, owner, mask=live & (largest >= 0x7F800000), sem="relaxed")
        largest = tl.where(largest < 0x7F800000, largest, 0)  # what is written then does not count
        whole, first = 1.0, (local == 0) & (other != 0)
        if RULE == "nvfp4":
            whole = tl.div_rn(tl.load(wholes + owner), 2688.0)
            whole = tl.where((whole > 0) & (whole < float("inf")), whole, 1.0)
            tl.store(other.to(tl.pointer_type(tl.float32)), tl.div_rn(1.0, whole) if INVERSE else whole, mask=first)
        elif PACKED == 8:
            tl.store(other.to(tl.pointer_type(tl.int64)) + tl.arange(0, 2), tl.load(row + 21 + tl.arange(0, 2)), mask=first)
        scale, factor = _scaled(_number(largest), whole, DTYPE, RULE, PACKED)
        low, left_of = tl.load(row + 16), tl.load(row + 18)
        live &= (across >= low) & (across < tl.load(row + 17)) & (along >= left_of) & (along < tl.load(row + 19))
        at = (across - low) * tl.load(row + 15) + along - left_of
        tl.store(tl.load(row + 14).to(tl.pointer_type(scale.dtype)) + at, scale, mask=live)
        factor = factor[:, :, None] if group else factor
        _write(row, top, left, value, factor, DTYPE, ALIGNED, RULE, PACKED, TALL, WIDE, NATIVE)
        for chunk in range(1, CHUNKS):
            more = _values(row, top, left + chunk * WIDE, SOURCE, DTYPE, ALIGNED, TALL, WIDE, group)
            _write(row, top, left + chunk * WIDE, more, factor, DTYPE, ALIGNED, RULE, PACKED, TALL, WIDE, NATIVE)
