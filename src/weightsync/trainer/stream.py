"""A stream as the source: a one-shot iterator of whole tensors, sent window by window while it goes on.

Nothing but a ring of windows is held. The thread that iterates copies each tensor to the window in progress. The thread that
answers the coordinator digests windows that are full and says so. A window is used again when no reader needs it any more.

A trainer rank's sample of its stream: what it digests of tensors that another rank sends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from weightsync import errors, failpoints
from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, TransportUnavailable, WeightSyncError
from weightsync.model import Layout, Manifest
from weightsync.model.window import ALIGNMENT, is_sampled, sample_box
from weightsync.outcome import Outcome
from weightsync.protocol.messages import Body, Done, Memory, PlaceWindow, RoundResult, WindowPlaced
from weightsync.publishing.publication import Publication, ReaderAccess
from weightsync.spans import span
from weightsync.tensors.cuda.waiting import wait_for_event
from weightsync.tensors.digest import digest_box
from weightsync.tensors.quantization import ChooseFormats
from weightsync.tensors.shards import DTypes, checkpoint_name, torch_dtype
from weightsync.trainer.stream_formats import StreamFormats
from weightsync.trainer.stream_plan import StreamPlan, WindowContents, WindowRing
from weightsync.transports.cuda.region import CudaRegion
from weightsync.transports.host.region import PublishedRegion


class _Copy(NamedTuple):
    piece: torch.Tensor
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    copied: torch.cuda.Event | None
    """Set for a tensor on a device: the end of the copy."""


class StreamSample:
    """Small copies of the tensors of version ``number`` that :func:`~weightsync.model.window.is_sampled` names.

    Nothing waits for a device before :meth:`digests`. Not thread-safe.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._copies: list[_Copy] = []

    def take(self, index: int, tensor: torch.Tensor, dtype: str) -> None:
        """Copy the sample of tensor number ``index`` of the stream, in its published ``dtype``."""
        if not is_sampled(index, self._number):
            return
        published, shape = torch_dtype(dtype), tuple(tensor.shape)
        box = sample_box(shape, published.itemsize, self._number)
        piece = tensor[box].to(published, copy=True)
        event = None
        if piece.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(piece.device))
        self._copies.append(_Copy(piece, shape, tuple(cut.start for cut in box), event))

    def digests(self, deadline: Deadline) -> bytes:
        """Return the digest of each sample, uint64, little-endian.

        Raises:
            DeadlineExceeded: ``deadline`` passed before a device had copied them.
        """
        digests = np.zeros(len(self._copies), "<u8")
        for index, (piece, shape, starts, copied) in enumerate(self._copies):
            if copied is not None:
                wait_for_event(copied, deadline, "copying a sample of the stream")
            digests[index] = digest_box(piece.cpu(), shape, starts)
        return digests.tobytes()


_HOST_WINDOW, _DEVICE_WINDOW, _LEAST_WINDOW = 256 << 20, 1 << 30, 1 << 20
_FREE_SHARE = 4  # of a GPU's free memory, windows take one part at most, unless their size was given
_MOST_WINDOWS = 64
_NOTHING = Manifest(())


