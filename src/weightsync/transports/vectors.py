"""Scattered memory to and from a socket by one system call for a thousand runs, without a Python object for each.

``sendmsg(2)`` and ``recvmsg(2)`` take an array of (address, length) pairs; here that is an ``int64[runs, 2]`` table, made once
for a plan and used every round. The kernel copies straight between the runs and its buffers, so runs need not be packed first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["advanced", "receive_vectors", "send_vectors", "vectors"]

Int64 = npt.NDArray[np.int64]

_MOST = 1024  # IOV_MAX of Linux and macOS
_linux = sys.platform == "linux"
_size = ctypes.c_size_t if _linux else ctypes.c_int  # POSIX leaves these two types open
_length = ctypes.c_size_t if _linux else ctypes.c_uint32


class _Message(ctypes.Structure):
    """``struct msghdr`` of ``sys/socket.h``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("count", _size),
        ("control", ctypes.c_void_p),
        ("control_length", _length),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_sendmsg, _recvmsg = _libc.sendmsg, _libc.recvmsg
for _call in (_sendmsg, _recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def vectors(address: Int64, stride: Int64, rows: Int64, row_bytes: Int64) -> Int64:
    """The runs of tiles that begin at ``address``, in order, neighbours joined: ``int64[runs, 2]`` of address and bytes."""
    index = np.repeat(np.arange(len(rows), dtype=np.int64), rows)
    nth = np.arange(len(index), dtype=np.int64) - np.repeat(np.cumsum(rows) - rows, rows)
    starts = address[index] + nth * stride[index]
    stops = starts + row_bytes[index]
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    firsts = starts[np.concatenate(([0], breaks + 1))]
    lasts = stops[np.concatenate((breaks, [len(stops) - 1]))]
    return np.stack([firsts, lasts - firsts], axis=1)


def advanced(table: Int64, count: int) -> Int64:
    """What is left of ``table`` after its first ``count`` bytes."""
    ends = np.cumsum(table[:, 1])
    row = int(np.searchsorted(ends, count, side="right"))
    left = table[row:]
    into = count - (int(ends[row - 1]) if row else 0)
    if into and len(left):
        left = left.copy()
        left[0] += (into, -into)
    return left


def send_vectors(fd: int, table: Int64, flags: int) -> int:
    """Send from the first runs of ``table`` (at most 1,024); the bytes sent. The memory must be there. Raises :class:`OSError`."""
    return _call_with(_sendmsg, fd, table, flags)


def receive_vectors(fd: int, table: Int64, flags: int) -> int:
    """Receive into the first runs of ``table`` (at most 1,024); the bytes received, 0 at the end. Raises :class:`OSError`."""
    return _call_with(_recvmsg, fd, table, flags)


def _call_with(call: Callable[[int, ctypes.Array[ctypes.c_char] | object, int], int], fd: int, table: Int64, flags: int) -> int:
    if not table.flags.c_contiguous:
        raise OSError(errno.EINVAL, "a table of runs must be contiguous")
    message = _Message(vectors=table.ctypes.data, count=min(len(table), _MOST))
    count = int(call(fd, ctypes.byref(message), flags))
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count
