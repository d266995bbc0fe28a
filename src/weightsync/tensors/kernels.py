# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, ANN401
# numba compiles this file and infers its types: the signatures that matter are those of the two functions it exports.
"""The compiled loops: copies of tiles, and digests of rows. Addresses in, no objects; everything else in this package calls them.

All of them are in this one file because numba's cache looks only at the file of a function: a change in an inlined function
elsewhere would go unseen. Every array crosses as its address (``int64``), so that read-only arrays need no second compilation;
the callers keep the arrays alive and have checked every bound. The GIL is released.

``numba`` writes its cache beside this file or below the user's cache directory; where neither can be written, each import
compiles again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["BLOCK", "LEAD", "TILE", "copy_table", "digest_table", "digest_tile_table"]

BLOCK = 4096
"""Words that share one row factor in the digest."""

TILE = 13
"""Columns of a tile table; :class:`~weightsync.tensors.tiles.Tiles` lists them."""

LEAD = 7
"""Columns of a row table before its leading dimensions; :func:`digest_table` lists them."""

_LINE = 64  # bytes of a cache line
_STEP = 256  # bytes copied, then digested from the cache, at a time
_AHEAD = 2048  # bytes that the source is asked for in advance; docs/benchmarks/cpu-copies.md says why
_CHECK = 256 << 10  # bytes between two looks at the stop flag
_MASK = BLOCK - 1

F = TypeVar("F", bound=Callable[..., Any])


def _compiled(signature: str) -> Callable[[F], F]:
    """Compile for exactly one signature at import, from the cache if there is one."""

    def decorate(function: F) -> F:
        try:
            return njit(signature, nogil=True, cache=True, boundscheck=False)(function)
        except RuntimeError as error:
            if "cache" not in str(error):
                raise
            return njit(signature, nogil=True, boundscheck=False)(function)

    return decorate


_inlined = njit(nogil=True, boundscheck=False)


@intrinsic
def _copy(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """The C library's memcpy of ``count`` bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, start, size = args
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, pointer), builder.inttoptr(start, pointer), size, ir.Constant(size.type, 1)
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _loader(kind: Any, bits: int) -> Any:
    """``load(address, index)``: element ``index`` of an array of ``bits``-bit words, not necessarily aligned.

    With the index in a GEP, not in the integer, LLVM sees neighbouring loads and vectorises the loop.
    """

    @intrinsic
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            return builder.load(builder.gep(base, [args[1]]), align=1)

        return kind(types.int64, types.int64), generate

    return load


def _storer(kind: Any, bits: int) -> Any:
    """``store(address, index, value)``, the counterpart of :func:`_loader`."""

    @intrinsic
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            builder.store(args[2], builder.gep(base, [args[1]]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), generate

    return store


_load8, _load16, _load32, _load64 = (_loader(getattr(types, f"uint{bits}"), bits) for bits in (8, 16, 32, 64))
_store8, _store16, _store32, _store64 = (_storer(getattr(types, f"uint{bits}"), bits) for bits in (8, 16, 32, 64))
_at = _loader(types.int64, 64)
_put = _storer(types.uint64, 64)
_total = _load64


@intrinsic
def _prefetch(typing, address):
    """Ask for the cache line of ``address``; never faults."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = ir.Constant(number, 0), ir.Constant(number, 2), ir.Constant(number, 1)
        builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _stopped(typing: Any, address: Any) -> Any:
    """The byte at ``address``, read each time: another thread sets it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(8).as_pointer()), "monotonic", 1)

    return types.int8(types.int64), generate


@_inlined
def _factor(key):
    x = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@_inlined
def _dot(address, columns, words):
    total = np.uint64(0)
    for i in range(words):
        total += np.uint64(_load32(columns, i)) * np.uint64(_load32(address, i))
    return total


@_inlined
def _part(address, position, count):
    # ``count`` bytes (fewer than a word) at byte ``position`` of a word, zero elsewhere.
    word = np.uint64(0)
    for i in range(count):
        word |= np.uint64(_load8(address, i)) << np.uint64(8 * (position + i))
    return word


@_inlined
def _run(address, first, size, key, columns):
    # ``size`` contiguous bytes from byte ``first`` of the last dimension of the row whose first block has number ``key``.
    total = np.uint64(0)
    word = first >> 2
    position = first & 3
    if position:
        count = min(4 - position, size)
        value = _part(address, position, count)
        total += _factor(key + (word >> 12)) * (np.uint64(_load32(columns, word & _MASK)) * value)
        address += count
        size -= count
        word += 1
    left = size >> 2
    while left > 0:
        column = word & _MASK
        words = min(BLOCK - column, left)
        total += _factor(key + (word >> 12)) * _dot(address, columns + 4 * column, words)
        address += 4 * words
        word += words
        left -= words
    if size & 3:
        value = _part(address, 0, size & 3)
        total += _factor(key + (word >> 12)) * (np.uint64(_load32(columns, word & _MASK)) * value)
    return total


