"""Views of memory at a given address."""

from __future__ import annotations

import ctypes

import numpy as np

from weightsync.arrays import Bytes

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def memory_at(address: int, size: int) -> memoryview:
    """Return ``size`` bytes at ``address`` as a writable view. It does not keep the memory alive."""
    view: memoryview = _view(address, size, _WRITABLE)
    return view


def bytes_at(address: int, size: int) -> Bytes:
    """Return ``size`` bytes at ``address`` as a writable ``uint8`` array. It does not keep the memory alive."""
    return np.frombuffer(memory_at(address, size), np.uint8) if size else np.empty(0, np.uint8)
