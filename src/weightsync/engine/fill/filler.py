"""What fillers have in common: connected readers and a lifecycle; and, of those of a plan, the checked plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.engine.readers import Readers, Stopwatch, reaches
from weightsync.engine.session import EngineSession
from weightsync.errors import PlanMismatch
from weightsync.model import Layout, Manifest
from weightsync.planning.coverage import Coverage, coverage_of
from weightsync.planning.pieces import Pieces
from weightsync.protocol.messages import Host, PlanSlice, SourceAddress
from weightsync.spans import span
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.digest import PUBLIC, DigestConstants, digest_rows
from weightsync.transports.base import Transport

_FREE_SHARE = 4  # of a GPU's free memory, changes take one part at most


@dataclass(frozen=True)
class FillContext:
    """What every filler of one engine rank needs, whatever the plan.

    Attributes:
        engine: The session of the engine rank.
        manifest: The tensors that this engine takes.
        transports: Those that may be used, best first.
        host: Where this engine rank runs.
        staging_device: The CUDA device on which buckets for the loader belong; ``None`` for host memory.
        bucket_bytes: The largest staging bucket that a plan may ask for (or the largest tensor, if that is more).
        bounded: ``bucket_bytes`` was given, and bounds what changes take in GPU memory, too.
        buffers: Staging buckets: two, or one, which saves memory and overlaps nothing.
        encrypted: Bytes must not leave the machine in clear.
        rank: The number of this rank in its replica.
        check_memory: Raises :class:`~weightsync.errors.PlanMismatch` if the parameters are other views than those of the plan.
        progress: Called with the bytes in place so far, except after the last ones, which the result reports.
    """

    engine: EngineSession
    manifest: Manifest
    transports: Sequence[Transport]
    host: Host
    staging_device: torch.device | None
    bucket_bytes: int
    bounded: bool
    buffers: int
    encrypted: bool
    rank: int
    check_memory: Callable[[], None]
    progress: Callable[[int], None]

    def staging_for(self, sources: Sequence[SourceAddress]) -> torch.device | None:
        """Where buckets lie: on the engine's CUDA device if every source can be read from there; otherwise in host memory."""
        device = self.staging_device
        return device if device is not None and reaches(device, sources, self.transports) else None

    def room_for_changes(self, device: torch.device | None) -> int:
        """Bytes that staged changes may take: two buckets; on a GPU a quarter of what is free there, unless buckets were given."""
        if device is None or self.bounded:
            return self.bucket_bytes * self.buffers
        return torch.cuda.mem_get_info(device)[0] // _FREE_SHARE

    @property
    def readers(self) -> Readers:
        """Readers without a connection."""
        return Readers(self.transports, self.host, self.encrypted, self.engine.check_abort)


@dataclass(frozen=True)
class Filled:
    """What one run of a filler brought.

    Attributes:
        digests: ``uint64[rows]``, the digest of each row of the plan's layout.
        verified: ``"installed"`` if they are of the engine's parameters, ``"received"`` if of what its loader was handed.
        receive_seconds: Spent waiting for bytes. Digests that are taken in the same pass over memory are included.
        load_seconds: Spent in the engine's loader. Overlaps with ``receive_seconds``; both are counted in full.
        digest_seconds: Spent on digests of what was read again.
    """

    digests: UInt64
    verified: Literal["installed", "received"]
    receive_seconds: float
    load_seconds: float = 0.0
    digest_seconds: float = 0.0


class Filler(ABC):
    """Fills one engine rank's memory, in every round of one plan or from the streams of one trainer.

    The lifecycle is :meth:`prepare` once, while the engine still serves; then rounds, while it is paused; :meth:`close`, also after
    an error of either. After an error of a round a filler is closed, not used again. Not thread-safe, except :meth:`abort`.
    """

    digest: str
    """Names what is prepared."""
    nbytes = 0
    """Bytes that one round brings."""

    def __init__(self, context: FillContext) -> None:
        self._context = context
        self._owned = ExitStack()
        self._readers = self._reading = context.readers
        """All connections of the plan, and those of the round that runs."""

    @abstractmethod
    def prepare(self, deadline: Deadline) -> None:
        """Allocate staging, and connect to every source."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports in use, each once."""
        return self._readers.transports

    def abort(self) -> None:
        """Make a :meth:`prepare` or a round in another thread end soon. Never blocks."""
        self._readers.abort()

    def close(self) -> None:
        """Close the connections and free the staging."""
        self._owned.close()


