# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
# Triton compiles this file as its own language, so its functions have no Python type annotations.
"""Triton kernels that find and apply changed words, as :mod:`weightsync.tensors.change_kernels` does on a CPU, bit for bit.

Loops over what was counted are written with ``while``, which Triton's interpreter can run beside NumPy 2.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightsync.tensors.cuda.kernels import row_weight

_BLOCK = tl.constexpr(8192)  # bytes of a block of changes
_COLUMNS = tl.constexpr(4096)  # words of the C table
_SLOT = tl.constexpr(10240)  # bytes of a block's scratch memory: the numbers of 1,024 quads, and a list
_LIST = tl.constexpr(2048)  # where the list begins in it


@triton.jit
def _list_of(count, word, size):
    """Whether the block is stored whole, where the values begin, and 4-byte units of the list: for ``count`` changed words."""
    values = (2 * count + word - 1) // word * word
    units = (values + count * word + 3) // 4
    most = (size + 3) // 4
    whole = units >= most
    return whole, tl.where(whole, 0, values), tl.where(count == 0, 0, tl.minimum(units, most))


@triton.jit
def _words(address, WORD: tl.constexpr):
    """Pointers to words of ``WORD`` bytes."""
    return address.to(tl.pointer_type(tl.uint8 if WORD == 1 else (tl.uint16 if WORD == 2 else tl.uint32)))


@triton.jit
def _store_words(address, value, mask, WORD: tl.constexpr):
    pointers = _words(address, WORD)
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _load_words(address, mask, WORD: tl.constexpr):
    return tl.load(_words(address, WORD), mask=mask, other=0).to(tl.uint64)


@triton.jit
def _quads(address, lane, size, live, WORD: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr):
    """Load the ``lane``-th 8 bytes from ``address`` on; bytes from ``size`` on are zeros. ``WIDE``: lanes follow one another."""
    if ALIGNED:
        pointers = address.to(tl.pointer_type(tl.uint64)) + lane
        if WIDE:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), 16)
        value = tl.load(pointers, mask=live, other=0)
    else:
        value = tl.zeros(lane.shape, tl.uint64)
        for part in tl.static_range(8 // WORD):
            at = lane * 8 + part * WORD
            value |= _load_words(address + at, live & (at < size), WORD) << (8 * WORD * part)
    left = tl.minimum(size - lane * 8, 8)
    # A shift by 64 is not defined, so whole quads are told apart.
    some = (tl.full(lane.shape, 1, tl.uint64) << (8 * tl.maximum(left, 0) % 64).to(tl.uint64)) - 1
    return tl.where(left >= 8, value, value & some)


@triton.jit
def _store_quads(address, lane, value, size, WORD: tl.constexpr):
    """Store the ``lane``-th 8 bytes from ``address`` on, a multiple of 16; nothing from ``size`` on."""
    full = lane * 8 + 8 <= size
    pointers = tl.max_contiguous(tl.multiple_of(address.to(tl.pointer_type(tl.uint64)) + lane, 16), 16)
    tl.store(pointers, value, mask=full)
    for part in tl.static_range(8 // WORD):
        at = lane * 8 + part * WORD
        _store_words(address + at, value >> (8 * WORD * part), (full.to(tl.int32) == 0) & (at < size), WORD)


@triton.jit
def _find(
    before, after, size, slot, count_to, units_to, changed, WORD: tl.constexpr, ALIGNED: tl.constexpr, MANY: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """List the changed words of one block in its slot, and make ``before`` equal to ``after``."""
    per: tl.constexpr = 8 // WORD  # words of a quad
    ones: tl.constexpr = (1 << (8 * WORD)) - 1
    lane = tl.arange(0, 1024)
    live = lane * 8 < size
    new = _quads(after, lane, size, live, WORD, ALIGNED, True)
    differ = _quads(before, lane, size, live, WORD, True, True) ^ new
    some = differ != 0
    words = tl.zeros((1024,), tl.int32)
    for part in tl.static_range(per):
        words += ((differ >> (8 * WORD * part)) & ones != 0).to(tl.int32)
    count = tl.sum(words, axis=0)
    whole, behind, units = _list_of(count, WORD, size)
    tl.store(count_to, count.to(tl.uint16))
    tl.store(units_to, units)
    if count > 0:
        tl.atomic_add(changed, count.to(tl.int64), sem="relaxed")
        if whole:
            _store_quads(before, lane, new, size, WORD)
        else:
            # Few quads hold changes: their numbers first, side by side, then only these are taken apart.
            rank = tl.cumsum(some.to(tl.int32), 0)
            quads = tl.sum(some.to(tl.int32), axis=0)
            tl.store((slot + 2 * (rank - 1)).to(tl.pointer_type(tl.uint16)), lane.to(tl.uint16), mask=some)
            tl.debug_barrier()
            base = 0
            places, values = slot + _LIST, slot + _LIST + behind
            inner = tl.arange(0, per)
            start = 0
            while start < quads:
                index = start + tl.arange(0, LANES)
                there = index < quads
                quad = tl.load((slot + 2 * index).to(tl.pointer_type(tl.uint16)), mask=there, other=0).to(tl.int32)
                now = _quads(after, quad, size, there, WORD, ALIGNED, False)
                was = _quads(before, quad, size, there, WORD, True, False)
                shift = (8 * WORD * inner).to(tl.uint64)[None, :]
                value = tl.reshape((now[:, None] >> shift) & ones, (LANES * per,))
                other = tl.reshape((was[:, None] >> shift) & ones, (LANES * per,))
                place = tl.reshape(quad[:, None] * per + inner[None, :], (LANES * per,))
                wanted = value != other
                order = tl.cumsum(wanted.to(tl.int32), 0) - 1 + base
                tl.store((places + 2 * order).to(tl.pointer_type(tl.uint16)), place.to(tl.uint16), mask=wanted)
                _store_words(values + WORD * order, value, wanted, WORD)
                _store_words(before + WORD * place, value, wanted & (quads <= MANY), WORD)
                base += tl.sum(wanted.to(tl.int32), axis=0)
                start += LANES
            if MANY < 1024:
                tl.debug_barrier()
                if quads > MANY:
                    _store_quads(before, lane, new, size, WORD)


@triton.jit(do_not_specialize=["sections", "first", "scratch"])
def find_kernel(
    table,
    sections,
    blocks,
    first,
    counts,
    units,
    changed,
    scratch,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    MANY: tl.constexpr,
    LANES: tl.constexpr,
):
    """List the changed words of one block, ``first`` + the program's number.

    ``table`` is ``int64[5, sections]``: address before, address now, bytes, bytes of a word, first block. ``blocks`` is the section
    of each block, ``counts`` and ``units`` take a number for each block, ``changed`` a sum for each section. ``scratch`` is memory
    for a slot of each program. ``WORD`` is 0 where words have several sizes; ``ALIGNED``: all addresses are multiples of 16.
    A block of which more than ``MANY`` of its 1,024 quads changed is copied, others word by word.
    """
    number = first + tl.program_id(0)
    section = tl.load(blocks + number)
    row = table + section
    begin = (number - tl.load(row + 4 * sections)) * _BLOCK
    before = tl.load(row) + begin
    after = tl.load(row + sections) + begin
    size = tl.minimum(tl.load(row + 2 * sections) - begin, _BLOCK).to(tl.int32)
    slot = scratch + tl.program_id(0).to(tl.int64) * _SLOT
    at, to, total = counts + number, units + number, changed + section
    # What lies behind the end of memory that is not ours is read only within the same 16 bytes.
    if WORD:
        _find(before, after, size, slot, at, to, total, WORD, ALIGNED, MANY, LANES)
    else:
        word = tl.load(row + 3 * sections)
        if word == 2:
            _find(before, after, size, slot, at, to, total, 2, ALIGNED, MANY, LANES)
        elif word == 4:
            _find(before, after, size, slot, at, to, total, 4, ALIGNED, MANY, LANES)
        else:
            _find(before, after, size, slot, at, to, total, 1, ALIGNED, MANY, LANES)


@triton.jit(do_not_specialize=["sections", "first", "last", "scratch", "payload", "capacity"])
def pack_kernel(
    table, sections, blocks, first, last, counts, ends, scratch, payload, capacity, ALIGNED: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Copy the lists of ``GROUP`` blocks from their slots to where they belong: ``ends`` are the units up to each block's end.

    Blocks that are sent whole are read from the memory of now if that is ``ALIGNED``: that of before may be the host's.
    """
    inside = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    number = first + inside
    live = number < last
    row = table + tl.load(blocks + number, mask=live, other=0)
    begin = (number - tl.load(row + 4 * sections, mask=live, other=0)) * _BLOCK
    size = tl.minimum(tl.load(row + 2 * sections, mask=live, other=0) - begin, _BLOCK).to(tl.int32)
    word = tl.load(row + 3 * sections, mask=live, other=1).to(tl.int32)
    count = tl.load(counts + number, mask=live, other=0).to(tl.int32)
    whole, behind, units = _list_of(count, word, size)
    end = tl.load(ends + number, mask=live, other=0)
    units = tl.where(end <= capacity, units, 0)
    listed = scratch + inside.to(tl.int64) * _SLOT + _LIST
    source = tl.where(whole, tl.load(row + (sections if ALIGNED else 0), mask=live, other=0) + begin, listed)
    target = payload + (end - units) * 4
    # Bytes behind the end of a list, or of a block, are zeros, and so are those between places and values.
    stop = tl.where(whole, size, behind + count * word)
    gap = tl.where(whole, stop, 2 * count)
    most = tl.max(units, axis=0)
    start = 0
    while start < most:
        unit = start + tl.arange(0, LANES)[None, :]
        here = unit < units[:, None]
        value = tl.load((source[:, None] + unit * 4).to(tl.pointer_type(tl.uint32)), mask=here, other=0)
        left = stop[:, None] - unit * 4
        value = tl.where(left >= 4, value, value & ((1 << (8 * tl.maximum(left, 0)) % 32) - 1).to(tl.uint32))
        odd = (gap[:, None] < behind[:, None]) & (unit == (gap // 4)[:, None])
        value = tl.where(odd, value & 0xFFFF, value)
        tl.store((target[:, None] + unit * 4).to(tl.pointer_type(tl.uint32)), value, mask=here)
        start += LANES


@triton.jit(do_not_specialize=["sections", "first", "steps", "copies"])
def mark_kernel(table, sections, blocks, first, chain, steps, copies, ALIGNED: tl.constexpr, LANES: tl.constexpr):
    """Copy one block, ``first`` + the program's number, and change each word there that is listed in one of ``steps``.

    ``table`` and ``blocks`` are those of :func:`find_kernel`. ``chain`` is ``int64[steps, 3]``: addresses of the counts, of the
    units where the blocks' lists begin, and of the lists.
    """
    number = first + tl.program_id(0)
    row = table + tl.load(blocks + number)
    begin = (number - tl.load(row + 4 * sections)) * _BLOCK
    source = tl.load(row + sections) + begin
    size = tl.minimum(tl.load(row + 2 * sections) - begin, _BLOCK).to(tl.int32)
    word = tl.load(row + 3 * sections).to(tl.int32)
    copy = copies + tl.program_id(0).to(tl.int64) * _BLOCK
    lane = tl.arange(0, 1024)
    value = _quads(source, lane, size, lane * 8 < size, 1, ALIGNED, True)
    every = 0
    step = 0
    while step < steps:
        count = tl.load(tl.load(chain + 3 * step).to(tl.pointer_type(tl.uint16)) + number).to(tl.int32)
        whole, _, _ = _list_of(count, word, size)
        every += whole.to(tl.int32)
        step += 1
    _store_quads(copy, lane, tl.where(every > 0, value ^ 0x0101010101010101, value), size, 1)
    tl.debug_barrier()
    step = 0
    while step < steps:
        count = tl.load(tl.load(chain + 3 * step).to(tl.pointer_type(tl.uint16)) + number).to(tl.int32)
        count = tl.where(every > 0, 0, count)
        places = tl.load(chain + 3 * step + 2) + tl.load(tl.load(chain + 3 * step + 1).to(tl.pointer_type(tl.int64)) + number) * 4
        start = 0
        while start < count:
            index = start + tl.arange(0, LANES)
            here = index < count
            at = tl.load((places + 2 * index).to(tl.pointer_type(tl.uint16)), mask=here, other=0).to(tl.int32) * word
            byte = tl.load((source + at).to(tl.pointer_type(tl.uint8)), mask=here, other=0)
            tl.store((copy + at).to(tl.pointer_type(tl.uint8)), byte ^ 1, mask=here)
            start += LANES
        step += 1


@triton.jit(do_not_specialize=["sections", "total"])
def units_kernel(table, sections, blocks, total, counts, units, bad, LANES: tl.constexpr):
    """Compute the units of each block's list from ``counts``, which are not trusted: ``bad`` is set where there are too many."""
    number = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = number < total
    row = table + tl.load(blocks + number, mask=live, other=0)
    begin = (number - tl.load(row + 4 * sections, mask=live, other=0)) * _BLOCK
    size = tl.minimum(tl.load(row + 2 * sections, mask=live, other=0) - begin, _BLOCK).to(tl.int32)
    word = tl.load(row + 3 * sections, mask=live, other=1).to(tl.int32)
    count = tl.load(counts + number, mask=live, other=0).to(tl.int32)
    _, _, used = _list_of(count, word, size)
    tl.store(units + number, used, mask=live)
    wrong = tl.max((live & (count * word > size)).to(tl.int32), axis=0)
    if wrong > 0:
        tl.atomic_or(bad, 1)


@triton.jit
def _all(chosen, values):
    """The value where ``chosen`` is true, everywhere."""
    return tl.sum(tl.where(chosen, values.to(tl.int64), 0), axis=0) + tl.zeros(values.shape, tl.int64)


@triton.jit
def _change(
    index,
    count,
    whole,
    room,
    begin,
    places,
    values,
    saved,
    tile,
    tiles,
    weights,
    seed,
    second,
    bad,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
):
    """Work on the words ``index`` of the lists of blocks, one in each row. Returns what they add to the digest."""
    stride = tl.load(tile + tiles)
    rows = tl.load(tile + 4 * tiles)
    here = index < count[:, None]
    listed = here & (whole.to(tl.int32)[:, None] == 0)
    place = tl.load((places[:, None] + 2 * index).to(tl.pointer_type(tl.uint16)), mask=listed, other=0).to(tl.int32)
    if STEP == 0:
        earlier = (places[:, None] + 2 * (index - 1)).to(tl.pointer_type(tl.uint16))
        earlier = tl.load(earlier, mask=listed & (index > 0), other=0).to(tl.int32)
        wrong = listed & (((index > 0) & (place <= earlier)) | ((place + 1) * WORD > room[:, None]))
        if tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0) > 0:
            tl.atomic_or(bad, 1)
        here &= wrong.to(tl.int32) == 0
    byte = begin[:, None] + tl.where(listed, place, index) * WORD
    run = tl.zeros(index.shape, tl.int64)
    if rows > 1:
        run = tl.maximum(byte, 0) // stride
        byte -= run * stride
    here &= (byte >= 0) & (byte < tl.load(tile + 5 * tiles)) & (run < rows)
    to = tl.load(tile + 2 * tiles) + run * tl.load(tile + 3 * tiles) + byte
    share = tl.zeros(index.shape, tl.uint64)
    if STEP == 1:
        _store_words(to, _load_words(values[:, None] + WORD * index, here, WORD), here, WORD)
    elif STEP == 2:
        _store_words(to, _load_words(saved[:, None] + WORD * index, here, WORD), here, WORD)
    else:
        now = _load_words(to, here, WORD)
        if STEP == 0:
            _store_words(saved[:, None] + WORD * index, now, here, WORD)
            difference = _load_words(values[:, None] + WORD * index, here, WORD) - now
        else:
            difference = now - _load_words(saved[:, None] + WORD * index, here, WORD)
        where = tl.load(tile + 9 * tiles) + run * tl.load(tile + 10 * tiles) + byte
        key = (tl.load(tile + 7 * tiles) + run * tl.load(tile + 8 * tiles)) * tl.load(tile + 11 * tiles) + (where >> 14)
        column = tl.load(weights + ((where >> 2) & (_COLUMNS - 1)), mask=here, other=0).to(tl.uint32, bitcast=True)
        share = row_weight(key.to(tl.uint64), seed, second) * column.to(tl.uint64)
        share = tl.where(here, share * (difference << (8 * (where & 3)).to(tl.uint64)), 0)
    return share


@triton.jit(do_not_specialize=["tiles", "items", "payload", "kept"])
def apply_kernel(
    table,
    tiles,
    work,
    items,
    counts,
    ends,
    shift,
    runs,
    payload,
    kept,
    weights,
    out,
    bad,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Work on the targets of one tile, at those words of up to ``GROUP`` blocks of its source that changed.

    ``table`` is ``int64[15, tiles]``, see :func:`weightsync.tensors.changes.change_tiles`. ``work`` is ``int32[2, items]``: the
    tile, and the first block in its section. The list of a block ends at unit ``ends[block + 1] + shift[runs[block]]``. Steps are
    those of :func:`weightsync.tensors.change_kernels.apply_changes`; step 0 sets ``bad`` where a list is not in order.

    The first words of the lists are worked on side by side, a block in each row of lanes; the rest of a long list, by all lanes.
    """
    item = tl.program_id(0)
    tile = table + tl.load(work + item)
    row = tl.arange(0, GROUP)
    block = tl.load(work + items + item).to(tl.int64) + row
    first = tl.load(tile)
    end = first + (tl.load(tile + 4 * tiles) - 1) * tl.load(tile + tiles) + tl.load(tile + 5 * tiles)
    live = block * _BLOCK < end
    number = tl.load(tile + 12 * tiles) + block
    count = tl.load(counts + number, mask=live, other=0).to(tl.int32)
    room = tl.minimum(tl.load(tile + 13 * tiles) - block * _BLOCK, _BLOCK).to(tl.int32)
    whole, behind, units = _list_of(count, WORD, room)
    to_list = tl.load(ends + number + 1, mask=live, other=0) + tl.load(shift + tl.load(runs + number, mask=live, other=0)) - units
    places = payload + to_list * 4
    values, saved = places + behind, kept + to_list * 4 + behind
    count = tl.where(whole & (count > 0), room // WORD, count)
    begin = block * _BLOCK - first
    seeds = (weights + _COLUMNS).to(tl.pointer_type(tl.uint64))
    seed, second = tl.load(seeds), tl.load(seeds + 1)
    lane = tl.arange(0, LANES)[None, :] + tl.zeros((GROUP, LANES), tl.int32)
    total = tl.zeros((GROUP, LANES), tl.uint64)
    most = tl.max(count, axis=0)
    side = tl.minimum(most, 4 * LANES)
    start = 0
    while start < side:
        total += _change(
            start + lane, count, whole, room, begin, places, values, saved, tile, tiles, weights, seed, second, bad, STEP, WORD
        )
        start += LANES
    if most > 4 * LANES:
        which = 0
        while which < GROUP:  # not unrolled: that takes twice as long to compile
            chosen = row == which
            left = tl.sum(tl.where(chosen, count, 0), axis=0)
            start = 4 * LANES
            while start < left:
                index = start + row[:, None] * LANES + lane
                total += _change(
                    index, _all(chosen, count), _all(chosen, whole), _all(chosen, room), _all(chosen, begin), _all(chosen, places),
                    _all(chosen, values), _all(chosen, saved), tile, tiles, weights, seed, second, bad, STEP, WORD,
                )  # fmt: skip
                start += GROUP * LANES
            which += 1
    if STEP == 0 or STEP == 3:
        sum_all = tl.sum(tl.sum(total, axis=1), axis=0)
        tl.atomic_add(out + tl.load(tile + 6 * tiles), sum_all.to(tl.int64), sem="relaxed")
