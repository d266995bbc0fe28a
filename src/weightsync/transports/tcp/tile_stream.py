"""Tiles through a socket by compiled loops: no Python, and no pass over memory that the cache does not serve, for each run."""

from __future__ import annotations

import errno
import os
import socket
import time

import numpy as np

from weightsync.arrays import Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.tensors.copies import check_keys
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.digest import columns_address
from weightsync.tensors.kernels import SLICE, receive_table, run_of_table, send_table
from weightsync.tensors.memory_views import memory_at
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.encrypted_records import RECORD_BYTES

_LOOK_NANOSECONDS = 50_000_000  # the compiled loops come back so often, to look at the deadline
_AGAIN = (0, errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


class TileStream:
    """Sends and receives tiles over one channel. Holds a bucket for short runs, of 256 KiB or one record.

    Both methods raise as those of :class:`~weightsync.transports.net.channel.Channel` do. The caller has checked the tiles' bounds.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._bucket = np.empty(RECORD_BYTES if channel.encrypted else SLICE, np.uint8)
        self._status = np.zeros(3, np.int64)  # an error number, and room for a clock reading

    def send(self, tiles: CopyTable, addresses: Int64, first: int, last: int, nbytes: int, deadline: Deadline) -> None:
        """Send tiles ``first <= i < last``, which hold ``nbytes`` bytes; ``addresses`` is where each source region begins."""
        bucket, status = self._bucket.ctypes.data, self._status.ctypes.data
        table, bases = tiles.table_address, addresses.ctypes.data
        done = 0
        while done < nbytes and self._channel.encrypted:
            ready = send_table(-1, table, first, last, bases, done, bucket, self._bucket.nbytes, 0, status)
            self._channel.send((memory_at(int(self._status[1]), ready - done),), deadline)
            done = ready
            self._check()
        while done < nbytes:
            self._channel.bound(socket.SO_SNDTIMEO, deadline, "sending to")
            until = time.monotonic_ns() + _LOOK_NANOSECONDS
            fd = self._channel.socket.fileno()
            done = send_table(fd, table, first, last, bases, done, bucket, self._bucket.nbytes, until, status)
            self._check()

    def receive(self, tiles: CopyTable, first: int, last: int, nbytes: int, deadline: Deadline, digests: UInt64 | None) -> None:
        """Fill the targets of tiles ``first <= i < last``; with ``digests``, add each tile's, read from its target."""
        bucket, status = self._bucket.ctypes.data, self._status.ctypes.data
        out = 0
        if digests is not None:
            check_keys(tiles, digests)
            out = digests.ctypes.data
        table, done = tiles.table_address, 0
        while done < nbytes and self._channel.encrypted:
            room = run_of_table(table, first, last, done, status)
            at = int(self._status[1])
            opened, in_place = self._channel.receive_part(nbytes - done, deadline, memory_at(at, min(room, RECORD_BYTES)))
            if not in_place:
                at = np.frombuffer(opened, np.uint8).ctypes.data
            self._status[1] = len(opened)
            done = receive_table(-1, table, first, last, done, nbytes, at, 0, out, columns_address, status)
            self._check()
        while done < nbytes:
            self._channel.bound(socket.SO_RCVTIMEO, deadline, "receiving from")
            until = time.monotonic_ns() + _LOOK_NANOSECONDS
            fd = self._channel.socket.fileno()
            done = receive_table(fd, table, first, last, done, nbytes, bucket, until, out, columns_address, status)
            self._check()

    def _check(self) -> None:
        number = int(self._status[0])
        if number:
            self._status[0] = 0
            if number < 0:
                raise self._channel.lost()
            if number not in _AGAIN:
                raise self._channel.lost(OSError(number, os.strerror(number)))
        if self._channel.aborted:
            raise self._channel.lost()