class PlanFiller(Filler):
    """Fills one engine rank's memory with the rows of one plan, by one :meth:`run` in each round of it.

    Args:
        groups: Ascending, half-open ranges of rows that are read together.
        device: The CUDA device that is written to; ``None`` for host memory.
        addresses: Where each region of ``layout`` begins; streamed delivery sets them in :meth:`prepare`.

    Raises:
        PlanMismatch: The plan is not the one that the coordinator computed.
    """

    staging_bytes = 0
    """Bytes of staging memory that this filler holds."""

    def __init__(
        self,
        context: FillContext,
        plan: PlanSlice,
        layout: Layout,
        groups: list[tuple[int, int]],
        device: torch.device | None,
        addresses: tuple[int, ...] = (),
    ) -> None:
        super().__init__(context)
        self.plan, self.layout, self.device = plan, layout, device
        self._stopwatch = Stopwatch()
        self.prepare_seconds = self._stopwatch.seconds
        """Seconds of each part of :meth:`prepare`: ``tiles``, ``connect``, ``map`` (which prepares the readers), ``tables``."""
        self._groups, self._addresses = groups, addresses
        self._group_bytes: list[int] = []
        self._pieces = Pieces.from_columns(context.manifest, layout, len(plan.sources), plan.pieces)
        self.digest = self._pieces.digest
        if self.digest != plan.digest:
            raise PlanMismatch(f"the plan arrived with digest {self.digest}, not {plan.digest} as the coordinator computed it")

    def prepare(self, deadline: Deadline) -> None:
        """Allocate staging, connect to every source and build the tables, so that the first round does not have to."""
        self._owned.callback(self._readers.close)
        tables = tiles_of(self._context.manifest, self._pieces, self.layout, self._addresses, self._groups)
        del self._pieces
        self._stopwatch.lap("tiles")
        self._tables = tables
        self._group_bytes = [sum(groups[index].nbytes for groups in tables) for index in range(len(self._groups))]
        self.nbytes = sum(self._group_bytes)
        self._readers.connect(self.plan.sources, tables, self.device, deadline, self._stopwatch)

    @abstractmethod
    def run(self, version: int, deadline: Deadline, constants: DigestConstants = PUBLIC) -> Filled:
        """Bring every byte of ``version`` to its place, and return its digests, with ``constants``.

        Raises what readers raise (:class:`~weightsync.errors.StaleSource`, :class:`~weightsync.errors.PeerLost`,
        :class:`~weightsync.errors.ProtocolError`), what loaders raise, :class:`~weightsync.errors.Aborted`,
        :class:`~weightsync.errors.DeadlineExceeded`, and :class:`~weightsync.errors.PlanMismatch` if the parameters were replaced.
        """

    def _read_host(self, group: int, digests: UInt64, deadline: Deadline, constants: DigestConstants = PUBLIC) -> None:
        """Read one group into host memory. Rows are digested by the readers, or afterwards if one of them cannot.

        Readers know the public constants only, so a keyed digest is taken afterwards too.
        """
        self._context.engine.check_abort()
        if self._reading.digest_inline and constants is PUBLIC:
            self._reading.read(group, deadline, digests)
        else:
            self._reading.read(group, deadline)
            with span("digest"):
                for first, end in self._digested(group):
                    digest_rows(self._context.manifest, self.layout, self._addresses, first, end, digests, constants)

    def _digested(self, group: int) -> list[tuple[int, int]]:
        """The rows of a group that are moved, as half-open ranges."""
        return [self._groups[group]]

    def _report(self, nbytes: int) -> None:
        """Report progress, except of the last bytes, which the result reports."""
        if nbytes < self.nbytes:
            self._context.progress(nbytes)

    @property
    def table_bytes(self) -> int:
        """Bytes of device memory that the copy tables of the readers take."""
        return sum(reader.table_bytes for reader in self._readers)

    def require(self, version: int, deadline: Deadline) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` if a trainer rank is known not to hold ``version``. Begins nothing."""
        self._readers.require(version, deadline)

    def fits(self, plan: PlanSlice, addresses: tuple[int, ...]) -> bool:
        """Returns True if this filler serves ``plan``, with the engine's parameters at ``addresses``. A loader may be given any."""
        same = (plan.digest, plan.sources, plan.layout) == (self.plan.digest, self.plan.sources, self.plan.layout)
        return same and (self.plan.delivery == "streamed" or addresses == self._addresses)

    @cached_property
    def cover(self) -> Coverage:
        """The coverage of what this rank receives. Raises :class:`~weightsync.errors.LayoutError` unless it is everything."""
        return coverage_of(self._context.manifest, {"": self.layout}, "this engine rank")