@_inlined
def _ask(source, start, count, size, dense):
    # What follows ``dense`` runs is wanted too; after others comes memory that is not.
    for line in range(start + _AHEAD, start + _AHEAD + count, _LINE):
        if dense or line < size:
            _prefetch(source + line)


@_inlined
def _ask_runs(source, stride, size, row, rows):
    # Short runs with gaps between them: the hardware does not guess where the next ones are.
    if size <= _AHEAD and stride != size:
        ahead = row + (_AHEAD + size - 1) // size
        if ahead < rows:
            for line in range(0, size, _LINE):
                _prefetch(source + ahead * stride + line)


@_inlined
def _copy_run(target, source, size, dense):
    for start in range(0, size, _STEP):
        count = min(_STEP, size - start)
        if dense or size > _AHEAD:
            _ask(source, start, count, size, dense)
        _copy(target + start, source + start, count)


@_inlined
def _copy_digest(target, source, read, first, size, key, columns, dense):
    # Copy a run; its digest from ``read``, which is one of both, a few lines behind the copy and so from the cache.
    total = np.uint64(0)
    start = 0
    while start < size:
        count = min(_STEP - ((first + start) & 3), size - start)
        if dense or size > _AHEAD:
            _ask(source, start, count, size, dense)
        _copy(target + start, source + start, count)
        total += _run(read + start, first + start, count, key, columns)
        start += count
    return total


@_inlined
def _copy_runs(target, target_stride, source, source_stride, rows, size):
    # Runs of one element are transposed copies: a call to memcpy for each would cost more than the element.
    if size == 2:
        for row in range(rows):
            _store16(target + row * target_stride, 0, _load16(source + row * source_stride, 0))
    elif size == 4:
        for row in range(rows):
            _store32(target + row * target_stride, 0, _load32(source + row * source_stride, 0))
    elif size == 1:
        for row in range(rows):
            _store8(target + row * target_stride, 0, _load8(source + row * source_stride, 0))
    elif size == 8:
        for row in range(rows):
            _store64(target + row * target_stride, 0, _load64(source + row * source_stride, 0))
    else:
        for row in range(rows):
            _ask_runs(source, source_stride, size, row, rows)
            _copy_run(target + row * target_stride, source + row * source_stride, size, source_stride == size)


@_inlined
def _digest_runs(row, begin, rows, target, target_stride, source, source_stride, size, columns):
    # Runs ``begin`` and following of the tile at table row ``row``, copied and read back.
    lead, lead_step = _at(row, 8), _at(row, 9)
    byte, byte_step, blocks = _at(row, 10), _at(row, 11), _at(row, 12)
    total = np.uint64(0)
    for run in range(rows):
        key = (lead + (begin + run) * lead_step) * blocks
        first = byte + (begin + run) * byte_step
        to = target + run * target_stride
        _ask_runs(source, source_stride, size, run, rows)
        total += _copy_digest(to, source + run * source_stride, to, first, size, key, columns, source_stride == size)
    return total


