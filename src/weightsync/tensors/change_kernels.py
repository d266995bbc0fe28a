# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
# numba compiles this file and infers its types. Only the exported functions declare their signatures.
"""Compiled loops over the words that changed. As in :mod:`weightsync.tensors.kernels`, they take addresses, not objects."""

from __future__ import annotations

import numpy as np

from weightsync.tensors import intrinsics as raw

CHANGE_BLOCK = 8192
"""Bytes of a section whose changes are listed together, see :mod:`weightsync.tensors.changes`."""

SECTION_COLUMNS = 4
"""Columns of a table of sections: address of the words before, address of the words now, bytes, bytes of a word."""

TILE_COLUMNS = 15
"""Columns of a table of tiles, see :func:`weightsync.tensors.changes.change_tiles`."""

_MASK = 4095  # of a word's position in a digest block
_AHEAD = 12  # words between one that is worked on and one that is fetched
_FETCHED = CHANGE_BLOCK // 8
"""Changed bytes from which on the words of a block are not prefetched: the processor does it, because most cache lines change."""


@raw.inlined
def list_of(count, word, size):
    """Return whether a block is listed whole, where its values begin, and 4-byte units of the list, for ``count`` changed words."""
    values = (2 * count + word - 1) // word * word
    units = (values + count * word + 3) // 4
    if units < (size + 3) // 4:
        return False, values, units
    return True, np.int64(0), (size + 3) // 4


@raw.inlined
def _different(before, after, first, last, word, places, count):
    # Append the places of the words first <= i < last that differ.
    for i in range(first, last):
        if raw.load_word(before, i, word) != raw.load_word(after, i, word):
            raw.store16(places, count, np.uint16(i))
            count += 1
    return count


