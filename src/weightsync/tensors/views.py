"""NumPy arrays over memory at a given address."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

__all__ = ["bytes_at"]


def bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return ``size`` bytes at ``address`` as a writable ``uint8`` array. It does not keep the memory alive."""
    if not size:
        return np.empty(0, np.uint8)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return memory
