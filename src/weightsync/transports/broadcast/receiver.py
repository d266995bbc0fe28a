"""The receiver of scheme ``collective``: joins the group that its owner names, and unpacks what is broadcast there."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, ProtocolError, WeightSyncError
from weightsync.tensors.copies import check_keys, scatter_and_digest, scatter_tiles
from weightsync.transports.broadcast.buffer_config import BufferSettings
from weightsync.transports.broadcast.joining import JoiningReader
from weightsync.transports.broadcast.process_groups import ProcessGroup, init_custom_process_group
from weightsync.transports.host.memory import available_bytes
from weightsync.transports.net.channel import DATA, HEADER, Channel, FrameHeader
from weightsync.transports.net.connected_reader import Dial
from weightsync.transports.net.requests import JoinEpoch
from weightsync.transports.tcp.sender import frames_of

__all__ = ["CollectiveReader", "host_frames"]

_CLOSE_SECONDS = 5.0


def host_frames(counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], buffer_bytes: int) -> npt.NDArray[np.int64]:
    """The frames that both ends make of tiles of ``sizes`` bytes: each with its header in one buffer.

    A frame takes one tile more than the last multiple: so this is what never gets larger than a buffer.
    """
    return frames_of(counts, sizes, buffer_bytes - HEADER.size - int(sizes.max(initial=0)))


class _Incoming:
    """One transfer: a thread receives buckets ahead into the buffers; :meth:`take` lends the next. One that broke stays so."""

    def __init__(
        self,
        group: ProcessGroup,
        frames: npt.NDArray[np.int64],
        version: int,
        buffers: list[npt.NDArray[np.uint8]],
        deadline: Deadline,
    ) -> None:
        self.frames, self.version = frames, version
        self.done = 0  # buckets that were unpacked
        self._group, self._buffers, self._deadline = group, buffers, deadline
        self._arrived = 0
        self._ended: WeightSyncError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weightsync-collective-receive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for sequence in range(len(self.frames)):
                buffer = self._free(sequence)
                if buffer is None:
                    return
                number, offset, first, last, nbytes = self.frames[sequence].tolist()
                self._group.broadcast([torch.from_numpy(buffer[: HEADER.size + nbytes])], self._deadline)
                due = FrameHeader(DATA, sequence, self.version, number, first - offset, last - offset, nbytes)
                header = FrameHeader.unpack(buffer[: HEADER.size].tobytes())
                if header != due:
                    raise ProtocolError(f"a broadcast brought bucket {tuple(header)} where {tuple(due)} was due")
                with self._changed:
                    self._arrived += 1
                    self._changed.notify_all()
        except WeightSyncError as error:
            self.end(error.with_traceback(None))  # which would keep this, and so the buffers

    def _free(self, sequence: int) -> npt.NDArray[np.uint8] | None:
        """The buffer for this bucket once it is free; ``None`` if nobody wants it any more."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._ended is not None or sequence < self.done + len(self._buffers),
                self._deadline.remaining("waiting for the engine to take a bucket"),
            )
            if not free:
                raise DeadlineExceeded(f"the engine did not take a bucket within {self._deadline.seconds:g} s")
            return None if self._ended is not None else self._buffers[sequence % len(self._buffers)]

    def take(self, deadline: Deadline) -> npt.NDArray[np.uint8]:
        """The bytes of the next bucket, when they are here; :meth:`give_back` them."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._ended is not None or self._arrived > self.done, deadline.remaining("waiting for a broadcast")
            )
            if not arrived:
                raise DeadlineExceeded(f"a broadcast did not arrive within {deadline.seconds:g} s")
            if self._arrived <= self.done and self._ended is not None:
                raise self._ended
            return self._buffers[self.done % len(self._buffers)][HEADER.size :]

    def give_back(self) -> None:
        """The bucket that was lent is unpacked."""
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def end(self, error: WeightSyncError) -> None:
        """Wake whoever waits: nothing more comes. A broadcast that runs ends when the owner notices, or at its deadline."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    def ended(self, seconds: float) -> bool:
        """Whether the thread is gone, waiting at most so long for it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class CollectiveReader(JoiningReader):
    """A :class:`~weightsync.transports.base.Reader` of scheme ``collective``. Holds ``num_buffers`` of the owner's buckets."""

    def __init__(self, dial: Dial, deadline: Deadline, host: str, buffers: BufferSettings) -> None:
        self._incoming: _Incoming | None = None
        self._buffers: list[npt.NDArray[np.uint8]] = []
        super().__init__(dial, deadline, host, buffers)

    def _drop(self) -> None:
        incoming, self._incoming = self._incoming, None
        super()._drop()
        if incoming is not None:
            incoming.end(Aborted("the transfer was given up"))
            if not incoming.ended(0):
                self._buffers = []  # a broadcast still writes there
        self._drop_group()
        if incoming is not None:
            incoming.ended(_CLOSE_SECONDS if self._closed else 0)

    def _unfinished(self) -> bool:
        return self._incoming is not None

    def _enter(self, channel: Channel, join: JoinEpoch, deadline: Deadline) -> ProcessGroup:
        address = str(channel.socket.getsockname()[0])
        return init_custom_process_group(
            "gloo", join.rank, join.size, join.epoch, deadline, address=self._host, port=join.port, interface=address
        )

    def _make_room(self, channel: Channel, buffer_bytes: int) -> None:
        if not self._buffers or len(self._buffers[0]) != buffer_bytes:
            needed, free = self._settings.num_buffers * buffer_bytes, available_bytes()
            if free is not None and needed > free:
                raise ProtocolError(f"{channel.peer} broadcasts in buckets of which {needed:,} bytes do not fit here")
            self._buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(self._settings.num_buffers)]

    def _begun(self, channel: Channel, group: ProcessGroup, version: int, deadline: Deadline) -> None:
        frames = host_frames(*self._wanted(), len(self._buffers[0]))
        self._incoming = _Incoming(group, frames, version, self._buffers, deadline)

    def _under_way(self) -> tuple[Channel, _Incoming]:
        channel = self._channel_in_use()
        if self._incoming is None:
            raise ProtocolError("a transfer was continued that was not begun, or that failed")
        return channel, self._incoming

    def read(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`."""
        channel, incoming = self._under_way()
        if not 0 <= group < len(self._groups):
            raise ProtocolError(f"group {group} was not prepared: there are {len(self._groups)}")
        tiles, frames = self._groups[group], incoming.frames
        try:
            deadline.remaining(f"reading group {group}")
            if digests is not None:
                check_keys(tiles, digests)
            unpacked = 0
            while unpacked < len(tiles):
                number, offset, first, last, _ = frames[incoming.done].tolist() if incoming.done < len(frames) else [-1] * 5
                if number != group or first - offset != unpacked:
                    raise ProtocolError(f"group {group} was read out of order")
                bucket = incoming.take(deadline)
                if digests is None:
                    scatter_tiles(tiles, bucket.ctypes.data, unpacked, last - offset)
                else:
                    scatter_and_digest(tiles, bucket.ctypes.data, unpacked, last - offset, digests)
                unpacked = last - offset
                incoming.give_back()
        except WeightSyncError as error:
            raise self._why(channel, error) from error
        except BaseException:
            self._drop()
            raise

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        channel, incoming = self._under_way()
        try:
            if incoming.done != len(incoming.frames):
                raise ProtocolError("not every group was read")
            self._take_end(channel, len(incoming.frames), incoming.version, deadline)
            if not incoming.ended(deadline.remaining("ending the transfer")):
                raise DeadlineExceeded(f"a broadcast did not end within {deadline.seconds:g} s")
        except BaseException:
            self._drop()
            raise
        self._incoming = None

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.abort`."""
        super().abort()
        incoming = self._incoming
        if incoming is not None:
            incoming.end(Aborted("the transfer was aborted"))

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        super().close()
        self._buffers = []
