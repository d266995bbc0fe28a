"""What crosses a data socket: a channel that is bounded in time, and frames that describe themselves.

Every frame is a 48-byte little-endian header and ``nbytes`` bytes::

    magic  kind  (pad)  sequence  version  group  first  last  (pad)  nbytes
    4s     u8    3      u64       i64      u32    u32    u32   4      u64

``CONTROL`` carries one MessagePack struct of :mod:`weightsync.transports.net.messages`. ``DATA`` carries the bytes of the tiles
``first`` to ``last - 1`` of ``group``, run after run, tile after tile. ``END`` says that all groups were sent and that the region
held ``version`` throughout. ``sequence`` counts the frames of one transfer from zero.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from weightsync import forks
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, PeerLost, ProtocolError

CONTROL, DATA, END = 1, 2, 3
HEADER = struct.Struct("<4sB3xQqIII4xQ")
VERSION_AT = struct.calcsize("<4sB3xQ")
"""Where a header holds the version: eight bytes."""
_MAGIC = b"wsf1"
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # several times a move, and enums take long to combine
_LATE = 0.05
_SOL_SOCKET, _WAIT_ALL = int(socket.SOL_SOCKET), int(socket.MSG_WAITALL)
_IOV_MAX = 1024  # buffers that one system call takes
T = TypeVar("T")


class FrameHeader(NamedTuple):
    """The fields of a frame's header; see the module."""

    kind: int
    sequence: int = 0
    version: int = 0
    group: int = 0
    first: int = 0
    last: int = 0
    nbytes: int = 0

    def pack(self) -> bytes:
        """The 48 bytes."""
        return HEADER.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        """The header in 48 bytes. Raises :class:`~weightsync.errors.ProtocolError` if they are none."""
        magic, *fields = HEADER.unpack(data)
        if magic != _MAGIC or fields[0] not in (CONTROL, DATA, END):
            raise ProtocolError("the peer sent bytes that are not a weightsync frame")
        return cls(*fields)


def _timeval(seconds: float) -> bytes:
    microseconds = max(int(seconds * 1e6), 1000)  # zero would mean: for ever
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)


