# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
# numba compiles this file and infers its types. Only the exported functions declare their signatures.
"""Compiled loops over the lists of a delta. As in :mod:`weightsync.tensors.kernels`, it takes addresses, not objects."""

from __future__ import annotations

import numpy as np

from weightsync.tensors import intrinsics as raw
from weightsync.tensors.change_kernels import CHANGE_BLOCK, list_of


@raw.compiled("int64(int64, int64, int64, int64, int64, int64)")
def fold_changes(region: int, nbytes: int, ends: int, lists: int, first: int, last: int) -> int:
    """Replace the words of the blocks ``first <= i < last`` of a region as their lists say, and check these.

    Args:
        region: Address of ``nbytes`` bytes.
        nbytes: Bytes of the region.
        ends: Address of the ends of the lists, which ascend: :mod:`weightsync.store.containers`.
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


@raw.inlined
def _flush(block, nbytes, region, marks, marked, lists, used):
    # Write the list of a block of the region from its marked words, and clear the marks. Returns the words used.
    words = min(np.int64(CHANGE_BLOCK), nbytes - block * CHANGE_BLOCK) // 2
    source, to = region + block * CHANGE_BLOCK, lists + 2 * used
    whole = 2 * marked >= words
    if whole:
        raw.copy_bytes(to, source, 2 * words)
    at = np.int64(0)
    for word in range(words):
        if marks[word] != 0:
            marks[word] = 0
            if not whole:
                raw.store16(to, at, np.uint16(word))
                raw.store16(to, marked + at, raw.load16(source, word))
                at += 1
    return used + (words if whole else 2 * marked)


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def lists_of_region(sections: int, number: int, counts: int, payload: int, region: int, nbytes: int, ends: int, lists: int) -> int:
    """List the changes of sections (:mod:`weightsync.tensors.changes`) by blocks of their region.

    Args:
        sections: Address of an ``int64[number, 3]``: first byte in the region, bytes, bytes of a word. They ascend.
        number: Number of sections.
        counts: Address of their counts.
        payload: Address of their lists.
        region: Address of the region, which holds the values.
        nbytes: Its bytes, a multiple of 8.
        ends: Address of a ``uint32`` for each block of the region.
        lists: Address of as many bytes as the region has.

    Returns:
        Words of ``lists`` that are used; -1 if the payload was overwritten while it was read.
    """
    used, current, marked, number_of, at = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    marks = np.zeros(CHANGE_BLOCK // 2, np.uint8)
    for section in range(number):
        row = sections + section * 24
        first, size, word = raw.int64(row, 0), raw.int64(row, 1), raw.int64(row, 2)
        for begin in range(0, size, CHANGE_BLOCK):
            room = min(np.int64(CHANGE_BLOCK), size - begin)
            count = np.int64(raw.load16(counts, number_of))
            number_of += 1
            if count == 0:
                continue
            whole, _, units = list_of(count, word, room)
            places = payload + 4 * at
            at += units
            words = room // word if whole else count
            for index in range(words):
                where = (index if whole else np.int64(raw.load16(places, index))) * word
                if where + word > room:
                    return -1
                byte = first + begin + where
                for pair in range(byte // 2, (byte + word - 1) // 2 + 1):
                    while current < pair // (CHANGE_BLOCK // 2):
                        used = _flush(current, nbytes, region, marks, marked, lists, used)
                        raw.store32(ends, current, np.uint32(used))
                        current += 1
                        marked = np.int64(0)
                    place = pair % (CHANGE_BLOCK // 2)
                    if marks[place] == 0:
                        marks[place] = 1
                        marked += 1
    while current < -(-nbytes // CHANGE_BLOCK):
        used = _flush(current, nbytes, region, marks, marked, lists, used)
        raw.store32(ends, current, np.uint32(used))
        current += 1
        marked = np.int64(0)
    return used
