"""The windows of a stream: each is received into a bucket while the engine's loader works on the one before."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.fill.filler import FillContext, Filled, Filler
from weightsync.engine.fill.receive_ahead import ReceiverThread
from weightsync.errors import BroadcastBroken, LayoutError, ManifestMismatch, ProtocolError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.model.window import KnownWindows, Measured, StreamedTensors, WindowPart, measured, window_layout
from weightsync.planning.pieces import Pieces
from weightsync.protocol.messages import MoveWindow, OpenStream, SourceAddress, WindowPlaced
from weightsync.spans import span
from weightsync.tensors.copy_table import CopyTable, tiles_of
from weightsync.tensors.cuda.digest import LayoutDigest
from weightsync.tensors.cuda.waiting import wait_for_device
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.shards import torch_dtype
from weightsync.tensors.staging import Buffer, staging_buffer
from weightsync.transports.base import Reader, Transport
from weightsync.transports.host.memory import available_bytes

_LEAST_WINDOW = 4096  # a stream's windows may always have so many bytes
_ATTEMPTS = 3  # of a window that is broadcast: with all readers, with those that are left, alone


class _WindowAt(NamedTuple):
    """Parts, manifest and layout of a window, the ``order`` of its rows, and each row's place at the trainer."""

    parts: Measured
    manifest: Manifest
    layout: Layout
    order: list[int]
    published: Layout

    @classmethod
    def of(cls, parts: tuple[WindowPart, ...], nbytes: int) -> _WindowAt:
        return cls(measured(parts), *window_layout(parts, nbytes, assembled=True), window_layout(parts, nbytes)[1])


