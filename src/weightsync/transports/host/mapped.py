"""Base of the transports that map the publisher's memory and copy from it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from weightsync.arrays import Bytes, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, PeerLost, ProtocolError, StaleSource
from weightsync.tensors.copies import check_tiles, copy_and_digest
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.base import BlockingReader, Reader
from weightsync.transports.host.region import HEADER_BYTES, Header


class HeaderReader(Reader):
    """Base of readers that see the header of the publisher's region themselves, and whether its process lives."""

    _header: Header
    _peer: str
    _layout_digest: str
    _closed = _aborted = False
    _stamp: tuple[int, int] | None = None

    @abstractmethod
    def _publisher_lives(self) -> bool:
        """Whether the publisher still serves. Never blocks."""

    def _check(self, deadline: Deadline, what: str) -> None:
        if self._closed:
            raise PeerLost(f"{what}: the source of {self._peer} is closed")
        if self._aborted:
            raise Aborted(f"{what} from {self._peer} was aborted")
        if not self._publisher_lives():
            raise PeerLost(f"{what}: {self._peer} went away")
        deadline.remaining(f"{what} from {self._peer}")

    def _check_layout(self, planned: str) -> None:
        if planned != self._layout_digest:
            raise StaleSource(f"{self._peer} has layout {self._layout_digest}, but the plan was made for {planned}")

    def _started(self) -> tuple[int, int]:
        if self._stamp is None:
            raise ProtocolError("a transfer was continued that was not begun")
        return self._stamp

    def require(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.require`."""
        self._aborted = False
        self._check(deadline, f"looking for version {version}")
        self._header.require(version)


class MappedReader(BlockingReader, HeaderReader):
    """A :class:`~weightsync.transports.base.Reader` over ``memory``, ``uint8[header + nbytes]``: a publisher's whole region.

    If the publisher dies, no rank may commit its version, although the mapping can still be read. So ``begin``, ``read`` and
    ``end`` raise :class:`~weightsync.errors.PeerLost` once the publisher is gone.
    """

    def __init__(self, memory: Bytes, nbytes: int, layout_digest: str, publisher: str) -> None:
        self._memory = memory
        self._header = Header(memory)
        self._header.check(nbytes)
        self._regions = (nbytes,)
        # An empty region has no byte to point at: no tile can pass the check, so the address is never used.
        self._addresses = (int(memory.ctypes.data) + HEADER_BYTES,)
        self._layout_digest = layout_digest
        self._peer = publisher
        self._groups: tuple[CopyTable, ...] = ()
        self._stop = np.zeros(1, np.int8)

    @abstractmethod
    def _release(self) -> None:
        """Let go of what the subclass holds. Called once."""

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        self._clear()
        self._check(deadline, "preparing")
        self._groups = ()
        self._check_layout(layout_digest)
        for tiles in groups:
            check_tiles(tiles, self._regions)
        self._groups = tuple(groups)

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.begin`."""
        self._clear()
        self._check(deadline, f"beginning version {version}")
        self._stamp = self._header.require(version)

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        stamp = self._started()
        self._check(deadline, f"reading group {group}")
        self._check_group(group, len(self._groups))
        tiles = self._groups[group]
        if len(tiles):
            copy_and_digest(tiles, self._addresses, digests, self._stop)
        self._check(deadline, f"reading group {group}")
        self._header.require_unchanged(stamp)

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        stamp, self._stamp = self._started(), None
        self._check(deadline, "ending the transfer")
        self._header.require_unchanged(stamp)

    def _clear(self) -> None:
        self._stamp = None
        self._aborted = False
        self._stop[0] = 0

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        self._aborted = True
        self._stop[0] = 1

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        if self._closed:
            return
        self._closed = True
        self._header.close()
        del self._header, self._memory
        self._groups = ()
        self._release()