@_compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def copy_table(
    table: int, first: int, last: int, bases: int, packed_source: int, packed_target: int, out: int, columns: int, stop: int
) -> int:
    """Copy the tiles ``first <= i < last`` of a tile table; return the bytes copied.

    ``bases`` is an array of the region addresses. Where ``packed_source`` is not zero the runs are read from there instead, one
    after the other; where ``packed_target`` is not zero they are written there instead. Where ``out`` (an array of ``uint64``) is
    not zero, each tile's digest is taken from its target after the copy and added to ``out[row]`` of the tile; ``columns`` is the
    C table. ``stop`` is the address of a byte: once it is not zero this returns early.
    """
    done = 0
    unchecked = 0
    for tile in range(first, last):
        row = table + tile * (8 * TILE)
        rows, size = _at(row, 5), _at(row, 6)
        if packed_source != 0:
            source, source_stride = packed_source + done, size
        else:
            source, source_stride = _at(bases, _at(row, 0)) + _at(row, 1), _at(row, 2)
        if packed_target != 0:
            target, target_stride = packed_target + done, size
        else:
            target, target_stride = _at(row, 3), _at(row, 4)
        if out == 0 and rows > 1 and source_stride == size and target_stride == size:
            size *= rows
            rows = 1
        step = max(_CHECK // size, 1)
        for run in range(0, rows, step):
            count = min(step, rows - run)
            to, start = target + run * target_stride, source + run * source_stride
            if out != 0:
                total = _digest_runs(row, run, count, to, target_stride, start, source_stride, size, columns)
                _put(out, _at(row, 7), _total(out, _at(row, 7)) + total)
            else:
                _copy_runs(to, target_stride, start, source_stride, count, size)
            done += count * size
            unchecked += count * size
            if unchecked >= _CHECK:
                if _stopped(stop) != 0:
                    return done
                unchecked = 0
    return done


@_compiled("int64(int64, int64, int64, int64, int64)")
def digest_tile_table(table: int, first: int, last: int, out: int, columns: int) -> int:
    """Add the digest of each tile ``first <= i < last`` of a tile table, read from its target, to ``out[row]``; return the bytes."""
    done = 0
    for tile in range(first, last):
        row = table + tile * (8 * TILE)
        target, target_stride, rows, size = _at(row, 3), _at(row, 4), _at(row, 5), _at(row, 6)
        lead, lead_step, byte, byte_step, blocks = _at(row, 8), _at(row, 9), _at(row, 10), _at(row, 11), _at(row, 12)
        total = _total(out, _at(row, 7))
        for run in range(rows):
            total += _run(target + run * target_stride, byte + run * byte_step, size, (lead + run * lead_step) * blocks, columns)
        _put(out, _at(row, 7), total)
        done += rows * size
    return done


@_inlined
def _scattered(address, stride, itemsize, target, first, count, key, columns):
    # As _run, for elements that are ``stride`` bytes apart. Linear in the word, so each element adds its own part of it.
    total = np.uint64(0)
    block = np.int64(-1)
    value = np.uint64(0)
    for i in range(count):
        byte = first + i * itemsize
        word = byte >> 2
        if word >> 12 != block:
            if block >= 0:
                total += _factor(key + block) * value
            block = word >> 12
            value = np.uint64(0)
        column = np.uint64(_load32(columns, word & _MASK))
        place = address + i * stride
        shift = np.uint64(8 * (byte & 3))
        if itemsize == 2:
            half = _load16(place, 0)
            value += column * (np.uint64(half) << shift)
            if target != 0:
                _store16(target, i, half)
        elif itemsize == 4:
            whole = _load32(place, 0)
            value += column * np.uint64(whole)
            if target != 0:
                _store32(target, i, whole)
        elif itemsize == 1:
            single = _load8(place, 0)
            value += column * (np.uint64(single) << shift)
            if target != 0:
                _store8(target, i, single)
        else:
            # Eight bytes are two words of one block: a block holds an even number of words.
            value += column * np.uint64(_load32(place, 0))
            value += np.uint64(_load32(columns, (word + 1) & _MASK)) * np.uint64(_load32(place, 1))
            if target != 0:
                _store64(target, i, _load64(place, 0))
    if block >= 0:
        total += _factor(key + block) * value
    return total


@_compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def digest_table(table: int, dims: int, first: int, last: int, targets: int, out: int, columns: int, stop: int) -> int:
    """Write the digest of each row ``first <= i < last`` of a row table to ``out[i - first]``; return how many were finished.

    A row of the table is ``int64[LEAD + 3 * (dims - 1)]``: address of the box's first element, index of its leading dimensions
    flattened over the global shape, blocks in a row of the tensor, first byte in the last dimension, elements in the last
    dimension, bytes between them, bytes an element; then for each leading dimension, outermost first: extent, bytes between
    neighbours, distance of neighbours in the flattened index.

    Where ``targets`` (an array of addresses, one a table row) is not zero, each box is also copied there in the same pass,
    contiguous in C order. ``columns`` is the C table, ``stop`` the address of a byte that ends the work early.
    """
    width = 8 * (LEAD + 3 * (dims - 1))
    unchecked = 0
    for index in range(first, last):
        row = table + index * width
        base = _at(row, 0)
        start = _at(row, 1)
        blocks = _at(row, 2)
        byte = _at(row, 3)
        count = _at(row, 4)
        stride = _at(row, 5)
        itemsize = _at(row, 6)
        size = count * itemsize
        dense = stride == itemsize or count == 1
        target = np.int64(0)
        if targets != 0:
            target = _at(targets, index)
        inner, inner_stride, inner_step = np.int64(1), np.int64(0), np.int64(0)
        if dims > 1:
            last_lead = LEAD + 3 * (dims - 2)
            inner, inner_stride, inner_step = _at(row, last_lead), _at(row, last_lead + 1), _at(row, last_lead + 2)
        outer = np.int64(1)
        for dim in range(dims - 2):
            outer *= _at(row, LEAD + 3 * dim)
        total = np.uint64(0)
        for combination in range(outer):
            rest = combination
            address = base
            lead = start
            for dim in range(dims - 3, -1, -1):
                extent = _at(row, LEAD + 3 * dim)
                position = rest % extent
                rest //= extent
                address += position * _at(row, LEAD + 3 * dim + 1)
                lead += position * _at(row, LEAD + 3 * dim + 2)
            for _ in range(inner):
                if dense and target != 0:
                    close = inner_stride == size
                    total += _copy_digest(target, address, address, byte, size, lead * blocks, columns, close)
                elif dense:
                    total += _run(address, byte, size, lead * blocks, columns)
                else:
                    total += _scattered(address, stride, itemsize, target, byte, count, lead * blocks, columns)
                if target != 0:
                    target += size
                address += inner_stride
                lead += inner_step
                unchecked += size
                if unchecked >= _CHECK:
                    if _stopped(stop) != 0:
                        return index - first
                    unchecked = 0
        _put(out, index - first, total)
    return last - first
