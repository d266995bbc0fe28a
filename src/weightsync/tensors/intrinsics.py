# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, ANN401
# numba compiles these functions. Each intrinsic declares its own signature.
"""Primitives that numba lacks: loads and stores at an address, memcpy, prefetch, and the C library's socket calls.

numba's caches of :mod:`weightsync.tensors.kernels` and :mod:`weightsync.tensors.change_kernels` depend only on these files, so
change them too when you change this one.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line, and of a step of :func:`dot` and :func:`copy_and_dot`."""

_BLOCK = 4096  # words of the C table

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[F], F]:
    """Compile for exactly one signature at import, using the cache if possible. The function releases the GIL."""

    def decorate(function: F) -> F:
        # Cache files are named after the qualified name. Without the version in it, two releases of numba that share a source
        # tree (an environment for vLLM beside another) would load each other's code.
        function.__qualname__ += f"-{numba.__version__}"
        try:
            return njit(signature, nogil=True, cache=True, boundscheck=False)(function)
        except RuntimeError as error:
            if "cache" not in str(error):
                raise
            return njit(signature, nogil=True, boundscheck=False)(function)

    return decorate


inlined = njit(nogil=True, boundscheck=False)
"""Compile as part of the calling functions."""


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes with the C library's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, start, size = args
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, pointer), builder.inttoptr(start, pointer), size, ir.Constant(size.type, 1)
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _loader(kind: Any, bits: int) -> Any:
    """Make ``load(address, index)``: element ``index`` of an array of ``bits``-bit words, which need not be aligned.

    The index is in a GEP instead of the integer, so that LLVM recognizes neighboring loads and vectorizes the loop.
    """

    @intrinsic
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            return builder.load(builder.gep(base, [args[1]]), align=1)

        return kind(types.int64, types.int64), generate

    return load


def _storer(kind: Any, bits: int) -> Any:
    """Make ``store(address, index, value)``, the counterpart of :func:`_loader`."""

    @intrinsic
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            base = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            builder.store(args[2], builder.gep(base, [args[1]]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), generate

    return store


load8, load16, load32, load64 = (_loader(getattr(types, f"uint{bits}"), bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_storer(getattr(types, f"uint{bits}"), bits) for bits in (8, 16, 32, 64))
int64 = _loader(types.int64, 64)
put = _storer(types.uint64, 64)


def _prefetch(builder: Any, address: Any) -> None:
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = number(0), number(2), number(1)
    builder.call(function, [builder.inttoptr(address, pointer), read, keep, data])


@intrinsic
def prefetch(typing, address):
    """Prefetch the cache line of ``address``. Never faults."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


_WORDS = ir.VectorType(ir.IntType(64), LINE // 8)  # a line as 64-bit integers, each of two words; LLVM divides it as the CPU needs
_INT64 = ir.IntType(64)


def _line(builder: Any, address: Any, offset: Any) -> Any:
    return builder.inttoptr(builder.add(address, offset), _WORDS.as_pointer())


def _add_products(builder: Any, sums: Any, address: Any, columns: Any, offset: Any) -> Any:
    # The products of the even words and of the odd ones. The multiplication of 32-bit halves is one instruction for a vector, while
    # the loop over words that LLVM vectorizes by itself spends as much on widening the words (docs/benchmarks/cpu-copies.md).
    low, high = (ir.Constant(_WORDS, [value] * _WORDS.count) for value in (0xFFFFFFFF, 32))
    data, factors = (builder.load(_line(builder, base, offset), align=1) for base in (address, columns))
    even = builder.mul(builder.and_(data, low), builder.and_(factors, low))
    odd = builder.mul(builder.lshr(data, high), builder.lshr(factors, high))
    return builder.add(sums[0], even), builder.add(sums[1], odd)


def _each_line(builder: Any, first: Any, last: Any, sums: Any, body: Callable[[Any, Any], Any]) -> Any:
    # A loop over the lines first <= i < last. ``body`` gets a line's offset in bytes and the sums, and returns the new sums.
    before, head, inside, after = builder.block, *(builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    line, now = builder.phi(_INT64), tuple(builder.phi(_WORDS) for _ in sums)
    line.add_incoming(first, before)
    for phi, start in zip(now, sums, strict=True):
        phi.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", line, last), inside, after)
    builder.position_at_end(inside)
    grown = body(builder.mul(line, _INT64(LINE)), now)
    line.add_incoming(builder.add(line, _INT64(1)), builder.block)
    for phi, value in zip(now, grown, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return now


def _total(builder: Any, sums: Any) -> Any:
    both = builder.add(*sums)
    total = _INT64(0)
    for lane in range(_WORDS.count):
        total = builder.add(total, builder.extract_element(both, ir.IntType(32)(lane)))
    return total


_NO_SUMS = (ir.Constant(_WORDS, [0] * _WORDS.count),) * 2


@intrinsic
def dot(typing: Any, address: Any, columns: Any, lines: Any) -> Any:
    """Sum of the products of the 32-bit words of ``lines`` lines with those of ``columns``, modulo 2^64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, factors, count = args
        sums = _each_line(
            builder, _INT64(0), count, _NO_SUMS, lambda offset, sums: _add_products(builder, sums, start, factors, offset)
        )
        return _total(builder, sums)

    return types.uint64(types.int64, types.int64, types.int64), generate


@intrinsic
def copy_and_dot(
    typing: Any, target: Any, source: Any, read: Any, columns: Any, lines: Any, ahead: Any, limit: Any, behind: Any
) -> Any:
    """Copy ``lines`` lines and return :func:`dot` of ``read``, the source or the target, taken ``behind`` lines after the copy.

    While a line is copied, the line ``ahead`` bytes after it is prefetched, unless it begins at ``source + limit`` or after.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, start, where, factors, count, distance, end, lag = args

        def copy(offset: Any, sums: Any) -> Any:
            later = builder.add(offset, distance)
            fetched = builder.select(builder.icmp_signed("<", later, end), later, offset)
            _prefetch(builder, builder.add(start, fetched))
            builder.store(builder.load(_line(builder, start, offset), align=1), _line(builder, to, offset), align=1)
            return sums

        def copy_and_add(offset: Any, sums: Any) -> Any:
            copy(offset, sums)
            return _add_products(builder, sums, where, factors, builder.sub(offset, builder.mul(lag, _INT64(LINE))))

        head = builder.select(builder.icmp_signed("<", lag, count), lag, count)
        _each_line(builder, _INT64(0), head, (), copy)
        sums = _each_line(builder, head, count, _NO_SUMS, copy_and_add)
        sums = _each_line(
            builder,
            builder.sub(count, head),
            count,
            sums,
            lambda offset, sums: _add_products(builder, sums, where, factors, offset),
        )
        return _total(builder, sums)

    return types.uint64(*[types.int64] * 8), generate


@intrinsic
def stopped(typing: Any, address: Any) -> Any:
    """Read the byte at ``address``, which another thread sets. Not cached in a register."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(8).as_pointer()), "monotonic", 1)

    return types.int8(types.int64), generate


# Resolved by name when compiled code is loaded. Code with a pointer from ctypes could not be cached.
_recv = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.int64, types.int32))
_send = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.int64, types.int32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_errno = types.ExternalFunction("__errno_location" if sys.platform == "linux" else "__error", types.int64())
_MONOTONIC = time.CLOCK_MONOTONIC
_WAIT = socket.MSG_WAITALL
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)


