"""Frames: tiles that are cut too finely to be read one by one, packed by the publisher and unpacked by the reader.

Both ends compute the same frames from the same tiles. A frame's tiles begin at multiples of 64 bytes in its staging buffer. Frame
``k`` lies in buffer ``k % 2``, so the publisher packs the next while the reader pulls one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightsync.arrays import Bools, Int64
from weightsync.deadline import Deadline
from weightsync.errors import TransportUnavailable
from weightsync.protocol.messages import Memory
from weightsync.tensors.copies import copy_tiles
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.net.frames import packed_copies, packed_frames

BUFFERS = 2
TILE_BYTES = 4 << 20
"""Most bytes of a tile in a frame."""
BUFFER_BYTES: dict[Memory, int] = {"host": 16 << 20, "cuda": 256 << 20}
"""Bytes of a staging buffer, where nothing else is asked for."""
MOST_BUFFER_BYTES = 512 << 20
"""Most bytes of a staging buffer. A reader allocates what its publisher asks for, up to this."""
_ALIGNMENT = 64

Copies = Callable[[int, Deadline], object]
"""Copies the frame of this number; returns when the bytes are there."""


@dataclass(frozen=True)
class Frames:
    """The frames of a table of tiles: ``table`` is what :func:`~weightsync.transports.net.frames.packed_frames` returns."""

    tiles: CopyTable
    table: Int64

    @classmethod
    def of(cls, tiles: CopyTable, counts: Int64, buffer_bytes: int) -> Frames:
        """Cut ``tiles``, of which each group has ``counts``, into frames that fit buffers of ``buffer_bytes``."""
        return cls(tiles, packed_frames(counts, tiles.rows * tiles.row_bytes, buffer_bytes, _ALIGNMENT))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def largest(self) -> int:
        """Bytes of the largest frame."""
        return int(self.table[:, 4].max(initial=0))

    def copies(self, buffers: tuple[int, ...], regions: tuple[int, ...] | None) -> list[CopyTable]:
        """Return each frame's copies: see :func:`~weightsync.transports.net.frames.packed_copies`."""
        return packed_copies(self.tiles, self.table, buffers, regions, _ALIGNMENT)


def _merged_runs(tiles: CopyTable) -> tuple[Bools, Bools, Int64]:
    """Return which tiles are contiguous at both ends, which of them continue the tile before, and the bytes of each tile's run.

    Contiguous tiles that follow each other without a gap at both ends are one run.
    """
    size = tiles.rows * tiles.row_bytes
    whole = (tiles.rows == 1) | ((tiles.source_stride == tiles.row_bytes) & (tiles.target_stride == tiles.row_bytes))
    follows = np.zeros(len(tiles), np.bool_)
    follows[1:] = (
        whole[1:]
        & whole[:-1]
        & (tiles.region[1:] == tiles.region[:-1])
        & (tiles.source[1:] == tiles.source[:-1] + size[:-1])
        & (tiles.target[1:] == tiles.target[:-1] + size[:-1])
    )
    run = np.cumsum(~follows) - 1
    length = np.zeros(int(run[-1]) + 1 if len(run) else 0, np.int64)
    np.add.at(length, run, size)
    return whole, follows, np.where(whole, length[run], tiles.row_bytes)


def split(tiles: CopyTable, least: int) -> tuple[Int64, CopyTable]:
    """Divide a group into what is read directly and what goes in frames.

    Args:
        tiles: The group.
        least: Bytes of the shortest run that is read directly.

    Returns:
        ``int64[pieces, 4]`` (region, offset in it, target address, bytes) and the tiles for frames.
    """
    whole, follows, longest = _merged_runs(tiles)
    direct = longest >= least
    if not direct.any():
        return np.empty((0, 4), np.int64), tiles
    starts = np.flatnonzero(direct & whole & ~follows)
    joined = np.stack([tiles.region[starts], tiles.source[starts], tiles.target[starts], longest[starts]], axis=1)
    strided = np.flatnonzero(direct & ~whole)
    rows = tiles.rows[strided]
    tile = np.repeat(strided, rows)
    row = np.arange(len(tile), dtype=np.int64) - np.repeat(np.cumsum(rows) - rows, rows)
    cut = np.stack(
        [
            tiles.region[tile],
            tiles.source[tile] + row * tiles.source_stride[tile],
            tiles.target[tile] + row * tiles.target_stride[tile],
            tiles.row_bytes[tile],
        ],
        axis=1,
    )
    pieces: Int64 = np.concatenate([joined, cut]).astype(np.int64)
    return pieces, CopyTable.of_table(np.ascontiguousarray(tiles.table[~direct]))


def copies(tables: list[CopyTable], memory: Memory, device: int) -> Copies:
    """Return what runs ``tables``, whose addresses are of ``memory``."""
    if memory == "host":
        return lambda frame, deadline: copy_tiles(tables[frame], (0,))
    import torch

    from weightsync.tensors.cuda.copies import TileCopy
    from weightsync.tensors.cuda.waiting import wait_for_device

    where = torch.device("cuda", device)
    copy = TileCopy([[(table, (0,))] for table in tables], where)

    def run(frame: int, deadline: Deadline) -> None:
        with torch.cuda.device(where):
            copy.launch(frame, frame + 1)
            wait_for_device(where, deadline, f"packing on CUDA device {device}")

    return run


class StagingBuffers:
    """Staging buffers, 64-byte aligned. The memory lives as long as this object.

    Args:
        nbytes: Bytes of each buffer.
        memory: Where they are.
        device: CUDA device, for memory of a GPU.

    Raises:
        TransportUnavailable: There is no room.
    """

    def __init__(self, nbytes: int, memory: Memory, device: int) -> None:
        import torch

        self.nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        where = torch.device("cpu") if memory == "host" else torch.device("cuda", device)
        try:
            self._tensor = torch.empty(BUFFERS * self.nbytes + _ALIGNMENT, dtype=torch.uint8, device=where)
        except RuntimeError as error:
            raise TransportUnavailable(f"no room for {BUFFERS} staging buffers of {self.nbytes:,} bytes on {where}") from error
        start = -(-self._tensor.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.addresses = tuple(start + number * self.nbytes for number in range(BUFFERS))

    @property
    def span(self) -> Int64:
        """Address and bytes of all of it, ``int64[1, 2]``."""
        return np.array([[self._tensor.data_ptr(), self._tensor.numel()]], np.int64)
