"""The one memory region in which a trainer rank holds exactly one version for its readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from weightsync.arrays import Bytes
from weightsync.closing import Closeable
from weightsync.errors import ConfigurationError, ProtocolError, StaleSource, VersionError
from weightsync.forks import Origin
from weightsync.transports.host.memory import allocate

HEADER_BYTES = 4096
"""Bytes before the payload: one page, so that the payload is aligned for every copy kernel."""

EMPTY = -1
"""The version of a region that holds nothing, or is being filled."""

_STAMP_SECONDS = 1.0
_MAGIC = int.from_bytes(b"wshelf01", "little")
_MAGIC_WORD, _NBYTES_WORD, _SEQUENCE_WORD, _VERSION_WORD = 0, 1, 8, 9  # the cells that change have a cache line of their own


class Header:
    """The first page of a region, seen by its publisher or, mapped read-only, by a reader: a sequence lock around the payload.

    ``sequence`` is odd while the payload is being written and grows with every change; ``version`` is what the payload holds. A
    reader that finds the same stamp before and after a copy has read that version and nothing else.
    """

    def __init__(self, page: Bytes) -> None:
        self._words = page[:HEADER_BYTES].view(np.int64)
        # Taking a lock is the one full memory barrier that Python offers; on x86 it would not be needed.
        self._barrier = threading.Lock()

    def close(self) -> None:
        """Let go of the page, which must not stay mapped with an error that was raised here. Nothing else is called after this."""
        del self._words

    def write_new(self, nbytes: int) -> None:
        """Make this the header of an empty region of ``nbytes`` payload bytes."""
        self._words[_NBYTES_WORD] = nbytes
        self._words[_VERSION_WORD] = EMPTY
        self._words[_MAGIC_WORD] = _MAGIC

    def check(self, nbytes: int) -> None:
        """Raise :class:`~weightsync.errors.ProtocolError` unless this is the header of a region of ``nbytes`` payload bytes."""
        if int(self._words[_MAGIC_WORD]) != _MAGIC or int(self._words[_NBYTES_WORD]) != nbytes:
            raise ProtocolError("the shared memory that was handed over is not a weightsync region of the size announced")

    def stamp(self) -> tuple[int, int]:
        """Sequence and version, read as one.

        Raises :class:`~weightsync.errors.StaleSource` if the publisher changes them for as long as a second: an honest one writes a
        header a few times a round.
        """
        until = None
        while until is None or time.monotonic() < until:
            before = int(self._words[_SEQUENCE_WORD])
            with self._barrier:
                version = int(self._words[_VERSION_WORD])
            with self._barrier:
                if int(self._words[_SEQUENCE_WORD]) == before:
                    return before, version
            until = until or time.monotonic() + _STAMP_SECONDS
        raise StaleSource(f"the source wrote the header of its region all the time for {_STAMP_SECONDS:g} s: it is broken")

    def require(self, version: int) -> tuple[int, int]:
        """The stamp. Raises :class:`~weightsync.errors.StaleSource` unless it says ``version``."""
        stamp = self.stamp()
        if stamp[1] != version:
            holds = "is being written or was never filled" if stamp[1] == EMPTY else f"holds version {stamp[1]}"
            raise StaleSource(f"version {version} was asked for, but the source's region {holds}")
        return stamp

    def require_unchanged(self, stamp: tuple[int, int]) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` unless nothing was written since ``stamp`` was taken."""
        with self._barrier:
            pass
        if self.stamp() != stamp:
            raise StaleSource(f"the source's region was overwritten while version {stamp[1]} was being read")

    def invalidate(self) -> None:
        """Say that the payload is about to change."""
        self._words[_SEQUENCE_WORD] += 1 if self._words[_SEQUENCE_WORD] % 2 == 0 else 2
        with self._barrier:
            self._words[_VERSION_WORD] = EMPTY
        with self._barrier:
            pass

    def publish(self, version: int) -> None:
        """Say that the payload is ``version`` now."""
        with self._barrier:
            self._words[_VERSION_WORD] = version
        with self._barrier:
            self._words[_SEQUENCE_WORD] += 1


