r"""Digest of boxes: 64 bits, additive over disjoint boxes, keyed by global position, equal on every device.

A tensor of global shape ``(..., L)`` is treated as a matrix. Row ``r`` is the index over all leading dimensions, flattened in C
order. It holds the last dimension as ``L * itemsize`` bytes, cut into 4-byte words ``w`` and blocks of ``B = 4096`` words
(``blocks`` for each row). The value of a word is its bytes that lie in the box, little-endian, with zeros elsewhere.

.. math:: digest(box) = \sum_{r, w} R(r \cdot blocks + \lfloor w / B \rfloor) \cdot C[w \bmod B] \cdot word(r, w) \mod 2^{64}

with ``R(k) = splitmix64(k) | 1`` and ``C[j] = (splitmix64(2**63 + j) & 0xFFFFFFFF) | 1`` (all distinct). Scalars and vectors are
one row. An error in a single element always changes the sum, because ``R`` and ``C`` are odd. The sum is linear in the words, so
boxes may cut words and still add up.

Anyone can compute other bytes with the same digest, because these constants are public. A *keyed* digest has the same form, with
constants from a secret key (:class:`DigestConstants`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from weightsync.arrays import Int8, Int64, UInt32, UInt64
from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides
from weightsync.planning.geometry import mix64
from weightsync.tensors.kernels import BLOCK, LEAD, digest_table

_NEVER = np.zeros(1, np.int8)


_GOLDEN = (0x9E3779B97F4A7C15, 0)  # the seeds of R that make it splitmix64


class DigestConstants:
    """The constants of a digest: public ones without a ``key``, otherwise constants that only holders of the key can compute.

    A key has at least 128 random bits. SHAKE-256 expands it to the C table and to the two seeds of R.

    Attributes:
        words: ``uint32[4100]``: the C table, then the two seeds of R (uint64, little-endian). Kernels read it, or a copy of it.
    """

    def __init__(self, key: bytes = b"") -> None:
        if key:
            words = np.frombuffer(hashlib.shake_256(b"weightsync digest\0" + key).digest(4 * BLOCK + 16), "<u4").astype(np.uint32)
            words[:BLOCK] |= np.uint32(1)
        else:
            mixed = mix64(np.arange(BLOCK, dtype=np.uint64) + np.uint64(1 << 63) + np.uint64(_GOLDEN[0])) | np.uint64(1)
            words = np.concatenate([mixed.astype(np.uint32), np.array(_GOLDEN, np.uint64).view(np.uint32)])
        words.flags.writeable = False
        self.words: UInt32 = words
        self.address: int = words.ctypes.data


PUBLIC = DigestConstants()
"""The constants of :mod:`the digest <weightsync.tensors.digest>` that publications and labels use."""

COLUMNS = PUBLIC.words[:BLOCK]
"""The public C table, ``uint32[4096]``."""

columns_address: int = PUBLIC.address
"""Address of the public constants."""


def positions(shapes: Int64, itemsizes: Int64) -> tuple[Int64, Int64, Int64]:
    """Numbering of elements in the digest, for tensors of ``shapes`` (``int64[n, dims]``).

    Returns:
        For each dimension, the distance of neighbors in the flattened leading index, and in bytes of the last dimension (``int64[n,
        dims]`` each); and the blocks of a tensor row, ``int64[n]``.
    """
    index = np.zeros_like(shapes)
    index[:, :-1] = packed_strides(shapes[:, :-1], np.ones(len(shapes), np.int64))
    byte = np.zeros_like(shapes)
    byte[:, -1] = itemsizes
    return index, byte, -(-shapes[:, -1] * itemsizes // (4 * BLOCK))


def row_table(addresses: Int64, starts: Int64, stops: Int64, strides: Int64, shapes: Int64, itemsizes: Int64) -> Int64:
    """Build the table that :func:`~weightsync.tensors.kernels.digest_table` reads.

    Args:
        addresses: Address of each box's first element, ``int64[rows]``.
        starts: First index of each box, ``int64[rows, dims]``, padded in front like all that follow.
        stops: End index of each box.
        strides: Bytes between neighbors in memory.
        shapes: Global shapes.
        itemsizes: Bytes of an element, ``int64[rows]``.
    """
    rows, dims = starts.shape
    table = np.zeros((rows, LEAD + 3 * (dims - 1)), np.int64)
    extents = stops - starts
    steps, bytes_each, blocks = positions(shapes, itemsizes)
    table[:, 0] = addresses
    table[:, 1] = (starts * steps).sum(axis=1)
    table[:, 2] = blocks
    table[:, 3] = (starts * bytes_each).sum(axis=1)
    table[:, 4] = extents[:, -1]
    table[:, 5] = strides[:, -1]
    table[:, 6] = itemsizes
    for dim in range(dims - 1):
        table[:, LEAD + 3 * dim] = extents[:, dim]
        table[:, LEAD + 3 * dim + 1] = strides[:, dim]
        table[:, LEAD + 3 * dim + 2] = steps[:, dim]
    return table


def layout_table(manifest: Manifest, layout: Layout, addresses: Sequence[int]) -> Int64:
    """Build :func:`row_table` for all rows of ``layout``, whose regions lie at ``addresses``."""
    if len(addresses) != len(layout.regions):
        raise LayoutError(f"{len(layout.regions)} memory regions, but {len(addresses)} addresses")
    firsts = np.array([*addresses, 0], np.int64)[layout.region] + layout.offset
    tensor = layout.tensor
    return row_table(firsts, layout.starts, layout.stops, layout.strides, manifest.shapes[tensor], manifest.itemsizes[tensor])


# One cached table for each layout, because callers digest its rows group by group: (manifest, addresses, table).
_tables: weakref.WeakKeyDictionary[Layout, tuple[Manifest, Sequence[int], Int64, int]] = weakref.WeakKeyDictionary()


def digest_rows(
    manifest: Manifest,
    layout: Layout,
    addresses: Sequence[int],
    first: int,
    last: int,
    out: UInt64,
    constants: DigestConstants = PUBLIC,
    stop: Int8 = _NEVER,
) -> None:
    """Digest rows ``first <= i < last`` of ``layout`` in memory, without the GIL.

    Args:
        manifest: The tensors.
        layout: The layout.
        addresses: Base address of each region, which must hold what the layout describes.
        first: First row.
        last: End of the rows.
        out: ``uint64[rows of the layout]``; the digests are written to ``out[first:last]``.
        constants: Constants of the digest.
        stop: Another thread sets ``stop[0]`` to end the work early. What is in ``out`` is then incomplete.

    Raises:
        LayoutError: A row does not exist, or ``out`` has the wrong shape or dtype.
    """
    if not 0 <= first <= last <= len(layout) or out.shape != (len(layout),) or out.dtype != np.uint64 or not out.flags.c_contiguous:
        raise LayoutError(f"cannot digest rows {first}:{last} of a layout of {len(layout)} rows into {out.dtype}{list(out.shape)}")
    known = _tables.get(layout)
    if known is None or known[0] is not manifest or not (known[1] is addresses or tuple(known[1]) == tuple(addresses)):
        table = layout_table(manifest, layout, addresses)
        known = (manifest, tuple(addresses), table, table.ctypes.data)
        _tables[layout] = known
    dims, target = layout.starts.shape[1], out.ctypes.data + 8 * first
    digest_table(known[3], dims, first, last, 0, target, constants.address, stop.ctypes.data)


def digest_box(tensor: torch.Tensor, shape: Sequence[int], starts: Sequence[int]) -> int:
    """Digest the box that ``tensor`` (on a CPU, any strides) holds, which starts at ``starts`` in a tensor of ``shape``."""
    if tensor.device.type != "cpu" or not tensor.dim() == len(shape) == len(starts):
        raise LayoutError(
            f"cannot digest a {tensor.device.type} tensor of shape {list(tensor.shape)} at {list(starts)} of {list(shape)}"
        )
    whole, first, extents = tuple(shape) or (1,), tuple(starts) or (0,), tuple(tensor.shape) or (1,)
    if any(not 0 <= a <= a + n <= extent for a, n, extent in zip(first, extents, whole, strict=True)):
        raise LayoutError(f"a box of {list(extents)} at {list(first)} is outside {list(whole)}")
    if tensor.numel() == 0:
        return 0
    size, begin = np.array([tensor.element_size()], np.int64), np.array([first], np.int64)
    strides = np.array([tensor.stride() or (1,)], np.int64) * size
    end = begin + np.array([extents], np.int64)
    table = row_table(np.array([tensor.data_ptr()], np.int64), begin, end, strides, np.array([whole], np.int64), size)
    out = np.zeros(1, np.uint64)
    digest_table(table.ctypes.data, strides.shape[1], 0, 1, 0, out.ctypes.data, columns_address, _NEVER.ctypes.data)
    return int(out[0])
