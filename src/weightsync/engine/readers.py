"""Connections of one engine rank to the trainer ranks that its plan names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightsync import failpoints
from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationError, DeadlineExceeded, TransportError, TransportUnavailable, WeightSyncError
from weightsync.protocol.messages import Host, Offer, SourceAddress
from weightsync.spans import span
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.base import Completion, Reader, Transport
from weightsync.transports.registry import choose

_log = logging.getLogger(__name__)


class Stopwatch:
    """Adds up the seconds between laps under the name of each lap, in :attr:`seconds`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class _Read:
    """What one reader reads: from whom, how, and the bytes of each group."""

    source: str
    transport: str
    group_bytes: Sequence[int]


def _together(reads: Sequence[_Read]) -> _Read:
    """What one reader reads in the place of several."""
    first, more = reads[0], len(reads) - 1
    source = f"{first.source} and {more} more" if more else first.source
    return _Read(source, first.transport, [sum(sizes) for sizes in zip(*(read.group_bytes for read in reads), strict=True)])


class Readers:
    """The connections to the trainer ranks of one plan. Iterating gives the readers to use: some stand for several connections.

    Not thread-safe, except :meth:`abort`. ``check_abort`` raises :class:`~weightsync.errors.Aborted` once the call that is running
    was aborted. An abort must become visible to ``check_abort`` before it calls :meth:`abort`: then none is lost while connections
    are being made.
    """

    def __init__(self, allowed: Sequence[Transport], host: Host, encrypted: bool, check_abort: Callable[[], None]) -> None:
        self._allowed, self._host, self._encrypted = allowed, host, encrypted
        self._check_abort = check_abort
        self._connections: list[Reader] = []
        self._opened: list[tuple[Transport, Reader]] = []
        self._transports: dict[str, Transport] = {}
        self._by_transport: dict[str, list[Reader]] = {}
        self._read: dict[Reader, _Read] = {}

    def connect(
        self,
        sources: Sequence[SourceAddress],
        tables: Sequence[Sequence[CopyTable]],
        device: torch.device | None,
        deadline: Deadline,
        stopwatch: Stopwatch,
    ) -> None:
        """Connect to every source and prepare its reader for its copy tables. Targets are on ``device`` (``None``: the host).

        Readers of one transport that combine are used as one. Called again, it prepares the same connections for other tables.
        """
        self._by_transport = {}
        self._read = {reader: read for reader, read in self._read.items() if reader in self._connections}  # not combined ones
        for index, (source, groups) in enumerate(zip(sources, tables, strict=True)):
            if index == len(self._opened):
                self._opened.append(self.open(source, device, deadline))
            transport, reader = self._opened[index]
            self._by_transport.setdefault(transport.name, []).append(reader)
            stopwatch.lap("connect")
            with span("map", source.member):
                self.prepare(reader, transport, source, groups, deadline)
            stopwatch.lap("map")
        self._check_abort()
        for name, transport in self._transports.items():
            combined = transport.combine(self._by_transport[name])
            if combined is not None:
                self._read[combined] = _together([self._read[reader] for reader in self._by_transport[name]])
                self._by_transport[name] = [combined]

    def open(self, source: SourceAddress, device: torch.device | None, deadline: Deadline) -> tuple[Transport, Reader]:
        """Connect to one source. Its reader is the caller's to prepare and to use; :meth:`abort` and :meth:`close` reach it."""
        self._check_abort()
        with span("connect", source.member):
            transport, reader = self._connected(source, device, deadline)
        self._connections.append(reader)
        self._transports[transport.name] = transport
        self._check_abort()  # an abort that came before the reader was in the list did not reach it
        return transport, reader

    def _connected(self, source: SourceAddress, device: torch.device | None, deadline: Deadline) -> tuple[Transport, Reader]:
        """The best transport that reaches this trainer rank, and a reader that writes on CUDA ``device``, or in host memory.

        Offers whose bytes would cross a network in clear are refused where bytes must be encrypted.
        """
        failures: list[str] = []
        try:
            choices = choose(source.offers, writing(device, self._allowed), self._host)
        except TransportUnavailable as error:
            advice = _advice(source.offers, self._allowed, device)
            raise TransportUnavailable(f"{error}{advice}") from None
        for transport, offer in choices:
            encrypted = transport.traits.encrypted and offer.traits.encrypted
            try:
                if self._encrypted and transport.traits.reach == "network" and not encrypted:
                    raise TransportUnavailable(
                        "not encrypted, and this engine rank insists on it: set WEIGHTSYNC_DATA_ENCRYPTION alike on both sides"
                    )
                if device is None:
                    return transport, transport.open(offer, source.key, deadline)
                with torch.cuda.device(device):
                    return transport, transport.open(offer, source.key, deadline)
            except TransportUnavailable as error:
                failures.append(f"{offer.scheme}: {error}")
            except (TransportError, AuthenticationError, DeadlineExceeded) as error:
                _log.warning("source %s cannot be reached by %s: %a", source.member, offer.scheme, str(error))
                # The reason stays here: offers come from others, who could look around with them in this engine's network.
                failures.append(f"{offer.scheme}: it cannot be reached (this engine rank's own log says why)")
        raise TransportUnavailable(f"no transport reaches source {source.member}: {'; '.join(failures)}")

    def prepare(
        self, reader: Reader, transport: Transport, source: SourceAddress, groups: Sequence[CopyTable], deadline: Deadline
    ) -> None:
        """Prepare one reader for its copy tables."""
        reader.prepare(groups, source.layout_digest, deadline)
        self._read[reader] = _Read(source.member, transport.name, [group.nbytes for group in groups])

    def __iter__(self) -> Iterator[Reader]:
        return (reader for readers in self._by_transport.values() for reader in readers)

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports in use, each once."""
        return tuple(self._transports)

    @property
    def digest_inline(self) -> bool:
        """Whether all readers can take digests while they write."""
        return all(transport.traits.digests == "inline" for transport in self._transports.values())

    @property
    def sharing_fate(self) -> list[Reader]:
        """The readers that may wait for other engine ranks."""
        waiting = [name for name, transport in self._transports.items() if transport.traits.shared_fate]
        return [reader for name in waiting for reader in self._by_transport[name]]

    def require(self, version: int, deadline: Deadline) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` if a trainer rank is known not to hold ``version``. Begins nothing."""
        for reader in self:
            with self._naming(reader):
                reader.require(version, deadline)

    def begin(self, version: int, deadline: Deadline) -> None:
        """Begin the transfer of ``version`` on every reader."""
        for reader in self:
            with self._naming(reader):
                reader.begin(version, deadline)

    def read(self, group: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """Read one group from every source, as :meth:`Reader.submit` says: all are asked before the first is waited for."""
        for reader, completion in [(reader, reader.submit(group, deadline, digests)) for reader in self]:
            self.finish(reader, group, completion, deadline)

    def finish(self, reader: Reader, group: int, completion: Completion, deadline: Deadline) -> None:
        """Wait until a group that was asked for is in place."""
        with self._reading(reader, group):
            completion.wait(deadline)
        failpoints.reached("engine.group")

    def read_alone(self, reader: Reader, version: int, deadline: Deadline, digests: UInt64 | None = None) -> None:
        """Begin, read and end one reader that has one group."""
        self._check_abort()
        with self._naming(reader):
            reader.begin(version, deadline)
        self._check_abort()  # a begin clears an earlier abort
        with self._reading(reader, 0):
            reader.read(0, deadline, digests)
        failpoints.reached("engine.group")
        with self._naming(reader):
            reader.end(deadline)

    @contextmanager
    def _reading(self, reader: Reader, group: int) -> Iterator[None]:
        """Record the block, which waits until a group is in place, as a read from the reader's source."""
        read = self._read[reader]
        with span("read", read.source, read.transport, read.group_bytes[group]), self._naming(reader):
            yield

    @contextmanager
    def _naming(self, reader: Reader) -> Iterator[None]:
        """Name the reader's source in errors of the block: a transport does not know its name."""
        source = self._read[reader].source
        try:
            yield
        except WeightSyncError as error:
            error.args = (f"source {source}: {error}",)
            raise

    def end(self, deadline: Deadline) -> None:
        """End what :meth:`begin` began."""
        for reader in self:
            with self._naming(reader):
                reader.end(deadline)

    def abort(self) -> None:
        """Make whatever a reader does in another thread raise ``Aborted`` soon. Never blocks."""
        for reader in list(self._connections):
            reader.abort()

    def close(self) -> None:
        """Close all connections, the newest first. Safe twice."""
        connections, self._connections, self._opened = self._connections, [], []
        self._transports, self._by_transport, self._read = {}, {}, {}
        for reader in reversed(connections):
            reader.close()


def writing(device: torch.device | None, transports: Sequence[Transport]) -> list[Transport]:
    """The transports that write to the memory of ``device``, or (``None``, or the CPU) to that of the host."""
    memory = "host" if device is None or device.type == "cpu" else device.type
    return [transport for transport in transports if memory in transport.traits.writes]


def reaches(device: torch.device | None, sources: Sequence[SourceAddress], allowed: Sequence[Transport]) -> bool:
    """Returns True if every source offers an allowed transport that writes to ``device``."""
    usable = {transport.name for transport in writing(device, allowed)}
    return all(any(offer.scheme in usable for offer in source.offers) for source in sources)


def _advice(offers: Sequence[Offer], allowed: Sequence[Transport], device: torch.device | None) -> str:
    """What to change where one side is in GPU memory and the other is not."""
    offered = {offer.scheme for offer in offers}
    if device is not None and not any(transport.name in offered for transport in writing(device, allowed)):
        return (
            f".\nThis engine rank's parameters are on {device}, where only cuda_ipc (this host) and nccl write. Give the trainer "
            "transports with cuda_ipc, all its shards on one CUDA device and no dtype to convert to; or give both sides nccl; "
            "or this engine delivery='streamed'"
        )
    if device is None and not any("host" in offer.traits.writes for offer in offers) and writing(None, allowed):
        return (
            ".\nThe trainer's GPU memory is read in place, by engine ranks on a CUDA device of the same host; this one receives in "
            "host memory. Give the trainer transports=['shared_memory', 'tcp'], or let the adapter's device() name a CUDA device"
        )
    return ""
