# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, ANN401
# numba compiles what is here; the signatures are those that each intrinsic declares.
"""What numba cannot say by itself: loads and stores at an address, memcpy, prefetch, and the C library's calls on a socket.

numba's cache of :mod:`weightsync.tensors.kernels` looks only at that file: change it, too, when you change this one.
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

__all__ = [
    "compiled",
    "copy_bytes",
    "inlined",
    "int64",
    "load8",
    "load16",
    "load32",
    "load64",
    "prefetch",
    "put",
    "receive",
    "send",
    "stopped",
    "store8",
    "store16",
    "store32",
    "store64",
]


F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[F], F]:
    """Compile for exactly one signature at import, from the cache if there is one. The function releases the GIL."""

    def decorate(function: F) -> F:
        # Files of the cache are named after this. Of two releases of numba that share a source tree (an environment for vLLM
        # beside another, say) one else loads what the other just put in the place of what the index promised.
        function.__qualname__ += f"-{numba.__version__}"
        try:
            return njit(signature, nogil=True, cache=True, boundscheck=False)(function)
        except RuntimeError as error:
            if "cache" not in str(error):
                raise
            return njit(signature, nogil=True, boundscheck=False)(function)

    return decorate


inlined = njit(nogil=True, boundscheck=False)
"""Compile as a part of the functions that call it."""


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
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


load8, load16, load32, load64 = (_loader(getattr(types, f"uint{bits}"), bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_storer(getattr(types, f"uint{bits}"), bits) for bits in (8, 16, 32, 64))
int64 = _loader(types.int64, 64)
put = _storer(types.uint64, 64)


@intrinsic
def prefetch(typing, address):
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
def stopped(typing: Any, address: Any) -> Any:
    """The byte at ``address``, read each time: another thread sets it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(8).as_pointer()), "monotonic", 1)

    return types.int8(types.int64), generate


# Found by name when compiled code is loaded, so that it can be cached; a pointer from ctypes could not.
_recv = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.int64, types.int32))
_send = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.int64, types.int32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_errno = types.ExternalFunction("__errno_location" if sys.platform == "linux" else "__error", types.int64())
_MONOTONIC = time.CLOCK_MONOTONIC
_WAIT = socket.MSG_WAITALL
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)


@inlined
def _late(until, status):
    _clock_gettime(np.int32(_MONOTONIC), status + 8)
    return int64(status, 1) * 1_000_000_000 + int64(status, 2) >= until


@inlined
def _told(count, status):
    if count <= 0:
        put(status, 0, np.uint64(load32(_errno(), 0)) if count < 0 else ~np.uint64(0))
    return max(count, 0)


@inlined
def receive(fd, place, count, until, status):
    """Receive up to ``count`` bytes, all of them if nothing goes wrong; return how many.

    Zero once the monotonic clock reads ``until`` (nanoseconds), or if the call fails: then ``status[0]`` is the error number, or
    -1 at the end of the stream. ``status`` is the address of an ``int64[3]``, of which the clock needs two.
    """
    return np.int64(0) if _late(until, status) else _told(_recv(np.int32(fd), place, count, np.int32(_WAIT)), status)


@inlined
def send(fd, place, count, until, status):
    """Send up to ``count`` bytes; as :func:`receive`."""
    return np.int64(0) if _late(until, status) else _told(_send(np.int32(fd), place, count, np.int32(_QUIET)), status)
