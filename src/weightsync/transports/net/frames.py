"""Frames: how the tiles of a reader are cut (:func:`cut_tiles`) and gathered into pieces that are sent, or packed, in order.

Both ends compute the same frames from the same table of tiles. A publisher streams the tiles of a frame as they are
(:func:`frames_of`), or packs them into a buffer in which each tile begins at an aligned address (:func:`packed_frames`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weightsync.arrays import Int64
from weightsync.errors import ConfigurationError, ProtocolError, StaleSource
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import BYTE_STEPS, CopyTable, cut_runs
from weightsync.transports.net.messages import MAX_GROUPS, MAX_TILES, RegisterTiles

FRAME_BYTES = 16 << 20
"""A frame ends with the tile that fills it; no tile is larger than this, so no frame is twice as large."""
MAX_FRAME_BYTES = 2 * FRAME_BYTES

HEADER_ROOM = 64
"""Bytes of a frame's header in a table of headers."""


def cut_tiles(tiles: CopyTable, limit: int = FRAME_BYTES) -> CopyTable:
    """The same bytes in the same order, as tiles of at most ``limit`` bytes each; ``tiles`` itself if none is larger.

    Raises :class:`~weightsync.errors.ProtocolError` if there would be more than :data:`MAX_TILES`.
    """
    if not np.any(tiles.rows * tiles.row_bytes > limit):
        return tiles
    # Half of the limit: two runs that are a little longer than that do not fit in one tile.
    if float((tiles.rows.astype(np.float64) * tiles.row_bytes / (limit / 2) + 1).sum()) > MAX_TILES:
        raise ProtocolError(f"a copy table of more than {MAX_TILES} tiles of {limit} bytes")
    table = tiles.table
    across = table[:, [2, 4, 9, 11]].T
    strides = np.stack([np.broadcast_to(np.array(BYTE_STEPS)[:, None], across.shape), across], axis=2)
    cut, _ = cut_runs(table[:, [6, 5]], strides, table[:, [1, 3, 8, 10]].T, table[:, [0, 7, 12]], limit)
    return CopyTable.of_table(cut) if tiles.keys is not None else replace(CopyTable.of_table(cut), keys=None)


def wanted_tiles(want: RegisterTiles, layout_digest: str, regions: Sequence[int], largest: int) -> tuple[CopyTable, Int64]:
    """Check a reader's table and decode it.

    Args:
        want: The table, as the reader sent it.
        layout_digest: Layout of the regions.
        regions: Bytes of each region.
        largest: Most bytes of a tile.

    Returns:
        The tiles, and how many of them each group has.

    Raises:
        StaleSource: The table was made for another layout.
        ProtocolError: A tile is outside of its region, or has more than ``largest`` bytes.
    """
    if want.layout_digest != layout_digest:
        raise StaleSource(f"this source has layout {layout_digest}, but the plan was made for {want.layout_digest}")
    if len(want.counts) % 8 or len(want.tiles) % 40 or len(want.tiles) // 40 > MAX_TILES or len(want.counts) // 8 > MAX_GROUPS:
        raise ProtocolError("the table of wanted tiles is too long or cut off")
    counts = np.frombuffer(want.counts, "<i8").astype(np.int64)
    table = np.frombuffer(want.tiles, "<i8").astype(np.int64).reshape(-1, 5)
    if np.any((counts < 0) | (counts > MAX_TILES)) or int(counts.sum()) != len(table):
        raise ProtocolError("the groups of wanted tiles do not add up to the table")
    if np.any((table[:, 0] < 0) | (table[:, 0] >= len(regions))):
        raise ProtocolError("a copy table names a memory region that does not exist")
    nowhere = np.zeros(len(table), np.int64)
    region, source, stride, rows, row_bytes = (np.ascontiguousarray(column) for column in table.T)
    tiles = CopyTable(region.astype(np.int32), source, stride, nowhere, nowhere, rows, row_bytes)
    check_tiles(tiles, regions)
    if np.any(rows * row_bytes > largest):
        raise ProtocolError(f"a wanted tile has more than {largest} bytes")
    return tiles, counts