class PublishedRegion(Closeable):
    """``nbytes`` bytes that hold one version at a time, readable by other processes where the machine allows it.

    Region 0 of the rank's layout (digest ``layout_digest``) is the region's payload: ``nbytes`` bytes at :attr:`address`. The
    memory has no name in any file system, so nothing is left behind however the process ends; it is there (resident) when
    this returns. In a forked child a region holds nothing, and closing it changes nothing for the parent.

    ``windows`` says that it is a stream's: it holds windows, each of which goes to all readers.

    Raises :class:`~weightsync.errors.SharedMemoryTooSmall` if the memory cannot be had, and
    :class:`~weightsync.errors.ConfigurationError` for a negative size.

    ::

        with region.placing(7):          # from here on readers find no version
            copy_into(region.address)    # an exception leaves the region empty
        assert region.version == 7
    """

    def __init__(self, nbytes: int, layout_digest: str, *, windows: bool = False) -> None:
        if nbytes < 0:
            raise ConfigurationError(f"a region cannot have {nbytes} bytes")
        self._origin = Origin()
        self.nbytes = nbytes
        self.sizes = (nbytes,)
        """Bytes of each region of the layout."""
        self.layout_digest, self.windows = layout_digest, windows
        self._memory = allocate(HEADER_BYTES + nbytes)
        self._bytes: Bytes | None = np.frombuffer(self._memory.map, np.uint8)
        self.header = Header(self._bytes)
        self.header.write_new(nbytes)
        self._writers: dict[object, None] = {}

    @property
    def memory(self) -> Bytes:
        """The header page and the payload, ``uint8[HEADER_BYTES + nbytes]``; keeps the memory mapped as :attr:`payload` does."""
        self._origin.require("a region")
        if self._bytes is None:
            raise ConfigurationError("this region is closed")
        return self._bytes

    @property
    def payload(self) -> Bytes:
        """The bytes, ``uint8[nbytes]``. The memory stays mapped while such a view exists, even after :meth:`close`."""
        return self.memory[HEADER_BYTES:]

    @property
    def address(self) -> int:
        """Where the payload starts, page-aligned. Valid until :meth:`close`, or while a :attr:`payload` view is held."""
        return int(self.payload.ctypes.data)

    @property
    def fd(self) -> int | None:
        """The memory's file descriptor (header page included), owned by the region; ``None`` where memory cannot be shared so."""
        return self._memory.fd

    @property
    def version(self) -> int:
        """The version that the payload holds, or :data:`EMPTY`."""
        return EMPTY if self._bytes is None or self._origin.elsewhere else self.header.stamp()[1]

    @contextmanager
    def placing(self, number: int) -> Iterator[None]:
        """Replace the contents: readers find no version within the block, and ``number`` after it if the block did not raise.

        Raises :class:`~weightsync.errors.VersionError` for a negative number or if the region is being written already.
        """
        if number < 0:
            raise VersionError(f"version numbers are not negative: {number}")
        me = object()
        try:
            self._writers[me] = None  # no lock: a signal handler may raise right after it was taken
            if list(self._writers)[0] is not me:  # noqa: RUF015 - of one moment, while another thread may add its own
                raise VersionError(f"version {number} cannot be placed: another version is being placed on the same region")
            held = self.payload  # keeps the memory mapped if somebody closes the region meanwhile
            self.header.invalidate()
            yield
            self.header.publish(number)
            del held
        finally:
            self._writers.pop(me, None)

    def close(self) -> None:
        """Let go of the memory; it is unmapped at once or, where views of it are still held, with the last of them. Safe twice."""
        if self._bytes is None:
            return
        if not self._origin.elsewhere:
            self.header.invalidate()
        self._bytes = None
        del self.header
        self._memory.close()

    def __del__(self) -> None:
        # Closing what __init__ could not complete must not raise out of the collector.
        with suppress(AttributeError):
            self.close()
