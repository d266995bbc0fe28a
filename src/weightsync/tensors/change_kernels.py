# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
# numba compiles this file and infers its types. Only the exported functions declare their signatures.
"""Compiled loops over the words that changed. As in :mod:`weightsync.tensors.kernels`, they take addresses, not objects."""

from __future__ import annotations

import numpy as np

from weightsync.tensors import intrinsics as raw

CHANGE_BLOCK = 8192
"""Bytes of a region whose changes are listed together, see :mod:`weightsync.tensors.changes`."""

_TILE = 13  # columns of a tile table
_MASK = 4095  # of a word's position in a digest block


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64)")
def find_changes(old: int, new: int, nbytes: int, ends: int, payload: int, capacity: int, stop: int) -> int:
    """List the words of ``new`` that differ from ``old``, and make ``old`` equal to ``new``.

    Args:
        old: Address of the bytes before.
        new: Address of as many bytes now.
        nbytes: How many: a multiple of 8.
        ends: Address of a ``uint32`` for each block: the words of ``payload`` that are used up to its end.
        payload: Address of the lists, see :mod:`weightsync.tensors.changes`.
        capacity: Words of ``payload``.
        stop: Address of a byte. Once it is not zero, this returns early.

    Returns:
        Words used; -1 if there is no room for more, -2 if it was stopped. ``old`` then equals ``new`` in part.
    """
    used = np.int64(0)
    for block in range(-(-nbytes // CHANGE_BLOCK)):
        begin = block * CHANGE_BLOCK
        size = min(np.int64(CHANGE_BLOCK), nbytes - begin)
        before, after = old + begin, new + begin
        if used + size // 2 > capacity:
            return -1
        if block & 31 == 0 and raw.stopped(stop) != 0:
            return -2
        places = payload + 2 * used
        count = np.int64(0)
        for line in range(0, size // 8, 8):
            last = min(line + 8, size // 8)
            differ = np.uint64(0)
            for i in range(line, last):
                differ |= raw.load64(before, i) ^ raw.load64(after, i)
            if differ != 0:
                for i in range(line, last):
                    if raw.load64(before, i) != raw.load64(after, i):
                        for word in range(4 * i, 4 * i + 4):
                            if raw.load16(before, word) != raw.load16(after, word):
                                # A block with many changes is copied whole: its places beyond half of its words are not needed.
                                if 2 * count < size // 2:
                                    raw.store16(places, count, np.uint16(word))
                                count += 1
        if 4 * count >= size:
            raw.copy_bytes(places, after, size)
            raw.copy_bytes(before, after, size)
            used += size // 2
        else:
            for i in range(count):
                word = np.int64(raw.load16(places, i))
                value = raw.load16(after, word)
                raw.store16(places, count + i, value)
                raw.store16(before, word, value)
            used += 2 * count
        raw.store32(ends, block, np.uint32(used))
    return used


@raw.inlined
def _changes_of(block, nbytes, ends):
    # First word of a block's list, words of the list, words of the block.
    first = np.int64(raw.load32(ends, block - 1)) if block > 0 else np.int64(0)
    return first, np.int64(raw.load32(ends, block)) - first, min(np.int64(CHANGE_BLOCK), nbytes - block * CHANGE_BLOCK) // 2


@raw.compiled("int64(int64, int64, int64, int64, int64, int64)")
def mark_blocks(table: int, first: int, last: int, region: int, nbytes: int, marks: int) -> int:
    """Set ``marks[block]`` (``uint8``) to 1 for each block from which the tiles ``first <= i < last`` of ``region`` read.

    Returns:
        The first tile that reads beyond ``nbytes``, or -1.
    """
    for tile in range(first, last):
        row = table + tile * (8 * _TILE)
        if raw.int64(row, 0) != region:
            return tile
        source, stride, rows, size = raw.int64(row, 1), raw.int64(row, 2), raw.int64(row, 5), raw.int64(row, 6)
        if source < 0 or source + (rows - 1) * stride + size > nbytes:
            return tile
        for run in range(rows):
            begin = source + run * stride
            for block in range(begin // CHANGE_BLOCK, (begin + size - 1) // CHANGE_BLOCK + 1):
                raw.store8(marks, block, np.uint8(1))
    return -1


@raw.compiled("int64(int64, int64, int64, int64, int64)")
def check_changes(nbytes: int, ends: int, marks: int, at: int, payload: int) -> int:
    """Check the lists of the marked blocks, which lie at word ``at[block]`` (``int64``) of ``payload``: places ascend and exist.

    Returns:
        The first block whose list is wrong, or -1.
    """
    for block in range(-(-nbytes // CHANGE_BLOCK)):
        _, used, words = _changes_of(block, nbytes, ends)
        if raw.load8(marks, block) == 0 or used == words:
            continue
        places = payload + 2 * raw.int64(at, block)
        before = np.int64(-1)
        for i in range(used // 2):
            word = np.int64(raw.load16(places, i))
            if word <= before or word >= words:
                return block
            before = word
    return -1


@raw.inlined
def _first_from(places, count, word):
    # Index of the first of ``count`` ascending places that is not before ``word``.
    low, high = np.int64(0), count
    while low < high:
        middle = (low + high) >> 1
        if np.int64(raw.load16(places, middle)) < word:
            low = middle + 1
        else:
            high = middle
    return low


@raw.inlined
def _share(value, byte, key, columns):
    # What the byte ``value`` at byte ``byte`` of a tensor row adds to the row's digest.
    word = byte >> 2
    column = np.uint64(raw.load32(columns, word & _MASK))
    return raw.factor(key + (word >> 12), columns) * (column * (np.uint64(value) << np.uint64(8 * (byte & 3))))


@raw.inlined
def _share_of_two(value, byte, key, columns):
    # The same of two bytes, which are parts of two words if the first is the last byte of one.
    if byte & 3 == 3:
        return _share(value & 255, byte, key, columns) + _share(value >> 8, byte + 1, key, columns)
    return _share(value, byte, key, columns)


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def apply_changes(
    table: int,
    first: int,
    last: int,
    nbytes: int,
    ends: int,
    at: int,
    payload: int,
    kept: int,
    step: int,
    out: int,
    columns: int,
    stop: int,
) -> int:
    """Work on the targets of the tiles ``first <= i < last``, at those words of their source that changed.

    Args:
        table: Address of the tile table. Its tiles read ``nbytes`` bytes of one region.
        first: First tile.
        last: End of the tiles.
        nbytes: Bytes of the source region.
        ends: Address of the ends of the lists, as :func:`find_changes` wrote them.
        at: Address of an ``int64`` for each block: the word of ``payload`` where its list lies.
        payload: Address of the lists, which :func:`check_changes` has checked.
        kept: Address of as many words: those that are replaced, each in the place of its successor's value.
        step: 0 keeps what is in the target, and adds to ``out[row]`` what replacing it would add to the row's digest. 1 keeps it
            and replaces it. 2 writes back what was kept. 3 adds what the target's difference from what was kept adds.
        out: Address of the digests, a ``uint64`` for each row of the target layout.
        columns: Address of the constants, see :class:`~weightsync.tensors.digest.DigestConstants`.
        stop: Address of a byte. Once it is not zero, this returns early.

    Returns:
        Number of finished tiles.
    """
    for tile in range(first, last):
        if raw.stopped(stop) != 0:
            return tile - first
        row = table + tile * (8 * _TILE)
        total = np.uint64(0)
        size = raw.int64(row, 6)
        for run in range(raw.int64(row, 5)):
            source = raw.int64(row, 1) + run * raw.int64(row, 2)
            target = raw.int64(row, 3) + run * raw.int64(row, 4)
            key = (raw.int64(row, 8) + run * raw.int64(row, 9)) * raw.int64(row, 12)
            byte = raw.int64(row, 10) + run * raw.int64(row, 11)
            for block in range(source // CHANGE_BLOCK, (source + size - 1) // CHANGE_BLOCK + 1):
                _, used, words = _changes_of(block, nbytes, ends)
                if used == 0:
                    continue
                begin = block * CHANGE_BLOCK - source
                low, high = max(-begin, np.int64(0)), min(size - begin, np.int64(CHANGE_BLOCK))
                whole = used == words
                count = words if whole else used // 2
                places = payload + 2 * raw.int64(at, block)
                behind = np.int64(0) if whole else count
                values, saved = places + 2 * behind, kept + 2 * (raw.int64(at, block) + behind)
                index = low >> 1 if whole else _first_from(places, count, low >> 1)
                while index < count:
                    place = 2 * (index if whole else np.int64(raw.load16(places, index)))
                    if place >= high:
                        break
                    to, where = target + begin + place, byte + begin + place
                    if place >= low and place + 2 <= high:
                        now, value = raw.load16(to, 0), raw.load16(values, index)
                        if step == 0:
                            raw.store16(saved, index, now)
                            total += _share_of_two(value, where, key, columns) - _share_of_two(now, where, key, columns)
                        elif step == 1:
                            raw.store16(saved, index, now)
                            raw.store16(to, 0, value)
                        elif step == 2:
                            raw.store16(to, 0, raw.load16(saved, index))
                        else:
                            was = raw.load16(saved, index)
                            total += _share_of_two(now, where, key, columns) - _share_of_two(was, where, key, columns)
                    else:  # a piece of one-byte elements begins or ends within this word
                        half = np.int64(1) if place < low else np.int64(0)
                        now8, value8 = raw.load8(to, half), raw.load8(values, 2 * index + half)
                        if step == 0:
                            raw.store8(saved, 2 * index + half, now8)
                            total += _share(value8, where + half, key, columns) - _share(now8, where + half, key, columns)
                        elif step == 1:
                            raw.store8(saved, 2 * index + half, now8)
                            raw.store8(to, half, value8)
                        elif step == 2:
                            raw.store8(to, half, raw.load8(saved, 2 * index + half))
                        else:
                            was8 = raw.load8(saved, 2 * index + half)
                            total += _share(now8, where + half, key, columns) - _share(was8, where + half, key, columns)
                    index += 1
        raw.put(out, raw.int64(row, 7), raw.load64(out, raw.int64(row, 7)) + total)
    return last - first