@dataclass(frozen=True)
class Stream:
    """What a trainer publishes that holds no model: see :meth:`weightsync.Trainer.publish_stream`.

    Attributes:
        window_bytes: Bytes of a staging window; by default 256 MiB. On a device by default 1 GiB, or as much as lets all windows
            take a quarter of the memory that is free there. A larger tensor crosses in parts. Of several ranks the least counts.
        windows: Staging windows of each trainer rank, at least two, so that one is filled while another is read.
        device: The CUDA device that holds the windows; ``None`` for host memory. Tensors may be anywhere.

    Raises:
        ConfigurationError: A number is out of range, or the device is no CUDA device.
    """

    window_bytes: int | None = None
    windows: int = 3
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.window_bytes is not None and not ALIGNMENT <= self.window_bytes <= 1 << 40:
            raise ConfigurationError(f"window_bytes is a number of bytes from {ALIGNMENT} to 2^40, not {self.window_bytes!r}")
        if not 2 <= self.windows <= _MOST_WINDOWS:
            raise ConfigurationError(f"a stream has 2 to {_MOST_WINDOWS} windows, not {self.windows!r}")
        if self.device is not None and torch.device(self.device).type != "cuda":
            raise ConfigurationError(f"the windows of a stream lie on a CUDA device or, None, the host, not on {self.device!r}")

    @property
    def capacity(self) -> int:
        """Bytes of a window, a multiple of what tensors are aligned to."""
        given = self.window_bytes or _HOST_WINDOW
        if self.device is not None and self.window_bytes is None:
            free, _ = torch.cuda.mem_get_info(self.device)
            given = min(_DEVICE_WINDOW, max(_LEAST_WINDOW, free // _FREE_SHARE // self.windows))
        return -(-given // ALIGNMENT) * ALIGNMENT


@dataclass
class _Window:
    """A window that this rank fills."""

    contents: WindowContents | None = None
    """Set when it is full."""
    copied: torch.cuda.Event | None = None
    """Set when it is full and lies on a device: the end of its copies."""
    stream: torch.cuda.Stream | None = None
    """The CUDA stream of the last copy into it, which all copies before it precede."""
    handle: int | None = None
    """CUDA's own handle of that stream; 0 is a stream, too."""


class StreamedPublication:
    """One publication of a stream by this rank.

    The thread that iterates calls :meth:`drain`, another thread :meth:`window`.

    Args:
        ring: The windows.
        stamp: Version number under which the region is readable meanwhile.
        plan: That of the publication before, if its stream came to its end.
        formats: Quantizes what is published, and has converted it.
    """

    def __init__(self, ring: WindowRing, stamp: int, plan: StreamPlan | None, formats: StreamFormats | None) -> None:
        self.stamp = stamp
        self._ring, self._formats = ring, formats
        self._lock = threading.RLock()
        """Entered itself, not as :attr:`_changed`: an exception of a signal handler in between would leave it held."""
        self._changed = threading.Condition(self._lock)
        self._full: dict[int, _Window] = {}
        self._end: WindowPlaced | None = None
        self._most = 0  # bytes of a window, once the coordinator has sent it
        self._version = 0  # once it has sent that
        self._released = 0
        self.next = ring.rank
        """The window that the coordinator asks for next."""
        self._error: tuple[str, str] | None = None
        """Why it was stopped, in words: an error would refer to the frames in which it was raised, and these to the windows."""
        # Of the thread that iterates:
        self._earlier = plan
        self._plan: StreamPlan | None = None
        self._taken = 0  # tensors so far
        self._current: _Window | None = None
        self._number = -1  # of the window in progress
        self._sample: StreamSample | None = None

    # The thread that iterates.

    def drain(self, tensors: Iterable[tuple[str, torch.Tensor]], deadline: Deadline) -> None:
        """Iterate to the end, whatever happens: gathers are collective. What cannot be sent any more is dropped.

        Raises:
            ConfigurationError: The iterator yielded what cannot be published.
            DeadlineExceeded: Readers, or the other ranks, took too long.
        """
        failure: Exception | None = None
        try:
            for item in tensors:
                failpoints.reached("trainer.streaming")
                if self._error is None:
                    try:
                        self._add(*stream_item(item), deadline)
                    except Exception as error:  # noqa: BLE001 - raised when the iterator has been drained
                        failure = error if self.stop(error) else None
                del item  # its memory is needed for the next one
        except BaseException as error:
            self.stop(Aborted(f"the stream of trainer rank {self._ring.rank} raised: {type(error).__name__}: {error}"))
            raise
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame
        if self._error is None:
            try:
                self._finish(deadline)
            except Exception as error:
                self.stop(error)
                raise

    @property
    def plan(self) -> StreamPlan | None:
        """Where everything went, for the next publication; ``None`` unless the stream came to its end."""
        return self._plan if self._end is not None else None

    def _add(self, name: str, tensor: torch.Tensor, deadline: Deadline) -> None:
        for part in [(name, tensor)] if self._formats is None else self._formats.published(name, tensor):
            self._take(*part, deadline)

    def _take(self, name: str, tensor: torch.Tensor, deadline: Deadline) -> None:
        plan = self._plan or self._first_plan(deadline)
        if tensor.requires_grad:
            tensor = tensor.detach()
        parts = plan.parts(self._taken, name, tensor)
        if self._sample is not None:
            self._sample.take(self._taken, tensor, parts[0].part.dtype)
        for number, _, box, target in parts:
            if number != self._number:
                self._close(plan)
                self._open(number, deadline)
            if target is not None:
                if self._current is not None and self._ring.memory.is_cuda:
                    self._follow(self._current)
                target.copy_(tensor if box is None else tensor[box])
        self._taken += 1

    def _first_plan(self, deadline: Deadline) -> StreamPlan:
        """Wait for the size of windows. The plan of the publication before, if windows have the same size."""
        with self._lock:
            self._wait(lambda: bool(self._most), deadline, "waiting for the other trainer ranks to publish")
        plan, self._earlier = self._earlier, None
        if plan is None or plan.most != self._most:
            plan = StreamPlan(self._ring, self._most)
        self._plan = plan
        if self._ring.world_size > 1:  # one rank alone cannot differ from others
            self._sample = StreamSample(self._version)
        return plan

    def _follow(self, window: _Window) -> None:
        """Order the next copy after those before it: an iterator may yield each tensor on a CUDA stream of its own."""
        device = self._ring.memory.device
        handle = torch._C._cuda_getCurrentRawStream(device.index)  # for every tensor: a Stream object takes longer
        if handle == window.handle:
            return
        current = torch.cuda.current_stream(device)
        if window.stream is not None:
            current.wait_stream(window.stream)
        window.stream, window.handle = current, handle

    def _open(self, number: int, deadline: Deadline) -> None:
        """Begin window ``number``. If this rank sends it, wait first until its memory is free."""
        if self._ring.own(number):
            slots = len(self._ring.memory) // self._ring.capacity * self._ring.world_size  # of all ranks
            with self._lock:
                self._wait(lambda: self._released > number - slots, deadline, "waiting for readers")
            self._current = _Window()
        self._number = number

    def _close(self, plan: StreamPlan) -> None:
        """Let the window in progress be read, if there is one and it is this rank's."""
        window, self._current = self._current, None
        if window is None:
            return
        window.contents = plan.contents(self._number)
        if self._ring.memory.is_cuda:
            # Blocking: the iterating threads need the processors that a spinning wait for each window would take.
            window.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            window.copied.record(window.stream or torch.cuda.current_stream(self._ring.memory.device))
        with self._lock:
            self._full[self._number] = window
            self._changed.notify_all()

    def _finish(self, deadline: Deadline) -> None:
        for part in () if self._formats is None else self._formats.rest():
            self._take(*part, deadline)
        plan = self._plan
        if plan is not None:
            plan.cut(self._taken)
            self._close(plan)
        if plan is None or not plan.end().nbytes:
            raise ConfigurationError("the stream brought no bytes: nothing can be published")
        sample = b"" if self._sample is None else self._sample.digests(deadline)
        with self._lock:
            self._end = WindowPlaced(windows=self._number + 1, manifest=plan.end().fingerprint, stamp=self.stamp, sample=sample)
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], deadline: Deadline, what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or ready(), deadline.remaining(what)):
            raise DeadlineExceeded(f"{what} took longer than {deadline.seconds:g} s")
        if self._error is not None:
            raise errors.from_wire(*self._error)

    # The thread that answers the coordinator; stop() any.

    def stop(self, error: BaseException) -> bool:
        """Send nothing more: waiting threads get ``error``. Returns whether it counts: the first one does, before the end."""
        with self._lock:
            first = self._error is None and self._end is None
            if first:
                known = isinstance(error, WeightSyncError)
                self._error = errors.to_wire(error if known else Aborted(f"{type(error).__name__}: {error}"))
            self._changed.notify_all()
        return first

    def over(self, asked: Outcome[RoundResult]) -> None:
        """The round is over: if it failed, nothing more needs to be sent."""
        if asked.error is not None:
            self.stop(asked.error)

    def window(self, body: PlaceWindow, deadline: Deadline) -> WindowPlaced:
        """Answer the coordinator when the window is full, or the stream has ended before it.

        Raises:
            Aborted: The stream was stopped, by whatever error stopped it.
            DeadlineExceeded: ``deadline`` passed.
        """
        if body.window != self.next or body.window_bytes > self._ring.capacity:
            raise ConfigurationError(f"trainer rank {self._ring.rank} has no window {body.window} of {body.window_bytes:,} bytes")
        self.next += self._ring.world_size
        with self._lock:
            self._most, self._version = self._most or body.window_bytes, body.number
            self._released = max(self._released, body.released)
            self._changed.notify_all()
            self._wait(lambda: body.window in self._full or self._end is not None, deadline, f"filling window {body.window}")
            window = self._full.pop(body.window, None)
        if window is None or window.contents is None:
            return self._end or WindowPlaced()
        with span("digest"):
            digests = self._digests(window, window.contents, deadline)
        return WindowPlaced(
            parts=window.contents.parts,
            nbytes=window.contents.nbytes,
            offset=window.contents.offset,
            stamp=self.stamp,
            digests=digests.astype("<u8").tobytes(),
        )

    def _digests(self, window: _Window, contents: WindowContents, deadline: Deadline) -> UInt64:
        if window.copied is None or self._plan is None:
            return contents.digests(deadline)
        with torch.cuda.device(self._ring.memory.device), torch.cuda.stream(self._plan.side):
            wait_for_event(window.copied, deadline, "filling a window of the stream")
            return contents.digests(deadline)


class StreamRole(Publication):
    """A trainer rank's part of rounds whose source is a stream: a region of windows, published by every transport that reads it.

    Raises:
        TransportUnavailable: No transport given can read the windows' memory.
        SharedMemoryTooSmall: There is no memory for them.
        ConfigurationError: A transport cannot encrypt where it must.
    """

    live, order = True, 0
    """Nothing can be read any more when a publication is over, and nothing is placed in an order."""

    def __init__(
        self,
        stream: Stream,
        access: ReaderAccess,
        rank: int,
        world_size: int,
        dtype: DTypes = None,
        formats: ChooseFormats | None = None,
    ) -> None:
        super().__init__(access)
        self.window_bytes, self.windows = stream.capacity, stream.windows
        self.manifest = _NOTHING
        self.epoch = 0
        """The epoch in which this rank publishes; 0 before the coordinator has sent it."""
        kinds = {checkpoint_name(name): kind for name, kind in dtype.items()} if isinstance(dtype, Mapping) else dtype
        self.formats = None if formats is None else StreamFormats(formats, kinds)
        self.highest = -1
        """The highest number under which windows were placed."""
        self._stamps = 0
        self._plan: StreamPlan | None = None
        self._running: tuple[int, int | None, StreamedPublication] | None = None
        """The call of ``publish_stream()`` that goes on, its number once that is known, and what it brings."""
        self._lock = threading.Lock()
        nbytes = self.windows * self.window_bytes
        nowhere, none = np.zeros((0, _NOTHING.dims), np.int64), np.zeros(0, np.int64)
        self.layout = Layout(_NOTHING, none.astype(np.int32), nowhere, nowhere, none.astype(np.int32), none, nowhere, (nbytes,))
        with ExitStack() as owned:
            if stream.device is None:
                self.region = region = PublishedRegion(nbytes, self.layout.digest, windows=True)
                windows = torch.from_numpy(region.payload)
            else:
                device = torch.device(stream.device)
                device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
                windows = torch.empty(nbytes, dtype=torch.uint8, device=device)
                where = (windows.data_ptr(),)
                self.region = CudaRegion((nbytes,), self.layout.digest, lambda: where, int(device.index), windows=True)
            owned.callback(self.region.close)
            self.ring = WindowRing(windows, self.window_bytes, rank, world_size, kinds if formats is None else None)
            memory: Memory = "host" if stream.device is None else "cuda"
            reason = self._publish(self.region, memory, owned)
            if not self._publishers:
                names = ", ".join(transport.name for transport in access.transports)
                raise TransportUnavailable(f"none of {names} reads windows in {memory} memory{reason and ': '}{reason}")
            self._owned = owned.pop_all()

    def begin(self, call: int, number: int | None) -> StreamedPublication:
        """Begin a publication, which answers the coordinator's calls for ``call`` from now on until :meth:`end`."""
        self._stamps += 1
        plan, self._plan = self._plan, None
        publication = StreamedPublication(self.ring, self._stamps, plan, self.formats)
        if self.formats is not None:
            self.formats.begin()
        with self.region.placing(self._stamps):
            pass  # windows change while it is readable; a reader of one that changes is not in the round any more
        with self._lock:
            self._running = call, number, publication
        return publication

    def end(self) -> None:
        """End the publication: its windows are not readable any more, and no thread waits for them."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            self._plan = running[2].plan
            running[2].stop(Aborted("the publication of this stream is over"))
        self.withdraw()

    def handle(self, body: Body, timeout: float) -> Body:
        """Answer a call of the coordinator. Raises :class:`~weightsync.errors.Aborted` if that number is not being published."""
        if not isinstance(body, PlaceWindow):
            return Done()
        failpoints.reached("trainer.received.window")
        with self._lock:
            running = self._running
            if (
                running is None
                or running[0] != body.call
                or running[1] not in (None, body.number)
                or running[2].next != body.window
            ):
                raise Aborted(f"this trainer rank is not publishing version {body.number} (any more)")
            self._running = body.call, body.number, running[2]
        self.epoch, self.highest = body.epoch, max(self.highest, body.number)
        placed = running[2].window(body, Deadline(timeout))
        failpoints.reached("trainer.window")
        return placed

    def close(self) -> None:
        """Stop serving and free the windows. Safe twice."""
        self.end()
        self._plan = None
        self.ring = replace(self.ring, memory=self.ring.memory.new_empty(0))  # its views would keep the region mapped
        super().close()


def stream_item(item: object) -> tuple[str, torch.Tensor]:
    """Name and tensor of an item of a stream.

    Raises:
        ConfigurationError: It is not a name and a whole, plain tensor.
    """
    match item:
        case (str() as name, torch.Tensor() as tensor):
            if hasattr(tensor, "full_tensor"):
                raise ConfigurationError(f"a stream brings whole tensors, and {name} is a DTensor: yield {name}.full_tensor()")
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
                raise ConfigurationError(f"{name} is not a plain tensor with memory ({tensor.layout}, {tensor.device})")
            if hasattr(tensor, "__tensor_flatten__"):
                if not hasattr(tensor, "trigger_wait"):  # of a collective that may still run: its copy waits
                    raise ConfigurationError(
                        f"{name} is a {type(tensor).__qualname__}, which wraps other tensors: yield a plain one"
                    )
            elif tensor.numel() and not tensor.untyped_storage().nbytes():
                raise ConfigurationError(f"the memory of {name} was freed (a gathered parameter that was sharded again?)")
            return checkpoint_name(name), tensor
    raise ConfigurationError(f"a stream yields pairs of a name and a tensor, not {type(item).__name__}")
