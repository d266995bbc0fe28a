# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
# numba compiles this file and infers its types. Only the exported functions declare their signatures.
"""Compiled loops: copies of tiles, in memory and through sockets, and digests of rows. They take addresses, not objects.

numba's cache depends only on the file of a function: a change of :mod:`weightsync.tensors.intrinsics`, inlined here, goes unnoticed
until this file changes, too. Every array is passed as its address (``int64``), so that read-only arrays need no second compilation.
The callers keep the arrays alive and have checked all bounds. The GIL is released.

``numba`` writes its cache beside this file or below the user's cache directory. If it can write to neither, each import compiles
again.
"""

from __future__ import annotations

import numpy as np

from weightsync.tensors import intrinsics as raw

BLOCK = 4096
"""Words that share one row factor in the digest."""

TILE = 13
"""Columns of a tile table, listed in :class:`~weightsync.tensors.copy_table.CopyTable`."""

LEAD = 7
"""Columns of a row table before its leading dimensions, listed in :func:`digest_table`."""

SLICE = 256 << 10
"""Bytes that one socket call moves: few enough that they are still in the second-level cache afterwards."""

_LONG = 32 << 10  # bytes that justify a separate system call
_MOST = 1 << 20  # bytes of one send
_NO_LIMIT = np.int64(1) << 62
_LINE = raw.LINE
_LINE_WORDS = _LINE // 4
_STEP = 256  # bytes copied after a prefetch of as many
_BEHIND = 4  # lines between what is copied and what is digested
_AHEAD = 2048  # prefetch distance in bytes, see docs/benchmarks/cpu-copies.md
_AHEAD_APART = 6144  # the same for short runs with gaps, for which the hardware prefetcher does not help
_CHECK = 256 << 10  # bytes between two checks of the stop flag
_MASK = BLOCK - 1


@raw.inlined
def _dot(address, columns, words):
    lines = words // _LINE_WORDS
    total = raw.dot(address, columns, lines)
    for i in range(lines * _LINE_WORDS, words):
        total += np.uint64(raw.load32(columns, i)) * np.uint64(raw.load32(address, i))
    return total


@raw.inlined
def _part(address, position, count):
    # ``count`` bytes (fewer than a word) at byte ``position`` of a word, zero elsewhere.
    word = np.uint64(0)
    for i in range(count):
        word |= np.uint64(raw.load8(address, i)) << np.uint64(8 * (position + i))
    return word


@raw.inlined
def _run(address, first, size, key, columns):
    # ``size`` contiguous bytes from byte ``first`` of the last dimension of the row whose first block has number ``key``.
    total = np.uint64(0)
    word = first >> 2
    position = first & 3
    if position:
        count = min(4 - position, size)
        value = _part(address, position, count)
        total += raw.factor(key + (word >> 12), columns) * (np.uint64(raw.load32(columns, word & _MASK)) * value)
        address += count
        size -= count
        word += 1
    left = size >> 2
    while left > 0:
        column = word & _MASK
        words = min(BLOCK - column, left)
        total += raw.factor(key + (word >> 12), columns) * _dot(address, columns + 4 * column, words)
        address += 4 * words
        word += words
        left -= words
    if size & 3:
        value = _part(address, 0, size & 3)
        total += raw.factor(key + (word >> 12), columns) * (np.uint64(raw.load32(columns, word & _MASK)) * value)
    return total


@raw.inlined
def _ahead(stride, size):
    # Prefetch distance for a run of ``size`` bytes. Short runs with gaps prefetch a later run, because the hardware does not
    # predict its address.
    return _AHEAD if stride == size or size > _AHEAD else (_AHEAD_APART + size - 1) // size * stride


@raw.inlined
def _limit(stride, size, left):
    # End of the prefetch, counted from the run's start, with ``left`` runs left: gaps are not prefetched.
    if stride == size:
        return _NO_LIMIT
    return size if size > _AHEAD else left * stride