class WindowFiller(Filler):
    """Takes windows from the trainer ranks of ``body``, in order, and hands their tensors to the engine's loader.

    For each stream the order of calls is :meth:`begin`, :meth:`move` for each window, :meth:`end`. Holds two buckets (or one), and
    the tensor that is larger than a window while its parts come.

    Raises:
        LayoutError: The windows are larger than this engine rank's buckets.
    """

    def __init__(self, context: FillContext, body: OpenStream, *, takes_any: bool) -> None:
        super().__init__(context)
        most = max(context.bucket_bytes, _LEAST_WINDOW)
        if body.window_bytes > most:
            raise LayoutError(f"a stream comes in windows of {body.window_bytes:,} bytes; this engine rank allows {most:,}")
        self.digest, self._body, self._takes_any = body.key, body, takes_any
        self._sources: list[tuple[Transport, Reader, SourceAddress]] = []
        self._device = context.staging_for(body.sources)
        self._buffers: list[Buffer] = []
        self._stream: torch.cuda.Stream | None = None
        self._known = KnownWindows(_WindowAt.of)
        self._thread = ReceiverThread(self._readers.abort)
        self.begin()

    def _free_bytes(self) -> int | None:
        return available_bytes() if self._device is None else None

    def prepare(self, deadline: Deadline) -> None:
        """See :meth:`Filler.prepare`."""
        context = self._context
        self._owned.callback(self._readers.close)
        for source in self._body.sources:
            transport, reader = self._readers.open(source, self._device, deadline)
            self._sources.append((transport, reader, source))
            if transport.traits.shared_fate:  # which finds out now whether it can send to this device
                self._readers.prepare(reader, transport, source, [CopyTable.empty()], deadline)
        context.engine.check_abort()
        self._buffers = [staging_buffer(self._body.window_bytes, self._device, self._free_bytes()) for _ in range(context.buffers)]
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a stream. :attr:`nbytes` are its bytes so far."""
        self.nbytes = self._next = 0
        self._tensors = StreamedTensors()
        self._parts: dict[str, Buffer] = {}  # of a tensor that has not come whole
        self._pending: list[tuple[str, torch.Tensor]] = []
        self._thread.seconds = self._load_seconds = 0.0

    def move(self, body: MoveWindow, deadline: Deadline) -> UInt64:
        """Receive a window while the loader works on the one before. Returns the digest of each part of the window.

        Raises:
            ManifestMismatch: A tensor came that the engine does not take, or came twice.
            ProtocolError: The window is not the next one, or describes something impossible.
        """
        if body.window != self._next or body.source >= len(self._sources):
            raise ProtocolError(f"window {body.window} of source {body.source} came instead of window {self._next}")
        self._next += 1
        placed, bucket = body.placed, self._buffers[body.window % len(self._buffers)]
        if not 0 <= placed.nbytes <= self._body.window_bytes or placed.offset < 0:
            raise ProtocolError(f"a window of {placed.nbytes:,} bytes at {placed.offset} is not one of this stream")
        if not self._takes_any:
            for part in placed.parts:
                self._check(part)
        with self._thread.stopping():
            if len(self._buffers) == 1:
                self._load(deadline)
            self._thread.start(self._receive, body, bucket, deadline)
            self._load(deadline)
            digests: UInt64 = self._thread.result("receiving a window", deadline)
        self._tensors.add_window(self._known.get(body.window, placed.parts, placed.nbytes).parts, digests.tolist())
        self._pending = self._arrived(placed, bucket)
        self.nbytes = self._tensors.nbytes
        self._context.progress(self.nbytes)
        return digests

    def end(self, fingerprint: str, deadline: Deadline) -> Filled:
        """Load what is left. The digests are of all tensors, in the order of the stream's manifest.

        Raises:
            ManifestMismatch: The stream did not bring every tensor that the engine takes.
            ProtocolError: The stream's manifest is another one than the coordinator's.
        """
        self._load(deadline)
        self._known.end(self._next)
        manifest, received = self._tensors.end()
        if manifest.fingerprint != fingerprint:
            raise ProtocolError(f"the stream brought tensors with fingerprint {manifest.fingerprint}, not {fingerprint}")
        if self._takes_any:
            return Filled(received, "received", self._thread.seconds, self._load_seconds)
        own = self._context.manifest
        came = {own.index[spec.name] for spec in manifest}
        missing = [spec.name for index, spec in enumerate(own) if index not in came and spec.size]
        if missing:
            raise ManifestMismatch(f"the stream did not bring {missing[0]} ({len(missing)} of {len(own)} tensors of the engine)")
        started = time.perf_counter()
        with span("digest"):
            installed = self._context.engine.read_back(deadline)
        if installed is None or not came <= {*installed[0].tolist(), *(i for i, spec in enumerate(own) if not spec.size)}:
            return Filled(received, "received", self._thread.seconds, self._load_seconds)
        by_index = dict(zip(installed[0].tolist(), installed[1].tolist(), strict=True))
        digests = np.array([by_index.get(own.index[spec.name], 0) for spec in manifest], np.uint64)
        return Filled(digests, "installed", self._thread.seconds, self._load_seconds, time.perf_counter() - started)

    def _check(self, part: WindowPart) -> None:
        """Raise unless the part is possible, and the engine takes this tensor."""
        part.check()
        own = self._context.manifest
        index = own.index.get(part.name)
        if index is None:
            raise ManifestMismatch(f"the stream brings {part.name}, which the engine does not take")
        spec = own[index]
        if (spec.shape, spec.dtype) != (part.shape, part.dtype):
            Manifest([part.spec]).check_same(Manifest([TensorSpec(part.name, spec.shape, spec.dtype)]))

    def _load(self, deadline: Deadline) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        started = time.perf_counter()
        self._context.engine.load(pending)
        if self._device is not None:
            wait_for_device(self._device, deadline, "the engine's loader")  # its bucket is filled again
        self._load_seconds += time.perf_counter() - started

    def _receive(self, body: MoveWindow, bucket: Buffer, deadline: Deadline) -> UInt64:
        placed, inline = body.placed, self._sources[body.source][0].traits.digests == "inline"
        _, manifest, layout, order, published = self._known.get(body.window, placed.parts, placed.nbytes)
        where = [_address(bucket), *(_address(self._whole(part)) for part in placed.parts if not part.whole)]
        addresses = tuple(where[: len(layout.regions)])
        table = _table(placed, manifest, layout, published, addresses)
        rows = np.zeros(len(layout), np.uint64)
        if self._device is None:
            self._read(body, table, deadline, rows if inline else None)
            if not inline:
                digest_rows(manifest, layout, addresses, 0, len(layout), rows)
        elif len(layout):
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._read(body, table, deadline)
                digest = LayoutDigest(manifest, layout, addresses, self._device)
                digest.launch()
                wait_for_device(self._device, deadline, "digesting a window")
                rows = digest.taken()
        digests = np.zeros(len(placed.parts), np.uint64)
        digests[order] = rows
        return digests

    def _read(self, body: MoveWindow, table: CopyTable, deadline: Deadline, digests: UInt64 | None = None) -> None:
        transport, reader, source = self._sources[body.source]
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._context.engine.check_abort()
                self._readers.prepare(reader, transport, source, [table], deadline)
                self._readers.read_alone(reader, body.placed.stamp, deadline, digests)
                return
            except BroadcastBroken:  # the window stays where it is until this engine rank has it
                if attempt == _ATTEMPTS:
                    raise
                if digests is not None:
                    digests.fill(0)

    def _whole(self, part: WindowPart) -> Buffer:
        """The memory in which the parts of a tensor are put together."""
        if part.name not in self._parts:
            self._parts[part.name] = staging_buffer(part.spec.nbytes, self._device, self._free_bytes())
        return self._parts[part.name]

    def _arrived(self, placed: WindowPlaced, bucket: Buffer) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are whole now, in the order in which they came."""
        tensors = []
        for part in sorted(placed.parts, key=lambda part: part.offset):
            if not self._tensors.complete(part.name):
                continue
            memory = bucket[part.offset : part.offset + part.nbytes] if part.whole else self._parts.pop(part.name)
            flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
            name = part.name if self._takes_any else self._context.manifest[self._context.manifest.index[part.name]].name
            tensors.append((name, flat.view(torch_dtype(part.dtype)).view(part.shape)))
        return tensors

    def close(self) -> None:
        """See :meth:`Filler.close`. Deferred while something is received. The buckets are freed with their last user."""
        self._pending = []
        self._thread.when_idle(self._owned.close)


def _address(buffer: Buffer) -> int:
    return buffer.data_ptr() if isinstance(buffer, torch.Tensor) else int(buffer.ctypes.data)


def _table(placed: WindowPlaced, manifest: Manifest, layout: Layout, published: Layout, addresses: tuple[int, ...]) -> CopyTable:
    """What to copy from the trainer's region, where the window begins at ``placed.offset``."""
    rows = len(layout)
    pieces = Pieces(
        ("",),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int32),
        published.offset + placed.offset,
        published.strides,
        np.arange(rows, dtype=np.int32),
        published.starts,
        published.stops,
    )
    return tiles_of(manifest, pieces, layout, addresses, [(0, rows)] if rows else [])[0][0] if rows else CopyTable.empty()
