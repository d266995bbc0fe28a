"""Copies of tiles: from memory to memory, gathered into a bucket, or scattered from one. Compiled, abortable, without the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from weightsync.arrays import Int8, Int64, UInt64
from weightsync.errors import LayoutError, ProtocolError
from weightsync.model import Layout, Manifest
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.digest import columns_address, digest_rows
from weightsync.tensors.kernels import copy_table

_NEVER = np.zeros(1, np.int8)
CORES_EACH, _MOST_THREADS = 2, 8  # a host has an engine and a trainer rank for each GPU, and they compute too
_LEAST_BYTES = 2 << 20  # for which a thread is worth waking
T = TypeVar("T")


def _run(
    tiles: CopyTable,
    first: int,
    last: int,
    *,
    sources: Sequence[int] | Int64 = (),
    scattered: int = 0,
    packed: int = 0,
    out: UInt64 | None = None,
    stop: Int8 | None,
) -> int:
    """Copy tiles ``first <= i < last`` from ``sources`` or the bucket ``scattered`` to their targets or the bucket ``packed``."""
    if not 0 <= first <= last <= len(tiles):
        raise ProtocolError(f"tiles {first}:{last} of a table of {len(tiles)}")
    digests, columns = 0, 0
    if out is not None:
        check_keys(tiles, out)
        digests, columns = out.ctypes.data, columns_address
    bases, flag = np.asarray(sources, np.int64).ctypes, (_NEVER if stop is None else stop).ctypes
    return int(copy_table(tiles.table_address, first, last, bases.data, scattered, packed, digests, columns, flag.data))


def copy_tiles(tiles: CopyTable, source_addresses: Sequence[int], stop: Int8 | None = None) -> int:
    """Copy every tile from ``source_addresses[region] + source`` to its target.

    The caller has checked that the tiles fit the memory (:func:`check_tiles`).

    Args:
        tiles: The copy table.
        source_addresses: Address of each source region. An ``int64`` array is used without a copy.
        stop: Another thread sets ``stop[0]`` to abort the copy, which then ends after at most about 0.5 MiB more.

    Returns:
        Bytes copied. Less than ``tiles.nbytes`` if the copy was aborted.
    """
    return _run(tiles, 0, len(tiles), sources=source_addresses, stop=stop)


def gather_tiles(
    tiles: CopyTable, source_addresses: Sequence[int], bucket_address: int, first: int, last: int, stop: Int8 | None = None
) -> int:
    """Pack the runs of tiles ``first <= i < last`` into one bucket, in order and without gaps. Targets are ignored.

    The caller has checked the source (:func:`check_tiles`), and that the bucket is large enough.

    Returns:
        Bytes packed.
    """
    return _run(tiles, first, last, sources=source_addresses, packed=bucket_address, stop=stop)


def scatter_tiles(tiles: CopyTable, bucket_address: int, first: int, last: int, stop: Int8 | None = None) -> int:
    """Unpack a bucket of :func:`gather_tiles` to the targets of tiles ``first <= i < last``. Sources are ignored.

    The caller has checked that the bucket holds that many bytes.

    Returns:
        Bytes unpacked.
    """
    return _run(tiles, first, last, scattered=bucket_address, stop=stop)


def copy_and_digest(tiles: CopyTable, source_addresses: Sequence[int], out: UInt64 | None, stop: Int8 | None = None) -> int:
    """Copy as :func:`copy_tiles` does, and add the digest of each tile, read back from its target, to ``out[row]``.

    As digests are additive and tiles fill each row exactly once, ``out`` then equals the result of
    :func:`~weightsync.tensors.digest.digest_rows` for the same rows. The digest follows the copy by a few cache lines, so that both
    together take no longer than a plain copy (docs/benchmarks/cpu-copies.md). Where there are four cores or more, two to eight
    threads share the work: one core does not reach the memory's speed.

    Args:
        tiles: The copy table, with keys.
        source_addresses: Address of each source region.
        out: ``uint64[rows of the target layout]``, zero before the first tile of a row. ``None``: only copy.
        stop: See :func:`copy_tiles`.

    Raises:
        LayoutError: The tiles have no keys, or name rows that ``out`` does not have.
    """
    if out is None:
        return copy_tiles(tiles, source_addresses, stop)
    _ = tiles.table_address  # made here, and not by several threads
    copy = partial(_run, tiles, sources=np.asarray(source_addresses, np.int64), stop=stop)
    return sum(in_threads(lambda first, last, part: copy(first, last, out=part), tiles.rows * tiles.row_bytes, out))


def digest_memory(manifest: Manifest, layout: Layout, addresses: Sequence[int]) -> UInt64:
    """Digest all rows as :func:`~weightsync.tensors.digest.digest_rows` does, in threads as :func:`copy_and_digest`."""
    out = np.zeros(len(layout), np.uint64)
    digest = partial(digest_rows, manifest, layout, addresses)
    digest(0, 0, out)  # makes the table
    nbytes = (layout.stops - layout.starts).prod(axis=1) * manifest.itemsizes[layout.tensor]
    in_threads(digest, nbytes, out)
    return out


def in_threads(work: Callable[[int, int, UInt64], T], nbytes: Int64, out: UInt64, cores_each: int = CORES_EACH) -> list[T]:
    """Let threads do ``work`` in ranges of about equal bytes, each into an array that is added to ``out``; its results.

    There is a thread for every ``cores_each`` cores, at most eight.
    """
    edges = _shares(nbytes, cores_each)
    parts = [np.zeros_like(out) for _ in edges[2:]]
    others = list[Future[T]]()
    try:
        for ends, part in zip(pairwise(edges[1:]), parts, strict=True):
            others.append(_threads().submit(work, *ends, part))
        done = work(edges[0], edges[1], out)
    finally:
        _outlast(others)
    for part in parts:
        out += part
    return [done, *(other.result() for other in others)]


def _outlast(others: Sequence[Future[Any]]) -> None:
    """Wait until all have ended, whatever interrupts this: they write."""
    interrupted: BaseException | None = None
    while not all(other.done() for other in others):
        try:
            wait(others)
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _shares(nbytes: Int64, cores_each: int = CORES_EACH) -> list[int]:
    """Cut items of ``nbytes`` into as many ranges of about equal bytes as threads work on them; the edges of the ranges."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ends = np.cumsum(nbytes)
    total = int(ends[-1]) if len(ends) else 0
    threads = min(cores // cores_each, _MOST_THREADS, total // _LEAST_BYTES)
    if threads < 2:
        return [0, len(ends)]
    cuts = np.searchsorted(ends, total * np.arange(1, threads) // threads)
    return [0, *cuts.tolist(), len(ends)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="weightsync-copy")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # they stay behind


def scatter_and_digest(
    tiles: CopyTable, bucket_address: int, first: int, last: int, out: UInt64 | None, stop: Int8 | None = None
) -> int:
    """Scatter as :func:`scatter_tiles` does, with digests as in :func:`copy_and_digest`."""
    return _run(tiles, first, last, scattered=bucket_address, out=out, stop=stop)


def check_keys(tiles: CopyTable, out: UInt64) -> None:
    """Raise :class:`~weightsync.errors.LayoutError` unless digests of ``tiles`` can be added to ``out``."""
    if out.dtype != np.uint64 or out.ndim != 1 or not (out.flags.c_contiguous and out.flags.writeable):
        raise LayoutError(f"digests need a contiguous uint64 array, not {out.dtype}{list(out.shape)}")
    if tiles.rows_named > len(out) or tiles.rows_named < 0:
        raise LayoutError(f"tiles have no keys, or name rows beyond the {len(out)} digests")


def check_tiles(tiles: CopyTable, region_sizes: Sequence[int]) -> None:
    """Raise :class:`~weightsync.errors.ProtocolError` if a tile leaves its source region of ``region_sizes[region]`` bytes.

    Safe for a forged table: negative or huge numbers do not wrap around. The reader checks the targets.
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
    # Floating point first, because it cannot wrap; what passes is small enough for exact arithmetic.
    steps = (tiles.rows - 1).astype(np.float64)
    rough = tiles.source.astype(np.float64) + steps * tiles.source_stride + tiles.row_bytes
    moved = tiles.rows.astype(np.float64) * tiles.row_bytes
    exact = tiles.source + (tiles.rows - 1) * tiles.source_stride + tiles.row_bytes
    if np.any(rough > 2.0**62) or float(moved.sum()) > 2.0**62 or np.any(exact > sizes):
        raise ProtocolError("a copy table reaches outside its memory region")
