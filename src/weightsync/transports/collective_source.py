"""The receiver of scheme ``collective``: joins the group that its owner names, and unpacks what is broadcast there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, PeerLost, ProtocolError, WeightSyncError, from_wire
from weightsync.tensors.copies import check_keys, scatter_and_digest, scatter_tiles
from weightsync.tensors.tiles import TILE_BYTES
from weightsync.transports.frames import CONTROL, DATA, END, HEADER, Channel, FrameHeader
from weightsync.transports.groups import Group, init_custom_process_group
from weightsync.transports.memory import available_bytes
from weightsync.transports.packing import LEAST_BUFFER, MOST_BUFFER, BufferSettings
from weightsync.transports.receiving import CarriedSource
from weightsync.transports.requests import ANSWER_BYTES, Fail, Join, Start, ask, decode_control, next_control
from weightsync.transports.sending import frames_of

__all__ = ["CollectiveSource"]

_WHY_SECONDS = 1.0  # how long the owner has to say why a broadcast broke
_CLOSE_SECONDS = 5.0


class _Incoming:
    """One transfer: a thread receives buckets ahead into the buffers; :meth:`take` lends the next. One that broke stays so."""

    def __init__(
        self, group: Group, frames: npt.NDArray[np.int64], version: int, buffers: list[npt.NDArray[np.uint8]], deadline: Deadline
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
                found = FrameHeader.unpack(buffer[: HEADER.size].tobytes())
                if found != due:
                    raise ProtocolError(f"a broadcast brought bucket {tuple(found)} where {tuple(due)} was due")
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
            there = self._changed.wait_for(
                lambda: self._ended is not None or self._arrived > self.done, deadline.remaining("waiting for a broadcast")
            )
            if not there:
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


class CollectiveSource(CarriedSource):
    """A :class:`~weightsync.transports.base.Source` that takes part in broadcasts. Holds ``num_buffers`` of the owner's buckets.

    Asks, and learns of failures, over its connection to the owner; the connection goes when a transfer is given up, by which the
    owner and with it the other readers notice.
    """

    _largest_tile = TILE_BYTES

    def __init__(
        self, dial: Callable[[Callable[[Channel], None], Deadline], Channel], deadline: Deadline, host: str, buffers: BufferSettings
    ) -> None:
        self._host, self._settings = host, buffers
        self._incoming: _Incoming | None = None
        self._group: Group | None = None
        self._buffers: list[npt.NDArray[np.uint8]] = []
        super().__init__(dial, deadline)

    def _drop(self) -> None:
        incoming, self._incoming = self._incoming, None
        group, self._group = self._group, None
        super()._drop()
        if incoming is not None:
            incoming.end(Aborted("the transfer was given up"))
            if not incoming.ended(0):
                self._buffers = []  # a broadcast still writes there
        if group is not None:
            group.close()
        if incoming is not None:
            incoming.ended(_CLOSE_SECONDS if self._closed else 0)

    def _idle(self) -> None:
        if self._incoming is not None:
            self._drop()
        super()._idle()

    def begin(self, version: int, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Source.begin`. Returns when the group of readers is complete."""
        self._idle()
        channel = self._connected(deadline)
        try:
            ask(channel, Start(version, deadline.remaining("beginning a transfer")), deadline)
            answer = next_control(channel, ANSWER_BYTES, deadline)
        except WeightSyncError:
            self._drop()
            raise
        if isinstance(answer, Fail):
            raise from_wire(answer.kind, answer.message)
        try:
            if not isinstance(answer, Join):
                raise ProtocolError(f"{channel.peer} answered {type(answer).__name__} to the beginning of a transfer")
            group = self._join(channel, answer, deadline)
        except WeightSyncError as error:
            raise self._why(channel, error, deadline) from error
        self._incoming = _Incoming(group, self._frames(answer.buffer_bytes), version, self._buffers, deadline)

    def _join(self, channel: Channel, join: Join, deadline: Deadline) -> Group:
        if (
            not LEAST_BUFFER // 2 <= join.buffer_bytes <= MOST_BUFFER
            or not 0 < join.rank < join.size
            or not 0 < join.port < 1 << 16
        ):
            raise ProtocolError(f"{channel.peer} named an impossible group")
        if not self._buffers or len(self._buffers[0]) != join.buffer_bytes:
            needed, free = self._settings.num_buffers * join.buffer_bytes, available_bytes()
            if free is not None and needed > free:
                raise ProtocolError(f"{channel.peer} broadcasts in buckets of which {needed:,} bytes do not fit here")
            self._buffers = [np.empty(join.buffer_bytes, np.uint8) for _ in range(self._settings.num_buffers)]
        group, self._group = self._group, None
        if group is not None and (group.name != join.epoch or group.closed):
            group.close()
            group = None
        if group is None:
            here = str(channel.socket.getsockname()[0])
            group = init_custom_process_group(
                "gloo", join.rank, join.size, join.epoch, deadline, address=self._host, port=join.port, interface=here
            )
        self._group = group
        return group

    def _frames(self, buffer_bytes: int) -> npt.NDArray[np.int64]:
        """The buckets that the owner makes of what was asked for."""
        counts = np.array([len(tiles) for tiles in self._groups], np.int64)
        sizes = [tiles.rows * tiles.row_bytes for tiles in self._groups]
        flat = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
        return frames_of(counts, flat, buffer_bytes - HEADER.size - int(flat.max(initial=0)))

    def _why(self, channel: Channel, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """What the owner says of a broadcast that broke, else ``error``; lets go of everything."""
        found = error
        if self._aborted:
            found = Aborted("the transfer was aborted")
        elif isinstance(error, PeerLost):
            try:
                answer = next_control(channel, ANSWER_BYTES, Deadline(_WHY_SECONDS))
                if isinstance(answer, Fail):
                    found = from_wire(answer.kind, answer.message)
            except WeightSyncError as silence:
                if isinstance(silence, PeerLost):
                    found = silence
        self._drop()
        return found

    def _under_way(self) -> tuple[Channel, _Incoming]:
        if self._aborted:
            self._drop()
            raise Aborted("the transfer was aborted")
        if self._channel is None or self._incoming is None:
            raise ProtocolError("a transfer was continued that was not begun, or that failed")
        return self._channel, self._incoming

    def read(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> None:
        """See :meth:`weightsync.transports.base.Source.read`."""
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
            raise self._why(channel, error, deadline) from error
        except BaseException:
            self._drop()
            raise

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Source.end`."""
        channel, incoming = self._under_way()
        try:
            if incoming.done != len(incoming.frames):
                raise ProtocolError("not every group was read")
            header = FrameHeader.unpack(channel.receive(HEADER.size, deadline))
            if header.kind == CONTROL:
                answer = decode_control(channel, header, ANSWER_BYTES, deadline)
                if isinstance(answer, Fail):
                    raise from_wire(answer.kind, answer.message)
            if header[:3] != (END, len(incoming.frames), incoming.version):
                raise ProtocolError(f"{channel.peer} was not at the end of its transfer")
            if not incoming.ended(deadline.remaining("ending the transfer")):
                raise DeadlineExceeded(f"a broadcast did not end within {deadline.seconds:g} s")
        except BaseException:
            self._drop()
            raise
        self._incoming = None

    def abort(self) -> None:
        """See :meth:`weightsync.transports.base.Source.abort`."""
        super().abort()
        incoming = self._incoming
        if incoming is not None:
            incoming.end(Aborted("the transfer was aborted"))

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Source.close`."""
        super().close()
        self._buffers = []