class Channel:
    """A connected stream socket on which nothing waits longer than its deadline. Owns the socket.

    The socket stays in blocking mode and the kernel keeps the time (``SO_RCVTIMEO``, ``SO_SNDTIMEO``), so that a large receive
    is one system call. Not thread-safe, except for :meth:`abort`.
    """

    encrypted = False
    """Whether bytes must go through this object's methods; else they may go through the socket's own descriptor, too."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket = sock
        self.peer = peer
        self.aborted = False
        self._bounds: dict[int, tuple[Deadline, float]] = {}
        sock.setblocking(True)
        forks.in_children(self, Channel._after_fork)

    def _after_fork(self) -> None:
        """In a forked child: a peer must learn at once that the process on this end died, whatever children it left."""
        forks.silence(self.socket.fileno())

    def secure(self, deadline: Deadline) -> None:
        """Be ready to send and receive, once connected. Plain sockets are."""

    def bound(self, option: int, deadline: Deadline, what: str) -> None:
        """Let the kernel end the next calls in time (``SO_RCVTIMEO`` or ``SO_SNDTIMEO``), at most :data:`_LATE` seconds late."""
        left = deadline.left
        known, then = self._bounds.get(option, (None, 0.0))
        if known is not deadline or left <= 0 or then - left > _LATE:
            left = deadline.remaining(f"{what} {self.peer}")
            self.socket.setsockopt(_SOL_SOCKET, option, _timeval(left))
            self._bounds[option] = deadline, left

    def unbound(self) -> None:
        """Let the next receive wait without limit, until either end closes the connection."""
        self._bounds.pop(socket.SO_RCVTIMEO, None)
        self.socket.setsockopt(_SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))

    def lost(self, error: OSError | None = None) -> Aborted | PeerLost:
        """What to raise when the connection broke."""
        if self.aborted:
            return Aborted(f"the transfer with {self.peer} was aborted")
        return PeerLost(f"{self.peer} went away" + (f": {error}" if error else ""))

    def _call(self, option: int, deadline: Deadline, what: str, call: Callable[..., T], *arguments: object) -> T:
        """Make a system call that may wait until the deadline; ``what`` and the peer name the wait."""
        while True:
            self.bound(option, deadline, what)
            try:
                return call(*arguments)
            except BlockingIOError:
                if self.aborted:
                    raise self.lost() from None
            except OSError as error:
                raise self.lost(error) from error

    def receive_into(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill the buffers, one after the other.

        Raises :class:`~weightsync.errors.PeerLost`, :class:`~weightsync.errors.DeadlineExceeded` or
        :class:`~weightsync.errors.Aborted`.
        """
        for buffer in buffers:
            left = buffer
            while left:
                count = self._call(socket.SO_RCVTIMEO, deadline, "receiving from", self.socket.recv_into, left, 0, _WAIT_ALL)
                if not count:
                    raise self.lost()
                left = left[count:]

    def receive_part(self, most: int, deadline: Deadline, into: memoryview) -> tuple[memoryview, bool]:
        """Return from one byte to ``most``, and whether they are the beginning of ``into`` or in another buffer.

        Raises as :meth:`receive_into` does.
        """
        return memoryview(self.receive(most, deadline)), False

    def receive(self, nbytes: int, deadline: Deadline) -> bytearray:
        """Exactly ``nbytes`` bytes. The caller has bounded ``nbytes``."""
        data = bytearray(nbytes)
        if nbytes:
            self.receive_into([memoryview(data)], deadline)
        return data

    def send(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, more: bool = False) -> None:
        """Send the buffers, one after the other; ``more`` follows at once. Raises as :meth:`receive_into` does."""
        flags = socket.MSG_MORE if more else 0
        left = [memoryview(part) for part in buffers if len(part)]
        while left:
            count = self._call(socket.SO_SNDTIMEO, deadline, "sending to", self.socket.sendmsg, left[:_IOV_MAX], (), flags)
            left = _after(left, count)

    def send_descriptor(self, data: bytes, fd: int, deadline: Deadline) -> None:
        """Send a few bytes with a file descriptor (Unix sockets)."""
        self._call(socket.SO_SNDTIMEO, deadline, "sending to", socket.send_fds, self.socket, [data], [fd])

    def receive_descriptor(self, most: int, deadline: Deadline) -> tuple[bytes, int]:
        """At most ``most`` bytes and the one file descriptor that came with them, which the caller then owns."""
        data, fds, _, _ = self._call(socket.SO_RCVTIMEO, deadline, "receiving from", socket.recv_fds, self.socket, most, 1)
        if not data:
            raise self.lost()
        if len(fds) != 1:
            raise ProtocolError(f"{self.peer} sent no file descriptor for its shared memory")
        return data, fds[0]

    def next_kind(self, deadline: Deadline) -> int:
        """The kind of the frame that comes next, once its header is here; it stays to be received. Raises as :meth:`receive` does.

        Another thread may do so while nothing else is received.
        """
        data = self.receive_some(HEADER.size, deadline, "waiting for", socket.MSG_PEEK | socket.MSG_WAITALL)
        if len(data) < HEADER.size:
            raise self.lost()
        return FrameHeader.unpack(data).kind

    def receive_some(self, most: int, deadline: Deadline, what: str, flags: int = 0) -> bytes:
        """Receive at most ``most`` bytes from the socket itself, at least one.

        Raises:
            DeadlineExceeded: ``what`` names the wait.
            PeerLost: The peer closed.
            Aborted: This end aborted.
        """
        data = self._call(socket.SO_RCVTIMEO, deadline, what, self.socket.recv, most, flags)
        if not data:
            raise self.lost()
        return data

    def next_byte(self) -> bytes:
        """Return the next byte that the peer sends, or nothing when either end closes the connection, which ends the wait."""
        self.unbound()
        try:
            return self.socket.recv(1)
        except OSError:
            return b""

    def peer_lives(self) -> bool:
        """Whether the peer has not closed its end. Never blocks, and must only be asked when the peer has nothing to say."""
        try:
            return bool(self.socket.recv(1, _LOOK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def abort(self) -> None:
        """End whatever runs on this channel, here and, by closing the stream, at the peer. Never blocks; any thread."""
        self.aborted = True
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more

    def close(self) -> None:
        """Close the socket. Safe twice."""
        self.socket.close()


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``buffers`` (byte views) after their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]] if count else buffers[index:]
        count -= len(buffer)
    return []
