"""Copies of tiles: memory to memory, gathered into a bucket, scattered out of one. Compiled, without the GIL, abortable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.errors import LayoutError, ProtocolError
from weightsync.tensors.copy_table import Tiles
from weightsync.tensors.digest import columns_address
from weightsync.tensors.kernels import copy_table

__all__ = ["check_keys", "check_tiles", "copy_and_digest", "copy_tiles", "gather_tiles", "scatter_and_digest", "scatter_tiles"]

Stop = npt.NDArray[np.int8]
UInt64 = npt.NDArray[np.uint64]

_NEVER = np.zeros(1, np.int8)


def _bases(source_addresses: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(source_addresses, np.int64)


def copy_tiles(tiles: Tiles, source_addresses: Sequence[int], stop: Stop | None = None) -> int:
    """Copy every tile from ``source_addresses[region] + source`` to its target; return the bytes copied.

    Another thread that sets ``stop[0]`` makes this return early, after at most about half a MiB more: the caller sees that less
    than ``tiles.nbytes`` were copied. The caller has checked that tiles and memory fit (:func:`check_tiles`). An ``int64``
    array as ``source_addresses`` is used without a copy.
    """
    bases = _bases(source_addresses)
    flag = _NEVER if stop is None else stop
    return int(copy_table(tiles.table_address, 0, len(tiles), bases.ctypes.data, 0, 0, 0, 0, flag.ctypes.data))


def gather_tiles(
    tiles: Tiles, source_addresses: Sequence[int], bucket_address: int, first: int, last: int, stop: Stop | None = None
) -> int:
    """Pack the runs of tiles ``first <= i < last`` into one bucket, in order and without gaps; return the bytes packed.

    The caller has checked the source (:func:`check_tiles`) and that the bucket holds the tiles' bytes. Targets are not looked at.
    """
    bases = _bases(source_addresses)
    flag = _NEVER if stop is None else stop
    first, last = _range(tiles, first, last)
    return int(copy_table(tiles.table_address, first, last, bases.ctypes.data, 0, bucket_address, 0, 0, flag.ctypes.data))


def scatter_tiles(tiles: Tiles, bucket_address: int, first: int, last: int, stop: Stop | None = None) -> int:
    """Unpack a bucket that :func:`gather_tiles` packed to the targets of tiles ``first <= i < last``; return the bytes unpacked.

    The caller has checked that the bucket holds that many bytes. Sources are not looked at.
    """
    flag = _NEVER if stop is None else stop
    first, last = _range(tiles, first, last)
    return int(copy_table(tiles.table_address, first, last, 0, bucket_address, 0, 0, 0, flag.ctypes.data))


def copy_and_digest(tiles: Tiles, source_addresses: Sequence[int], out: UInt64, stop: Stop | None = None) -> int:
    """:func:`copy_tiles`, and each tile's digest, read back from its target, added to ``out[row]`` of the target layout.

    ``out`` is ``uint64[rows of the layout]``, zero before the first tile of a row. As digests add up and tiles fill each row
    exactly once, ``out`` then equals what :func:`~weightsync.tensors.digest.digest_rows` reads from the same rows. The digest
    follows the copy by a few cache lines, so both together take no longer than a plain copy (docs/benchmarks/cpu-copies.md).

    Raises :class:`~weightsync.errors.LayoutError` for tiles without keys or with rows that ``out`` does not have.
    """
    bases = _bases(source_addresses)
    flag = _NEVER if stop is None else stop
    check_keys(tiles, out)
    return int(
        copy_table(tiles.table_address, 0, len(tiles), bases.ctypes.data, 0, 0, out.ctypes.data, columns_address, flag.ctypes.data)
    )


def scatter_and_digest(tiles: Tiles, bucket_address: int, first: int, last: int, out: UInt64, stop: Stop | None = None) -> int:
    """:func:`scatter_tiles`, with digests as :func:`copy_and_digest` takes them."""
    flag = _NEVER if stop is None else stop
    check_keys(tiles, out)
    first, last = _range(tiles, first, last)
    return int(
        copy_table(tiles.table_address, first, last, 0, bucket_address, 0, out.ctypes.data, columns_address, flag.ctypes.data)
    )


def check_keys(tiles: Tiles, out: UInt64) -> None:
    """Raise :class:`~weightsync.errors.LayoutError` unless digests of ``tiles`` can be added to ``out``."""
    if out.dtype != np.uint64 or out.ndim != 1 or not (out.flags.c_contiguous and out.flags.writeable):
        raise LayoutError(f"digests go to a contiguous uint64 array, not to {out.dtype}{list(out.shape)}")
    if tiles.rows_named > len(out) or tiles.rows_named < 0:
        raise LayoutError(f"tiles without keys, or of rows that {len(out)} digests do not have")


def _range(tiles: Tiles, first: int, last: int) -> tuple[int, int]:
    if not 0 <= first <= last <= len(tiles):
        raise ProtocolError(f"tiles {first}:{last} of a table of {len(tiles)}")
    return first, last


def check_tiles(tiles: Tiles, region_sizes: Sequence[int]) -> None:
    """Raise :class:`~weightsync.errors.ProtocolError` if any tile leaves its source region of ``region_sizes[region]`` bytes.

    Safe for a forged table: negative or huge numbers do not wrap around. Targets are the reader's own business.
    """
    if not len(tiles):
        return
    if len({len(tiles), *(len(column) for column in (tiles.region, tiles.target, tiles.rows, tiles.row_bytes))}) != 1:
        raise ProtocolError("the columns of a copy table differ in length")
    if tiles.region.min() < 0 or tiles.region.max() >= len(region_sizes):
        raise ProtocolError("a copy table names a memory region that does not exist")
    negative = min(int(column.min()) for column in (tiles.source, tiles.source_stride)) < 0
    if negative or min(int(column.min()) for column in (tiles.rows, tiles.row_bytes)) < 1:
        raise ProtocolError("a copy table holds a negative offset or stride, or an empty run")
    sizes = np.asarray(region_sizes, np.int64)[tiles.region]
    # In floating point first, which cannot wrap; what passes is small enough for the exact arithmetic.
    steps = (tiles.rows - 1).astype(np.float64)
    rough = tiles.source.astype(np.float64) + steps * tiles.source_stride + tiles.row_bytes
    moved = tiles.rows.astype(np.float64) * tiles.row_bytes
    exact = tiles.source + (tiles.rows - 1) * tiles.source_stride + tiles.row_bytes
    if np.any(rough > 2.0**62) or float(moved.sum()) > 2.0**62 or np.any(exact > sizes):
        raise ProtocolError("a copy table reaches outside its memory region")