def frames_of(counts: Int64, sizes: Int64, most: int = FRAME_BYTES) -> Int64:
    """Cut groups of tiles into frames.

    Returns ``int64[frames, 5]`` in order: group, index of the group's first tile, first tile, one past the last, bytes.

    A frame ends with the tile that reaches the next multiple of ``most`` within its group, so it may hold one tile more than that.
    """
    if not len(sizes):
        return np.empty((0, 5), np.int64)
    group = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    group_first = np.cumsum(counts) - counts
    ends = np.cumsum(sizes)
    before = (ends - sizes)[np.minimum(group_first, len(sizes) - 1)]  # bytes ahead of each group; unused for empty ones
    part = (ends - sizes - before[group]) // most
    first = np.concatenate(([0], np.flatnonzero((np.diff(group) != 0) | (np.diff(part) != 0)) + 1))
    last = np.append(first[1:], len(sizes))
    nbytes = ends[last - 1] - (ends - sizes)[first]
    frames: Int64 = np.stack([group[first], group_first[group[first]], first, last, nbytes], axis=1)
    return frames


def packed_frames(counts: Int64, sizes: Int64, buffer_bytes: int, alignment: int, header: bool = False) -> Int64:
    """Cut groups of tiles into frames that fit buffers, with every tile at a multiple of ``alignment`` bytes.

    Args:
        counts: Tiles of each group.
        sizes: Bytes of each tile.
        buffer_bytes: Bytes of a buffer.
        alignment: Of tiles in a buffer.
        header: Whether ``alignment`` bytes at the beginning of each buffer are kept free for a header.

    Returns:
        The frames, as :func:`frames_of` gives them. Their bytes include the gaps, and not the header.

    Raises:
        ConfigurationError: A tile does not fit a buffer.
    """
    padded = _padded(sizes, alignment)
    most = buffer_bytes - header * alignment - int(padded.max(initial=0))
    if most <= 0:
        raise ConfigurationError(f"a tile of {int(sizes.max()):,} bytes does not fit buffers of {buffer_bytes:,}")
    return frames_of(counts, padded, most)


def packed_copies(
    tiles: CopyTable,
    frames: Int64,
    buffers: Sequence[int],
    regions: Sequence[int] | None,
    alignment: int,
    headers: int | None = None,
) -> list[CopyTable]:
    """Return each frame's copies between absolute addresses (region 0 is at 0). Frame ``k`` uses buffer ``k % len(buffers)``.

    Args:
        tiles: The tiles of all frames.
        frames: From :func:`packed_frames`.
        buffers: Address of each buffer.
        regions: Address of each region: from there into the buffers. ``None``: from the buffers to the targets.
        alignment: Of tiles in a buffer.
        headers: Address of a table of headers, one of :data:`HEADER_ROOM` bytes per frame, copied before the tiles.
    """
    sizes = _padded(tiles.rows * tiles.row_bytes, alignment)
    before = np.cumsum(sizes) - sizes
    memory = tiles.target if regions is None else np.asarray([*regions, 0], np.int64)[tiles.region] + tiles.source
    stride = tiles.target_stride if regions is None else tiles.source_stride
    tables = []
    for sequence, (_, _, first, last, _) in enumerate(frames.tolist()):
        part, buffer = slice(first, last), buffers[sequence % len(buffers)]
        inside, outside, across = buffer + before[part] - before[first], memory[part], stride[part]
        rows, row_bytes = tiles.rows[part], tiles.row_bytes[part]
        if headers is not None:
            inside = np.concatenate([[buffer], inside + alignment])
            outside = np.concatenate([[headers + sequence * HEADER_ROOM], outside])
            across, row_bytes = (np.concatenate([[HEADER_ROOM], column]) for column in (across, row_bytes))
            rows = np.concatenate([[1], rows])
        nowhere = np.zeros(len(rows), np.int32)
        if regions is None:
            tables.append(CopyTable(nowhere, inside, row_bytes, outside, across, rows, row_bytes))
        else:
            tables.append(CopyTable(nowhere, outside, across, inside, row_bytes, rows, row_bytes))
    return tables


def _padded(sizes: Int64, alignment: int) -> Int64:
    return sizes + -sizes % alignment