@raw.inlined
def _write_list(to, room, places, count, before, after, size, word):
    # List the changed words of a block, with their values after, in ``room`` units, and make the words before (0: none) equal to
    # those. Returns the units of the list, -1 if there is no room. ``places`` is an array: one of which only the address is used
    # would be freed.
    whole, values, units = list_of(count, word, size)
    if units > room:
        return np.int64(-1)
    raw.store32(to, units - 1, np.uint32(0))  # what fills the last unit up
    if whole:
        raw.copy_bytes(to, after, size)
        if before != 0:
            raw.copy_bytes(before, after, size)
        return units
    if values > 2 * count:
        raw.store16(to, count, np.uint16(0))
    raw.copy_bytes(to, places.ctypes.data, 2 * count)
    for i in range(count):
        place = np.int64(places[i])
        value = raw.load_word(after, place, word)
        raw.store_word(to + values, i, value, word)
        if before != 0:
            raw.store_word(before, place, value, word)
    return units


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64)")
def find_changes(sections: int, last: int, counts: int, payload: int, capacity: int, changed: int, stop: int) -> int:
    """List the words that differ from those before, and make the words before equal to them.

    Args:
        sections: Address of the table of sections.
        last: Number of sections.
        counts: Address of a ``uint16`` for each block: how many of its words changed.
        payload: Address of the lists, see :mod:`weightsync.tensors.changes`.
        capacity: 4-byte units of ``payload``.
        changed: Address of an ``int64`` for each section: how many of its words changed.
        stop: Address of a byte. Once it is not zero, this returns early.

    Returns:
        Units used; -1 if there is no room for more, -2 if it was stopped. The words before are then equal in part.
    """
    used, number = np.int64(0), np.int64(0)
    places = np.empty(CHANGE_BLOCK, np.uint16)
    at = places.ctypes.data
    for section in range(last):
        row = sections + section * (8 * SECTION_COLUMNS)
        old, new, nbytes, word = raw.int64(row, 0), raw.int64(row, 1), raw.int64(row, 2), raw.int64(row, 3)
        total = np.int64(0)
        for begin in range(0, nbytes, CHANGE_BLOCK):
            if number & 31 == 0 and raw.stopped(stop) != 0:
                return -2
            size = min(np.int64(CHANGE_BLOCK), nbytes - begin)
            before, after = old + begin, new + begin
            quads, count = size // 8, np.int64(0)
            for line in range(0, quads, 8):
                end = min(line + 8, quads)
                differ = np.uint64(0)
                for i in range(line, end):
                    differ |= raw.load64(before, i) ^ raw.load64(after, i)
                if differ != 0:
                    for i in range(line, end):
                        if raw.load64(before, i) != raw.load64(after, i):
                            count = _different(before, after, 8 * i // word, (8 * i + 8) // word, word, at, count)
            count = _different(before, after, 8 * quads // word, size // word, word, at, count)
            raw.store16(counts, number, np.uint16(count))
            number += 1
            total += count
            if count == 0:
                continue
            units = _write_list(payload + 4 * used, capacity - used, places, count, before, after, size, word)
            if units < 0:
                return -1
            used += units
        raw.put(changed, section, np.uint64(total))
    return used


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def unite_changes(sections: int, last: int, steps: int, number: int, counts: int, payload: int, capacity: int, stop: int) -> int:
    """List the words that changed in any of several steps, with the values that they have now.

    Args:
        sections: Address of the table of sections.
        last: Number of sections.
        steps: Address of an ``int64[number, 3]``: of each step, the addresses of its counts, of the first unit of each block's list
            (``int64``), and of its lists.
        number: Number of steps.
        counts: Address of a ``uint16`` for each block.
        payload: Address of the lists.
        capacity: 4-byte units of ``payload``.
        stop: Address of a byte. Once it is not zero, this returns early.

    Returns:
        As :func:`find_changes`.
    """
    used, block = np.int64(0), np.int64(0)
    marks, places = np.zeros(CHANGE_BLOCK, np.uint8), np.empty(CHANGE_BLOCK, np.uint16)
    for section in range(last):
        row = sections + section * (8 * SECTION_COLUMNS)
        now, nbytes, word = raw.int64(row, 1), raw.int64(row, 2), raw.int64(row, 3)
        for begin in range(0, nbytes, CHANGE_BLOCK):
            if block & 31 == 0 and raw.stopped(stop) != 0:
                return -2
            size = min(np.int64(CHANGE_BLOCK), nbytes - begin)
            words, some = size // word, False
            for step in range(number):
                of = steps + step * 24
                count = np.int64(raw.load16(raw.int64(of, 0), block))
                if count == 0:
                    continue
                some = True
                whole, _, _ = list_of(count, word, size)
                listed = raw.int64(of, 2) + 4 * raw.int64(raw.int64(of, 1), block)
                for i in range(words if whole else count):
                    marks[i if whole else np.int64(raw.load16(listed, i))] = 1
            total = np.int64(0)
            if some:
                for i in range(words):
                    if marks[i] != 0:
                        marks[i] = 0
                        places[total] = i
                        total += 1
                units = _write_list(payload + 4 * used, capacity - used, places, total, np.int64(0), now + begin, size, word)
                if units < 0:
                    return -1
                used += units
            raw.store16(counts, block, np.uint16(total))
            block += 1
    return used


@raw.inlined
def _fetch(places, count, here, word):
    # Prefetch the changed words of a block while those of the block before are worked on.
    for index in range(count):
        raw.prefetch(here + np.int64(raw.load16(places, index)) * word)


@raw.inlined
def _replace(here, places, values, count, word):
    for index in range(count):
        raw.store_word(here, np.int64(raw.load16(places, index)), raw.load_word(values, index, word), word)


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def apply_changes(
    tiles: int,
    first: int,
    last: int,
    counts: int,
    at: int,
    payload: int,
    kept: int,
    step: int,
    then: int,
    out: int,
    columns: int,
    stop: int,
) -> int:
    """Work on the targets of the tiles ``first <= i < last``, at those words of their source that changed.

    Args:
        tiles: Address of the table of tiles.
        first: First tile.
        last: End of the tiles.
        counts: Address of a ``uint16`` for each block of the source: how many of its words changed.
        at: Address of an ``int64`` for each block: the 4-byte unit of ``payload`` where its list lies.
        payload: Address of the lists. Step 0 checks them; the others trust what a step 0 over all tiles has accepted.
        kept: Address of as many units: the words that are replaced, each in the place of its successor's value.
        step: 0 keeps what is in the target, and adds to ``out[row]`` what replacing it would add to the row's digest. 1 replaces
            it. 2 writes back what was kept. 3 adds what the target's difference from what was kept adds.
        then: The next step of each block, taken after the ``step`` of the block that follows; ``step`` again for none.
        out: Address of the digests, a ``uint64`` for each row of the target layout.
        columns: Address of the constants, see :class:`~weightsync.tensors.digest.DigestConstants`.
        stop: Address of a byte. Once it is not zero, this returns early.

    Returns:
        Number of finished tiles; ``-1 - block`` if the list of that block is not in order, or names a word outside of it.
    """
    for tile in range(first, last):
        if raw.stopped(stop) != 0:
            return tile - first
        row = tiles + tile * (8 * TILE_COLUMNS)
        begin, stride, rows, size = raw.int64(row, 0), raw.int64(row, 1), raw.int64(row, 4), raw.int64(row, 5)
        section, nbytes, word = raw.int64(row, 12), raw.int64(row, 13), raw.int64(row, 14)
        target, target_stride, apart = raw.int64(row, 2), raw.int64(row, 3), stride if rows > 1 else np.int64(1) << 62
        lead, lead_step, blocks = raw.int64(row, 7), raw.int64(row, 8), raw.int64(row, 11)
        first_byte, byte_step = raw.int64(row, 9), raw.int64(row, 10)
        straight = rows == 1 or (stride == size and target_stride == size)  # the tile is one piece in both memories, as most are
        start, end = begin // CHANGE_BLOCK, (begin + (rows - 1) * stride + size - 1) // CHANGE_BLOCK + 1
        turns, total = 1 if step == then else 2, np.uint64(0)
        for number in range(start, end + turns - 1):
            for turn in range(turns):  # ``then`` follows a block behind: it computes while the processor writes and fetches
                block, doing = number - turn, step if turn == 0 else then
                count = np.int64(raw.load16(counts, section + block)) if start <= block < end else np.int64(0)
                if count == 0:
                    continue
                room = min(np.int64(CHANGE_BLOCK), nbytes - block * CHANGE_BLOCK)
                whole, behind, _ = list_of(count, word, room)
                places = payload + 4 * raw.int64(at, section + block)
                values, saved = places + behind, kept + 4 * raw.int64(at, section + block) + behind
                # Places ascend, so the run of a word is found by counting on, and the factor of its digest block seldom changes.
                offset, before = block * CHANGE_BLOCK - begin, np.int64(-1)
                run = max(offset, np.int64(0)) // apart
                base = run * apart
                last_key, factor = np.int64(-1), np.uint64(0)
                words = room // word if whole else count
                if turn == 0 and straight and (block + 1) * CHANGE_BLOCK < begin + rows * size:
                    near = np.int64(raw.load16(counts, section + block + 1))
                    next_whole, _, _ = list_of(near, word, min(np.int64(CHANGE_BLOCK), nbytes - (block + 1) * CHANGE_BLOCK))
                    if near * word < _FETCHED and not next_whole:
                        _fetch(payload + 4 * raw.int64(at, section + block + 1), near, target + offset + CHANGE_BLOCK, word)
                # The loop below works on every block. A block that lies inside such a tile takes half the time without its checks.
                if doing != 0 and straight and not whole and offset >= 0 and offset + room <= rows * size:
                    here = target + offset
                    if doing != 3:
                        _replace(here, places, values if doing == 1 else saved, words, word)
                        continue
                    # The byte of a row is ``byte + shift``. Up to ``ends`` all bytes have the same factor.
                    shift, ends, part = np.int64(0), np.int64(-1), np.uint64(0)
                    for index in range(words):
                        place = np.int64(raw.load16(places, index))
                        byte = offset + place * word
                        if byte >= ends:
                            total += factor * part
                            while byte - base >= apart:
                                base += apart
                                run += 1
                            shift, part = first_byte + run * byte_step - base, np.uint64(0)
                            ends = min(base + apart, (((byte + shift) >> 14) + 1 << 14) - shift)
                            factor = raw.factor((lead + run * lead_step) * blocks + ((byte + shift) >> 14), columns)
                        difference = raw.load_word(here, place, word) - raw.load_word(saved, index, word)
                        column = np.uint64(raw.load32(columns, (byte + shift >> 2) & _MASK))
                        part += column * (difference << np.uint64(8 * (byte + shift & 3)))
                    total += factor * part
                    continue
                for index in range(words):
                    place = index if whole else np.int64(raw.load16(places, index))
                    if doing == 0:
                        if place <= before or (place + 1) * word > room:
                            return -1 - section - block
                        before = place
                    byte = offset + place * word
                    if byte < 0:
                        continue
                    while byte - base >= apart:
                        base += apart
                        run += 1
                    byte -= base
                    if byte >= size or run >= rows:
                        continue
                    to = target + run * target_stride + byte
                    if not straight and not whole and index + _AHEAD < words:  # if the target is contiguous, too
                        raw.prefetch(to + (np.int64(raw.load16(places, index + _AHEAD)) - place) * word)
                    if doing == 1:
                        raw.store_word(to, 0, raw.load_word(values, index, word), word)
                        continue
                    if doing == 2:
                        raw.store_word(to, 0, raw.load_word(saved, index, word), word)
                        continue
                    now = raw.load_word(to, 0, word)
                    if doing == 0:
                        raw.store_word(saved, index, now, word)
                        difference = raw.load_word(values, index, word) - now
                    else:
                        difference = now - raw.load_word(saved, index, word)
                    where = first_byte + run * byte_step + byte
                    key = (lead + run * lead_step) * blocks + (where >> 14)
                    if key != last_key:
                        last_key, factor = key, raw.factor(key, columns)
                    column = np.uint64(raw.load32(columns, (where >> 2) & _MASK))
                    total += factor * (column * (difference << np.uint64(8 * (where & 3))))
        raw.put(out, raw.int64(row, 6), raw.load64(out, raw.int64(row, 6)) + total)
    return last - first