@raw.inlined
def _prefetch_lines(source, start, count, ahead, limit):
    # A few lines at a time: prefetching a whole run would fill the buffers that the copy's own reads need.
    for line in range(start + ahead, min(start + ahead + count, limit), _LINE):
        raw.prefetch(source + line)


@raw.inlined
def _copy_run(target, source, size, ahead, limit):
    for start in range(0, size, _STEP):
        count = min(_STEP, size - start)
        _prefetch_lines(source, start, count, ahead, limit)
        raw.copy_bytes(target + start, source + start, count)


@raw.inlined
def _copy_digest(target, source, read, first, size, key, columns, ahead, limit):
    # Copy a run and digest ``read``, the source or the target, a few lines behind the copy and so from the cache. What is not a
    # whole line of one block is copied first: bytes up to a word, and the end of the run or of a block.
    total = np.uint64(0)
    start = 0
    while start < size:
        byte = first + start
        word = byte >> 2
        column = word & _MASK
        lines = np.int64(0) if byte & 3 else min((size - start) // _LINE, (BLOCK - column) // _LINE_WORDS)
        if lines > 0:
            to, place = target + start, source + start
            total += raw.factor(key + (word >> 12), columns) * raw.copy_and_dot(
                to, place, read + start, columns + 4 * column, lines, ahead, limit - start, _BEHIND
            )
            start += lines * _LINE
        else:
            count = min(_LINE - (byte & 3), size - start)
            _prefetch_lines(source, start, count, ahead, limit)
            raw.copy_bytes(target + start, source + start, count)
            total += _run(read + start, byte, count, key, columns)
            start += count
    return total


@raw.inlined
def _copy_runs(target, target_stride, source, source_stride, rows, size):
    # Runs of one element are transposed copies, for which calls to memcpy would cost more than the elements.
    if size == 2:
        for row in range(rows):
            raw.store16(target + row * target_stride, 0, raw.load16(source + row * source_stride, 0))
    elif size == 4:
        for row in range(rows):
            raw.store32(target + row * target_stride, 0, raw.load32(source + row * source_stride, 0))
    elif size == 1:
        for row in range(rows):
            raw.store8(target + row * target_stride, 0, raw.load8(source + row * source_stride, 0))
    elif size == 8:
        for row in range(rows):
            raw.store64(target + row * target_stride, 0, raw.load64(source + row * source_stride, 0))
    else:
        ahead = _ahead(source_stride, size)
        for row in range(rows):
            limit = _limit(source_stride, size, rows - row)
            _copy_run(target + row * target_stride, source + row * source_stride, size, ahead, limit)


@raw.inlined
def _digest_runs(row, begin, rows, target, target_stride, source, source_stride, size, columns):
    # Copy ``rows`` runs from ``begin`` on of the tile at table row ``row``, and digest them from their target.
    lead, lead_step = raw.int64(row, 8), raw.int64(row, 9)
    byte, byte_step, blocks = raw.int64(row, 10), raw.int64(row, 11), raw.int64(row, 12)
    total = np.uint64(0)
    ahead = _ahead(source_stride, size)
    for run in range(rows):
        key = (lead + (begin + run) * lead_step) * blocks
        first = byte + (begin + run) * byte_step
        to = target + run * target_stride
        limit = _limit(source_stride, size, rows - run)
        total += _copy_digest(to, source + run * source_stride, to, first, size, key, columns, ahead, limit)
    return total


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def copy_table(
    table: int, first: int, last: int, bases: int, packed_source: int, packed_target: int, out: int, columns: int, stop: int
) -> int:
    """Copy the tiles ``first <= i < last`` of a tile table.

    Args:
        table: Address of the tile table.
        first: First tile.
        last: End of the tiles.
        bases: Address of the array of region addresses.
        packed_source: If not zero, runs are read from this address instead, one after the other.
        packed_target: If not zero, runs are written to this address instead, one after the other.
        out: If not zero, address of an array of ``uint64``: each tile's digest, read back from its target, is added to
            ``out[row]``.
        columns: Address of the constants, see :class:`~weightsync.tensors.digest.DigestConstants`.
        stop: Address of a byte. Once it is not zero, this returns early.

    Returns:
        Bytes copied.
    """
    done = 0
    unchecked = 0
    for tile in range(first, last):
        row = table + tile * (8 * TILE)
        rows, size = raw.int64(row, 5), raw.int64(row, 6)
        if packed_source != 0:
            source, source_stride = packed_source + done, size
        else:
            source, source_stride = raw.int64(bases, raw.int64(row, 0)) + raw.int64(row, 1), raw.int64(row, 2)
        if packed_target != 0:
            target, target_stride = packed_target + done, size
        else:
            target, target_stride = raw.int64(row, 3), raw.int64(row, 4)
        if out == 0 and rows > 1 and source_stride == size and target_stride == size:
            size *= rows
            rows = 1
        step = max(_CHECK // size, 1)
        for run in range(0, rows, step):
            count = min(step, rows - run)
            to, start = target + run * target_stride, source + run * source_stride
            if out != 0:
                total = _digest_runs(row, run, count, to, target_stride, start, source_stride, size, columns)
                raw.put(out, raw.int64(row, 7), raw.load64(out, raw.int64(row, 7)) + total)
            else:
                _copy_runs(to, target_stride, start, source_stride, count, size)
            done += count * size
            unchecked += count * size
            if unchecked >= _CHECK:
                if raw.stopped(stop) != 0:
                    return done
                unchecked = 0
    return done


@raw.inlined
def _digest_part(row, start, count, columns):
    # Digest ``count`` bytes from ``start`` on of the tile at table row ``row``, in its target: one run, or adjacent runs.
    size = raw.int64(row, 6)
    run, into = start // size, start % size
    address = raw.int64(row, 3) + run * raw.int64(row, 4) + into
    total = np.uint64(0)
    while count > 0:
        part = min(size - into, count)
        key = (raw.int64(row, 8) + run * raw.int64(row, 9)) * raw.int64(row, 12)
        total += _run(address, raw.int64(row, 10) + run * raw.int64(row, 11) + into, part, key, columns)
        address += part
        count -= part
        run += 1
        into = 0
    return total


@raw.compiled("int64(int32, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def receive_table(
    fd: int, table: int, first: int, last: int, done: int, nbytes: int, bucket: int, until: int, out: int, columns: int, status: int
) -> int:
    """Receive the tiles ``first <= i < last`` to their targets, except the first ``done`` of their ``nbytes`` bytes.

    Long runs are received in place, short ones through ``bucket`` (:data:`SLICE` bytes). Both go in slices whose digests (``out``
    and ``columns`` as in :func:`copy_table`) are taken while they are in the cache. ``status`` is the address of an ``int64[3]``.

    With ``fd`` -1 nothing is received: ``status[1]`` bytes lie in ``bucket`` (or already at the address that :func:`run_of_table`
    returned), and this returns when they are in place.

    Returns:
        Bytes in place: all, or fewer if the monotonic clock reads ``until`` (nanoseconds) or a call fails. Then ``status[0]`` is
        the error number, or -1 at the end of the stream. Call again with the result as ``done``.
    """
    taken = before = np.int64(0)  # start of the bytes in the bucket; bytes of earlier tiles
    have = raw.int64(status, 1) if fd < 0 else np.int64(0)  # bytes in the bucket
    for tile in range(first, last):
        row = table + tile * (8 * TILE)
        target, stride, rows, size = raw.int64(row, 3), raw.int64(row, 4), raw.int64(row, 5), raw.int64(row, 6)
        while done < before + rows * size:
            if fd < 0 and have == 0:
                return done
            start = done - before
            run, into = start // size, start % size
            to = target + run * stride + into
            room = rows * size - start if stride == size else size - into
            direct = have == 0 and room >= _LONG
            if direct:
                count = raw.receive(fd, to, min(room, SLICE), until, status)
            elif have == 0:
                have, taken = raw.receive(fd, bucket, min(nbytes - done, SLICE), until, status), np.int64(0)
                count = min(size - into, have)
            else:
                count = min(size - into, have)
            if count == 0:
                return done
            total = np.uint64(0)
            if not direct and into == 0 and have >= size and to != bucket + taken:
                runs = min(rows - run, have // size)
                count = runs * size
                if out != 0:
                    total = _digest_runs(row, run, runs, to, stride, bucket + taken, size, size, columns)
                else:
                    _copy_runs(to, stride, bucket + taken, size, runs, size)
            else:
                if not direct and to != bucket + taken:
                    raw.copy_bytes(to, bucket + taken, count)
                if out != 0:
                    total = _digest_part(row, start, count, columns)
            if out != 0:
                raw.put(out, raw.int64(row, 7), raw.load64(out, raw.int64(row, 7)) + total)
            if not direct:
                have, taken = have - count, taken + count
            done += count
        before += rows * size
    return done


@raw.compiled("int64(int64, int64, int64, int64, int64)")
def run_of_table(table: int, first: int, last: int, done: int, status: int) -> int:
    """Return the number of contiguous target bytes, at byte ``done`` of tiles ``first <= i < last``; 0 at their end.

    Writes the address of that byte to ``status[1]``. After receiving there, pass the address to :func:`receive_table` as
    ``bucket``: it then digests the bytes and copies nothing.
    """
    before = np.int64(0)
    for tile in range(first, last):
        row = table + tile * (8 * TILE)
        target, stride, rows, size = raw.int64(row, 3), raw.int64(row, 4), raw.int64(row, 5), raw.int64(row, 6)
        if done < before + rows * size:
            start = done - before
            run, into = start // size, start % size
            raw.put(status, 1, target + run * stride + into)
            room = rows * size - start if stride == size else size - into
            return room
        before += rows * size
    return np.int64(0)


@raw.compiled("int64(int32, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def send_table(
    fd: int, table: int, first: int, last: int, bases: int, done: int, bucket: int, size: int, until: int, status: int
) -> int:
    """Send the tiles ``first <= i < last`` except their first ``done`` bytes: long runs in place, short ones packed in ``bucket``.

    ``bases`` is as in :func:`copy_table`, ``size`` the bytes of ``bucket``. With ``fd`` -1 nothing is sent: this returns when up
    to ``size`` bytes are contiguous at the address in ``status[1]``, which is ``bucket`` or, for a long run, the run itself.
    A long run is cut into equal parts. A bucket that is half full ends with its tile, as contiguous targets often do.

    Returns:
        Bytes sent: all, or fewer as in :func:`receive_table`.
    """
    raw.put(status, 1, bucket)
    have = before = np.int64(0)  # bytes in the bucket; bytes of earlier tiles
    for tile in range(first, last):
        row = table + tile * (8 * TILE)
        source, stride = raw.int64(bases, raw.int64(row, 0)) + raw.int64(row, 1), raw.int64(row, 2)
        rows, run_bytes = raw.int64(row, 5), raw.int64(row, 6)
        while done + have < before + rows * run_bytes:
            start = done + have - before
            run, into = start // run_bytes, start % run_bytes
            place = source + run * stride + into
            room = rows * run_bytes - start if stride == run_bytes else run_bytes - into
            if have == size or (have > 0 and room >= _LONG) or (have >= size // 2 and start == 0):
                if fd < 0:
                    return done + have
                count = raw.send(fd, bucket, have, until, status)
                done += count
                if count < have:
                    return done
                have = np.int64(0)
            if room >= _LONG:
                if fd < 0:
                    raw.put(status, 1, place)
                    parts = -(-room // size)
                    return done + min(-(-room // (parts * _LINE)) * _LINE, room)
                count = raw.send(fd, place, min(room, _MOST), until, status)
                if count == 0:
                    return done
                done += count
            elif into == 0 and run_bytes <= size - have:
                runs = min(rows - run, (size - have) // run_bytes)
                _copy_runs(bucket + have, run_bytes, place, stride, runs, run_bytes)
                have += runs * run_bytes
            else:
                count = min(run_bytes - into, size - have)
                raw.copy_bytes(bucket + have, place, count)
                have += count
        before += rows * run_bytes
    return done + (have if fd < 0 or have == 0 else raw.send(fd, bucket, have, until, status))


@raw.inlined
def _scattered(address, stride, itemsize, target, first, count, key, columns):
    # As _run, for elements that are ``stride`` bytes apart. The digest is linear in the word, so each element adds its part.
    total = np.uint64(0)
    block = np.int64(-1)
    value = np.uint64(0)
    for i in range(count):
        byte = first + i * itemsize
        word = byte >> 2
        if word >> 12 != block:
            if block >= 0:
                total += raw.factor(key + block, columns) * value
            block = word >> 12
            value = np.uint64(0)
        column = np.uint64(raw.load32(columns, word & _MASK))
        place = address + i * stride
        if itemsize == 8:
            # Eight bytes are two words of one block: a block holds an even number of words.
            value += column * np.uint64(raw.load32(place, 0))
            value += np.uint64(raw.load32(columns, (word + 1) & _MASK)) * np.uint64(raw.load32(place, 1))
            if target != 0:
                raw.store64(target, i, raw.load64(place, 0))
        else:
            element = raw.load_word(place, 0, itemsize)
            value += column * (element << np.uint64(8 * (byte & 3)))
            if target != 0:
                raw.store_word(target, i, element, itemsize)
    if block >= 0:
        total += raw.factor(key + block, columns) * value
    return total


@raw.compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def digest_table(table: int, dims: int, first: int, last: int, targets: int, out: int, columns: int, stop: int) -> int:
    """Write the digest of each row ``first <= i < last`` of a row table to ``out[i - first]``.

    A row of the table is ``int64[LEAD + 3 * (dims - 1)]``:

    0. address of the box's first element
    1. index of its leading dimensions, flattened over the global shape
    2. blocks of a tensor row
    3. first byte in the last dimension
    4. elements in the last dimension
    5. bytes between these elements
    6. bytes of an element

    followed for each leading dimension, outermost first, by: extent, bytes between neighbors, distance of neighbors in the
    flattened index.

    If ``targets`` (address of an array of addresses, one for each table row) is not zero, each box is also copied there in the same
    pass, contiguous in C order. ``columns`` is the address of the constants. ``stop`` is the address of a byte that ends the work
    early.

    Returns:
        Number of finished rows.
    """
    width = 8 * (LEAD + 3 * (dims - 1))
    unchecked = 0
    for index in range(first, last):
        row = table + index * width
        base = raw.int64(row, 0)
        start = raw.int64(row, 1)
        blocks = raw.int64(row, 2)
        byte = raw.int64(row, 3)
        count = raw.int64(row, 4)
        stride = raw.int64(row, 5)
        itemsize = raw.int64(row, 6)
        size = count * itemsize
        dense = stride == itemsize or count == 1
        target = np.int64(0)
        if targets != 0:
            target = raw.int64(targets, index)
        inner, inner_stride, inner_step = np.int64(1), np.int64(0), np.int64(0)
        if dims > 1:
            last_lead = LEAD + 3 * (dims - 2)
            inner, inner_stride = raw.int64(row, last_lead), raw.int64(row, last_lead + 1)
            inner_step = raw.int64(row, last_lead + 2)
        outer = np.int64(1)
        for dim in range(dims - 2):
            outer *= raw.int64(row, LEAD + 3 * dim)
        total = np.uint64(0)
        for combination in range(outer):
            rest = combination
            address = base
            lead = start
            for dim in range(dims - 3, -1, -1):
                extent = raw.int64(row, LEAD + 3 * dim)
                position = rest % extent
                rest //= extent
                address += position * raw.int64(row, LEAD + 3 * dim + 1)
                lead += position * raw.int64(row, LEAD + 3 * dim + 2)
            ahead = _ahead(inner_stride, size)
            for run in range(inner):
                if dense and target != 0:
                    limit = _limit(inner_stride, size, inner - run)
                    total += _copy_digest(target, address, address, byte, size, lead * blocks, columns, ahead, limit)
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
                    if raw.stopped(stop) != 0:
                        return index - first
                    unchecked = 0
        raw.put(out, index - first, total)
    return last - first