@inlined
def load_word(address, index, size):
    """Element ``index`` of an array of words of ``size`` bytes: 1, 2 or 4."""
    if size == 2:
        return np.uint64(load16(address, index))
    if size == 4:
        return np.uint64(load32(address, index))
    return np.uint64(load8(address, index))


@inlined
def store_word(address, index, value, size):
    """The counterpart of :func:`load_word`."""
    if size == 2:
        store16(address, index, np.uint16(value))
    elif size == 4:
        store32(address, index, np.uint32(value))
    else:
        store8(address, index, np.uint8(value))


@inlined
def _late(until, status):
    _clock_gettime(np.int32(_MONOTONIC), status + 8)
    return int64(status, 1) * 1_000_000_000 + int64(status, 2) >= until


@inlined
def _checked_count(count, status):
    if count <= 0:
        put(status, 0, np.uint64(load32(_errno(), 0)) if count < 0 else ~np.uint64(0))
    return max(count, 0)


@inlined
def receive(fd, place, count, until, status):
    """Receive ``count`` bytes.

    ``status`` is the address of an ``int64[3]``, of which the clock uses two.

    Returns:
        Bytes received: normally ``count``, and zero if the monotonic clock reads ``until`` (nanoseconds) or the call fails. Then
        ``status[0]`` is the error number, or -1 at the end of the stream.
    """
    return np.int64(0) if _late(until, status) else _checked_count(_recv(np.int32(fd), place, count, np.int32(_WAIT)), status)


@inlined
def send(fd, place, count, until, status):
    """Send up to ``count`` bytes. Parameters and result are those of :func:`receive`."""
    return np.int64(0) if _late(until, status) else _checked_count(_send(np.int32(fd), place, count, np.int32(_QUIET)), status)


@inlined
def factor(key, columns):
    """R of the digest for block ``key``. Its two seeds follow the C table at ``columns``."""
    x = np.uint64(key) + load64(columns, _BLOCK // 2)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + load64(columns, _BLOCK // 2 + 1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
