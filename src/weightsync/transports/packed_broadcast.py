"""Many tensors of GPU memory to the same number of readers at NCCL's speed: packed into few buffers, broadcast, unpacked in place.

Pieces in GPU memory, contiguous and in the same order at all ranks, are laid into buckets at multiples of 512 bytes. Bucket ``k``
uses buffer ``k % num_buffers`` and that buffer's stream: the sender packs it there in one launch and broadcasts it, a reader
receives it and unpacks it to where its bytes belong in one launch. Streams alone keep the order, so packing ``k + 1`` and unpacking
``k - 1`` run beside the broadcast of ``k``, and the host is always ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.tensors.tiles import Tiles
from weightsync.transports.groups import Enqueue, Group
from weightsync.transports.packing import BufferSettings

__all__ = ["DEFAULT_BUFFER", "PROGRAMS", "Buckets", "PackedBroadcast"]

Int64 = npt.NDArray[np.int64]

DEFAULT_BUFFER = 1 << 30
"""NCCL gets faster with the size of a broadcast up to about this."""

PROGRAMS = 64
"""Of a copy that runs beside a broadcast: enough to be faster than the link, and few enough to leave NCCL its processors."""

_ALIGNMENT = 512


@dataclass(frozen=True, eq=False)
class Buckets:
    """Where parts of pieces lie, one row a part, in order: ``piece``, ``first`` byte of it, ``nbytes``, ``offset`` in the bucket.

    Bucket ``k`` is rows ``edges[k]`` to ``edges[k + 1]``, and ``sizes[k]`` bytes long.
    """

    piece: Int64
    first: Int64
    nbytes: Int64
    offset: Int64
    edges: Int64
    sizes: Int64

    @classmethod
    def of(cls, sizes: Sequence[int], buffer_bytes: int) -> Buckets:
        """Pieces of so many bytes in buckets of at most ``buffer_bytes``; a piece that is larger than a bucket is cut.

        Raises :class:`~weightsync.errors.ConfigurationError` for a size or buffer that cannot be.
        """
        whole = np.asarray(sizes, np.int64)
        room = buffer_bytes & -_ALIGNMENT
        if room <= 0 or (len(whole) and whole.min() < 0):
            raise ConfigurationError(f"pieces of a negative size, or buffers of {buffer_bytes} bytes")
        parts = -(-whole // room)
        piece = np.repeat(np.arange(len(whole), dtype=np.int64), parts)
        nth = np.arange(len(piece), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
        first = nth * room
        nbytes = np.minimum(whole[piece] - first, room)
        taken = np.cumsum(nbytes + -nbytes % _ALIGNMENT)
        edges, before = [0], 0
        while edges[-1] < len(piece):  # once a bucket
            edges.append(int(np.searchsorted(taken, before + room, side="right")))
            before = int(taken[edges[-1] - 1])
        starts = np.array([0, *taken[:-1]], np.int64)[: len(taken)]
        bases = np.repeat(starts[edges[:-1]], np.diff(edges)) if len(piece) else starts
        offset = starts - bases
        lasts = np.array(edges[1:], np.int64) - 1
        return cls(piece, first, nbytes, offset, np.array(edges, np.int64), (offset + nbytes)[lasts] if len(piece) else lasts)


class PackedBroadcast:
    """One end of it, for the pieces at ``addresses`` on ``device``, which must stay there. Rank 0 of ``group`` (NCCL) sends.

    Buffers, streams and tables are made once, here. Used by one thread at a time.
    """

    def __init__(
        self,
        group: Group,
        addresses: Sequence[int],
        sizes: Sequence[int],
        device: torch.device,
        settings: BufferSettings | None = None,
        programs: int = PROGRAMS,
    ) -> None:
        if group.backend != "nccl":
            raise ConfigurationError("a packed broadcast of GPU memory needs a group of backend 'nccl'")
        self._group, self._device = group, device
        settings = settings or BufferSettings()
        each = settings.bytes_each(torch.cuda.mem_get_info(device)[0], DEFAULT_BUFFER)
        self._buckets = buckets = Buckets.of(sizes, each)
        count = min(settings.num_buffers, max(len(buckets.sizes), 1))
        self._buffers = [torch.empty(each, dtype=torch.uint8, device=device) for _ in range(count)]
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        self.nbytes = int(buckets.nbytes.sum())
        """Bytes that are moved."""
        self.buffer_bytes = each * count
        """Device memory that the buffers take."""
        bases = np.asarray(addresses, np.int64)
        groups = [[self._tiles(bucket, bases)] for bucket in range(len(buckets.sizes))]
        with torch.cuda.device(device):
            self._copy = TileCopy(groups, device, programs=programs)

    def _tiles(self, bucket: int, bases: Int64) -> tuple[Tiles, tuple[int, ...]]:
        """One bucket's copies, as absolute addresses."""
        buckets = self._buckets
        rows = slice(int(buckets.edges[bucket]), int(buckets.edges[bucket + 1]))
        memory = bases[buckets.piece[rows]] + buckets.first[rows]
        packed = self._buffers[bucket % len(self._buffers)].data_ptr() + buckets.offset[rows]
        source, target = (memory, packed) if self._group.rank == 0 else (packed, memory)
        nbytes, nothing = buckets.nbytes[rows], np.zeros(len(memory), np.int64)
        return Tiles(nothing.astype(np.int32), source, nbytes, target, nbytes, nothing + 1, nbytes), (0,)

    def run(self, deadline: Deadline) -> None:
        """Send, or receive, everything; returns when it is in place here. Raises as :meth:`Group.broadcast` does."""
        self._group.on_device(self._device, self._enqueue, deadline)

    def _enqueue(self, broadcast: Enqueue) -> None:
        sends = self._group.rank == 0
        begun = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(begun)
        for bucket, nbytes in enumerate(self._buckets.sizes.tolist()):
            turn = bucket % len(self._buffers)
            with torch.cuda.stream(self._streams[turn]):
                if sends:
                    self._copy.launch(bucket, bucket + 1)
                broadcast(self._buffers[turn][:nbytes])
                if not sends:
                    self._copy.launch(bucket, bucket + 1)
        for stream in self._streams:
            stream.synchronize()
