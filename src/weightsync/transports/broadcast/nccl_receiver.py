"""The receiver of scheme ``nccl``: joins the group that its owner names, and unpacks on its GPU what is broadcast there."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, ProtocolError, TransportUnavailable, WeightSyncError, from_wire
from weightsync.tensors.copy_table import CopyTable
from weightsync.tensors.cuda.waiting import wait_until_idle
from weightsync.transports.broadcast.buffer_config import BufferSettings
from weightsync.transports.broadcast.joining import JoiningReader
from weightsync.transports.broadcast.nccl_sender import name_of_gpu
from weightsync.transports.broadcast.packed_broadcast import PackedBroadcast, frames_of_groups, packed_frames
from weightsync.transports.broadcast.process_groups import ProcessGroup, init_custom_process_group
from weightsync.transports.host.region import EMPTY
from weightsync.transports.net.channel import END, Channel
from weightsync.transports.net.connected_reader import Dial
from weightsync.transports.net.requests import ANSWER_BYTES, Fail, JoinEpoch, Ready, Warmup, next_control, send_request

__all__ = ["NcclReader"]

_CLOSE_SECONDS = 5.0


class _Watch:
    """Closes ``group`` as soon as the owner goes away or says that a transfer failed, or this end aborts.

    NCCL itself would wait for ever.
    """

    def __init__(self, channel: Channel, group: ProcessGroup, deadline: Deadline) -> None:
        self._channel, self._group, self._deadline = channel, group, deadline
        self._thread = threading.Thread(target=self._run, name="weightsync-nccl-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ended = self._channel.next_kind(self._deadline) == END
        except WeightSyncError:
            ended = False
        if not ended:
            self._group.close()

    def ended(self, seconds: float) -> bool:
        """Whether it watches no more, waiting at most so long for that."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class NcclReader(JoiningReader):
    """A :class:`~weightsync.transports.base.Reader` whose targets are in the memory of ``device``.

    Holds ``num_buffers`` of the owner's buckets there, and a table of tiles. Receives while it is read, not ahead: so one GPU never
    waits for two senders at once, each of which may wait for another reader.
    """

    def __init__(
        self,
        dial: Dial,
        deadline: Deadline,
        host: str,
        buffers: BufferSettings,
        device: torch.device,
    ) -> None:
        self.device = device
        self._end: PackedBroadcast | None = None
        self._buffer_bytes = 0
        self._frames_of: list[tuple[int, int]] = []
        self._watch: _Watch | None = None
        self._version, self._next = 0, 0
        super().__init__(dial, deadline, host, buffers)

    def _drop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and self._channel is not None:
            self._channel.abort()
            watch.ended(_CLOSE_SECONDS)
        self._drop_group()
        super()._drop()

    def _unfinished(self) -> bool:
        return self._watch is not None

    def prepare(self, groups: Sequence[CopyTable], layout_digest: str, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.prepare`."""
        self._end = None
        super().prepare(groups, layout_digest, deadline)
        channel = self._channel
        if channel is not None:
            self._warm_up(channel, deadline)

    def _warm_up(self, channel: Channel, deadline: Deadline) -> None:
        """Have buffers, tables and a connected group, if nobody else wants the same, before an engine stands still for it."""
        try:
            send_request(channel, Warmup(deadline.remaining("meeting")), deadline)
            if channel.next_kind(deadline) != END:
                answer = next_control(channel, ANSWER_BYTES, deadline)
                if isinstance(answer, Fail):
                    raise from_wire(answer.kind, answer.message)
                if not isinstance(answer, JoinEpoch):
                    raise ProtocolError(f"{channel.peer} answered {type(answer).__name__} to a meeting")
                group = self._join(channel, answer, deadline)
                self._watch = _Watch(channel, group, deadline)
                group.broadcast([torch.zeros(1, dtype=torch.uint8, device=self.device)], deadline)
                if not self._watch.ended(deadline.remaining("meeting")):
                    raise DeadlineExceeded(f"a meeting with {channel.peer} did not end within {deadline.seconds:g} s")
                self._watch = None
            self._take_end(channel, 0, EMPTY, deadline)
        except WeightSyncError as error:
            raise self._why(channel, error) from error

    def _take_ready(self, ready: Ready) -> None:
        if ready.device == name_of_gpu(self.device):
            raise TransportUnavailable(
                f"NCCL cannot send from {self.device} to itself: allow cuda_ipc for trainer and engine ranks on the same GPU"
            )

    def _enter(self, channel: Channel, join: JoinEpoch, deadline: Deadline) -> ProcessGroup:
        return init_custom_process_group(
            "nccl", join.rank, join.size, join.epoch, deadline, address=self._host, port=join.port, device=self.device,
            priority=True,
        )  # fmt: skip

    def _make_room(self, channel: Channel, buffer_bytes: int) -> None:
        if self._end is not None and self._buffer_bytes == buffer_bytes:
            return
        frames = packed_frames(*self._wanted(), buffer_bytes)
        self._end = None  # two would not fit
        self._end = PackedBroadcast(_together(self._groups), frames, self.device, buffer_bytes, self._settings.num_buffers)
        self._frames_of = frames_of_groups(frames, len(self._groups))
        self._buffer_bytes = buffer_bytes

    def _begun(self, channel: Channel, group: ProcessGroup, version: int, deadline: Deadline) -> None:
        # Whoever reads the targets must be done before they change.
        wait_until_idle(self.device, deadline, f"what this engine rank has queued on its device before version {version}")
        self._version, self._next = version, 0
        self._watch = _Watch(channel, group, deadline)

    def read(self, group: int, deadline: Deadline, digests: npt.NDArray[np.uint64] | None = None) -> None:
        """See :meth:`weightsync.transports.base.Reader.read`. Without ``digests``: a GPU takes them in a launch of its own."""
        channel, joined, end = self._under_way()
        if digests is not None:
            raise ProtocolError("nccl takes no digests while it reads: use weightsync.tensors.cuda.digest.LayoutDigest")
        if not 0 <= group < len(self._frames_of):
            raise ProtocolError(f"group {group} was not prepared: there are {len(self._frames_of)}")
        deadline.remaining(f"reading group {group}")
        frames = self._frames_of[group]
        if frames[0] != frames[1] and frames[0] != self._next:
            raise self._why(channel, ProtocolError(f"group {group} was read out of order"))
        try:
            end.run(joined, self._version, deadline, frames)
        except WeightSyncError as error:
            raise self._why(channel, error) from error
        self._next = max(self._next, frames[1])

    def _under_way(self) -> tuple[Channel, ProcessGroup, PackedBroadcast]:
        channel, group, end = self._channel_in_use(), self._group, self._end
        if group is None or end is None or self._watch is None:
            raise ProtocolError("a transfer was continued that was not begun, or that failed")
        return channel, group, end

    def end(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transports.base.Reader.end`."""
        channel, _, _ = self._under_way()
        try:
            count = self._frames_of[-1][1] if self._frames_of else 0
            if self._next != count:
                raise ProtocolError("not every group was read")
            if self._watch is not None and self._watch.ended(deadline.remaining("ending the transfer")):
                self._watch = None
            self._take_end(channel, count, self._version, deadline)
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """See :meth:`weightsync.transports.base.Reader.close`."""
        super().close()
        self._end = None


def _together(groups: Sequence[CopyTable]) -> CopyTable:
    """All groups' tiles, without keys."""
    names = ("region", "source", "source_stride", "target", "target_stride", "rows", "row_bytes")
    if not groups:
        return CopyTable.empty()
    return CopyTable(*(np.concatenate([getattr(tiles, name) for tiles in groups]) for name in names))
