# mypy: ignore-errors
# numba compiles this file and infers its types. Only the exported functions declare their signatures.
"""Compiled loop over the lists of a delta. As in :mod:`weightsync.tensors.kernels`, it takes addresses, not objects."""

from __future__ import annotations

import numpy as np

from weightsync.tensors import intrinsics as raw
from weightsync.tensors.change_kernels import CHANGE_BLOCK


@raw.compiled("int64(int64, int64, int64, int64, int64, int64)")
def fold_changes(region: int, nbytes: int, ends: int, lists: int, first: int, last: int) -> int:
    """Replace the words of the blocks ``first <= i < last`` of a region as their lists say, which are checked meanwhile.

    Args:
        region: Address of ``nbytes`` bytes.
        nbytes: Bytes of the region.
        ends: Address of the ends of the lists, which ascend: :mod:`weightsync.tensors.changes`.
        lists: Address of the lists.
        first: First block.
        last: End of the blocks.

    Returns:
        The first block whose list is no list, or -1.
    """
    for block in range(first, last):
        begin = np.int64(raw.load32(ends, block - 1)) if block > 0 else np.int64(0)
        used = np.int64(raw.load32(ends, block)) - begin
        words = min(np.int64(CHANGE_BLOCK), nbytes - block * CHANGE_BLOCK) // 2
        target, places = region + block * CHANGE_BLOCK, lists + 2 * begin
        if used == words:
            raw.copy_bytes(target, places, 2 * words)
            continue
        if used > words or used & 1:
            return block
        count = used >> 1
        before = np.int64(-1)
        for i in range(count):
            word = np.int64(raw.load16(places, i))
            if word <= before or word >= words:
                return block
            raw.store16(target, word, raw.load16(places, count + i))
            before = word
    return -1
