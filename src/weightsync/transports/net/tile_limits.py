"""Tiles as a carrying transport needs them: cut so that they fit in frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weightsync.errors import ProtocolError
from weightsync.planning.geometry import spread
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.net.messages import MAX_TILES

__all__ = ["FRAME_BYTES", "MAX_FRAME_BYTES", "cut_tiles"]

FRAME_BYTES = 16 << 20
"""A frame ends with the tile that fills it; no tile is larger than this, so no frame is twice as large."""
MAX_FRAME_BYTES = 2 * FRAME_BYTES

Int64 = npt.NDArray[np.int64]

_LEAD = 8
_STEPS = ((1, 2), (3, 4), (_LEAD, 9), (10, 11))
"""Columns of a tile table in which a run begins, each with its step from run to run: source, target, and the digest's position."""


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
    # Runs that are too wide: one tile for each piece of each run.
    parts = np.where(table[:, 6] > limit, table[:, 5] * -(-table[:, 6] // limit), 1)
    piece, nth = spread(parts)
    table = table[piece]  # a copy
    wide = table[:, 6] > limit
    per_run = -(-table[:, 6] // limit)
    run, column = nth // per_run, nth % per_run * limit
    for start, stride in _STEPS:
        along = 0 if start == _LEAD else column
        table[:, start] += np.where(wide, run * table[:, stride] + along, 0)
    table[:, 5] = np.where(wide, 1, table[:, 5])
    table[:, 6] = np.where(wide, np.minimum(table[:, 6] - column, limit), table[:, 6])
    # Tiles of too many runs: as many runs as fit.
    fit = limit // table[:, 6]
    piece, nth = spread(-(-table[:, 5] // fit))
    table, first = table[piece], nth * fit[piece]
    for start, stride in _STEPS:
        table[:, start] += first * table[:, stride]
    table[:, 5] = np.minimum(table[:, 5] - first, fit[piece])
    cut = CopyTable.of_table(table)
    return cut if tiles.keys is not None else replace(cut, keys=None)
