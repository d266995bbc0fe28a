"""How opaque bytes cross from a trainer rank's shelf to an engine rank's memory. Transports know no model.

The trainer side of a transport is a :class:`Publisher`: it lets authenticated readers reach one
:class:`~weightsync.transports.host.region.PublishedRegion`, or the memory of a GPU in place
(:class:`~weightsync.transports.cuda.region.CudaRegion`; ``cuda_ipc`` and ``nccl``, whose sources write to a GPU, all others to
host memory).
The engine side is a :class:`Reader`: one reader's connection to one owner. The reader dictates the geometry: which bytes of
which region go where, as :class:`~weightsync.tensors.copy_table.Tiles`, given once by :meth:`Reader.prepare` and used every round.

A transport either **maps** the owner's memory (in-process, shared memory; CUDA IPC) and copies tiles by itself, or **carries**
them (TCP): the owner packs the tiles that were asked for into buckets and sends them. Both look the same from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.protocol.messages import Host, Offer
from weightsync.tensors.copy_table import Tiles

__all__ = ["Publisher", "Reader", "Transport"]


class Publisher(Protocol):
    """Serves one shelf to readers until closed.

    Safe to close at any time and twice; closing ends every reader's transfer with an error on the reader's side and leaves no
    thread, socket, file or shared memory behind.
    """

    @property
    def offer(self) -> Offer:
        """What a reader needs to connect."""
        ...

    def close(self) -> None:
        """Stop serving. Returns when nothing is left."""
        ...


class Reader(Protocol):
    """One reader's way to one owner's shelf. Used by one thread at a time, but for :meth:`abort`.

    The order of calls is ``prepare`` once per plan, then per round ``begin``, ``read`` for each group in ascending order, ``end``.
    After an error the source may be prepared and begun again unless the error was :class:`~weightsync.errors.PeerLost`; the
    bytes under the targets are then undefined until a later round succeeds.
    """

    def prepare(self, groups: Sequence[Tiles], layout_digest: str, deadline: Deadline) -> None:
        """Say which bytes will be wanted, group by group (a group may be empty).

        ``Tiles.region`` and ``Tiles.source`` are the owner's regions and byte offsets in them, ``Tiles.target`` absolute
        addresses here, which must stay valid until the next ``prepare`` or ``close``.
        Raises :class:`~weightsync.errors.StaleSource` if the owner's layout has another digest,
        :class:`~weightsync.errors.ProtocolError` if a tile lies outside the owner's regions.
        """
        ...

    def begin(self, version: int, deadline: Deadline) -> None:
        """Start a transfer of this version; a carrying owner starts sending ahead.

        Raises :class:`~weightsync.errors.StaleSource` if the owner holds another version.
        """
        ...

    def read(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> None:
        """Return when every byte of this group is in place.

        With ``digests`` (``uint64[rows of the target's layout]``), the digest of every tile, read back from its target after the
        copy, is added to ``digests[row]`` of its key (:mod:`weightsync.tensors.copies` does both in one pass over memory).

        Raises :class:`~weightsync.errors.PeerLost`, :class:`~weightsync.errors.DeadlineExceeded`,
        :class:`~weightsync.errors.Aborted`, :class:`~weightsync.errors.StaleSource` or :class:`~weightsync.errors.ProtocolError`.
        """
        ...

    def end(self, deadline: Deadline) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` unless the owner held this version during the whole transfer."""
        ...

    def abort(self) -> None:
        """Make a ``prepare``, ``begin``, ``read`` or ``end`` that runs in another thread raise ``Aborted`` soon. Never blocks.

        Between ``begin`` and ``end`` it makes the next call raise; ``prepare`` and ``begin`` forget it, so a caller that can be
        aborted between two transfers remembers that itself.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Safe twice."""
        ...


class Transport(Protocol):
    """One kind of transport, found by name in :mod:`weightsync.transports.registry`."""

    name: str

    def unavailable(self) -> str | None:
        """Why it cannot work on this machine and what would help, or ``None`` if it can."""
        ...

    def reaches(self, offer: Offer, here: Host) -> bool:
        """Whether a reader on ``here`` could use this offer. Pure; nothing is tried."""
        ...

    def publish(self, shelf: Any, key: bytes, here: Host) -> Publisher:  # noqa: ANN401 - a shelf of the kind that it can read
        """Let readers that prove to know ``key`` (the run's secret) reach ``shelf``, of a kind that the scheme can serve."""
        ...

    def open(self, offer: Offer, key: bytes, deadline: Deadline) -> Reader:
        """Reach the owner behind ``offer``.

        Raises :class:`~weightsync.errors.PeerLost` if nobody answers there, :class:`~weightsync.errors.AuthenticationError` if
        the key is not the owner's, :class:`~weightsync.errors.DeadlineExceeded`.
        """
        ...
