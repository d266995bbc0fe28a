"""Everything that an engine rank prepares for one plan: connections, copy tables, groups, staging. Made while still serving."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.engine.device_streaming import DeviceStream
from weightsync.errors import Aborted, AuthenticationError, DeadlineExceeded, PlanMismatch, TransportError, TransportUnavailable
from weightsync.model import Layout, Manifest
from weightsync.planning.coverage import Cover, cover
from weightsync.planning.pieces import Pieces
from weightsync.protocol.messages import Host, Offer, PlanSlice, SourceAddress
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.device_memory import DeviceDigest
from weightsync.tensors.staging import Staging, check_size
from weightsync.transports.base import Reader, Transport
from weightsync.transports.select import choose

__all__ = ["Route", "StagingSettings", "row_groups"]

_log = logging.getLogger(__name__)

_GROUP_BYTES = 32 << 20  # between groups the engine looks for an abort and reports its progress


@dataclass(frozen=True)
class StagingSettings:
    """What this engine rank allows for streamed delivery, whatever a plan asks for.

    ``bucket_bytes``: of one bucket (or the largest tensor, if that is more); ``buffers``: two, or one, which saves memory and
    overlaps nothing; ``reads_back``: the engine's parameters are digested themselves, so staging on a device need not be.
    """

    bucket_bytes: int = 256 << 20
    buffers: int = 2
    reads_back: bool = False


def row_groups(manifest: Manifest, layout: Layout, group_bytes: int = _GROUP_BYTES) -> list[tuple[int, int]]:
    """Ranges of consecutive rows of about ``group_bytes`` each (a larger row is a group of its own)."""
    sizes = layout.sizes() * manifest.itemsizes[layout.tensor]
    if not len(sizes):
        return []
    group = (np.cumsum(sizes) - 1) // group_bytes
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    return [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def _connect(
    address: SourceAddress,
    allowed: Sequence[Transport],
    device: torch.device | None,
    here: Host,
    deadline: Deadline,
    encrypted: bool = False,
) -> tuple[Transport, Reader]:
    """A source of this trainer rank's bytes that can write where they belong: on CUDA ``device``, or (``None``) in host memory.

    Where bytes leave the machine, none comes without encryption if they must be ``encrypted``.
    """
    failures: list[str] = []
    try:
        choices = choose(address.offers, writing(device, allowed), here)
    except TransportUnavailable as error:
        advice = _advice(address.offers, allowed, device)
        raise TransportUnavailable(f"{error}{advice}") from None
    for transport, offer in choices:
        try:
            if encrypted and transport.traits.reach == "network" and not (transport.traits.encrypted and offer.traits.encrypted):
                raise TransportUnavailable(
                    "not encrypted, and this engine rank insists on it: set WEIGHTSYNC_DATA_ENCRYPTION alike on both sides"
                )
            if device is None:
                return transport, transport.open(offer, address.key, deadline)
            with torch.cuda.device(device):
                return transport, transport.open(offer, address.key, deadline)
        except TransportUnavailable as error:
            failures.append(f"{offer.scheme}: {error}")
        except (TransportError, AuthenticationError, DeadlineExceeded) as error:
            _log.warning("trainer rank %s cannot be reached by %s: %a", address.member, offer.scheme, str(error))
            # The reason stays here: offers come from others, who could look around with them in this engine's network.
            failures.append(f"{offer.scheme}: it cannot be reached (this engine rank's own log says why)")
    raise TransportUnavailable(f"no way to trainer rank {address.member} works: {'; '.join(failures)}")


def writing(device: torch.device | None, transports: Sequence[Transport]) -> list[Transport]:
    """Those that write to the memory of CUDA ``device``, or (``None``, or the CPU) to that of the host."""
    memory = "host" if device is None else {"cpu": "host"}.get(device.type, device.type)
    return [one for one in transports if memory in one.traits.writes]


def _advice(offers: Sequence[Offer], allowed: Sequence[Transport], device: torch.device | None) -> str:
    """What to change where one side is in GPU memory and the other is not."""
    offered = {offer.scheme for offer in offers}
    if device is not None and not any(one.name in offered for one in writing(device, allowed)):
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


def _reaches(device: torch.device | None, plan: PlanSlice, allowed: Sequence[Transport]) -> bool:
    """Whether all the bytes of this plan can come straight to ``device``."""
    usable = {one.name for one in writing(device, allowed)}
    return all(any(one.scheme in usable for one in source.offers) for source in plan.sources)


class _Split:
    """Adds up the time between laps."""

    def __init__(self, times: dict[str, float]) -> None:
        self._times, self._last = times, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._times[name] = self._times.get(name, 0.0) + now - self._last
        self._last = now


class Route:
    """One engine rank's way through one plan. Raises :class:`~weightsync.errors.PlanMismatch` if the plan does not fit.

    ``addresses`` are those of the engine's own regions (direct delivery); for streamed delivery the route owns the staging, whose
    size it states in :attr:`staging_bytes` and which :class:`StagingSettings` bounds. ``device`` is the CUDA device that holds the
    regions, or on which staging belongs, ``None`` for host memory. On a device all sources that it maps are read in one launch
    (:attr:`combined`), the others (:attr:`carried`) one after the other, and all is digested in another (:attr:`digest_of`);
    all at once, or bucket by bucket, by :attr:`stream` if it maps them all. Trainers that serve copies in host memory, and not by
    ``nccl``, are streamed to host memory, wherever the engine is.

    ``turn`` is this rank's number in its replica: where it reads directly from one source after the other, it begins with that one,
    so that the ranks do not all ask the same trainer rank at once.

    Made, then opened: another thread may :meth:`abort` it meanwhile, and close it in any case.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: PlanSlice,
        own: Layout | None,
        addresses: tuple[int, ...],
        device: torch.device | None = None,
        settings: StagingSettings = StagingSettings(),
        turn: int = 0,
    ) -> None:
        self._manifest = manifest
        self.plan = plan
        self.device = device
        self.combined: Reader | None = None
        self.digest_of: DeviceDigest | None = None
        self.stream: DeviceStream | None = None
        self.layout = Layout.from_columns(manifest, plan.layout)
        self.staging: Staging | None = None
        self.addresses = addresses
        self.settings = settings
        self.sources: list[Reader] = []
        self.carried: list[Reader] = []
        self._turn = turn
        self.schemes: list[str] = []
        self._transport: Transport | None = None
        self.group_bytes: list[int] = []
        self.nbytes = 0
        self.times: dict[str, float] = {}
        """Seconds of each part of :meth:`open`: ``tiles``, ``connect``, ``map`` (which prepares the sources), ``tables``."""
        self._aborted = threading.Event()
        self._owned = ExitStack()
        self._user: Future[None] | None = None
        if plan.delivery == "direct":
            if own is None or own.digest != self.layout.digest:
                raise PlanMismatch(
                    "the plan was made for another layout than this engine rank's: its parameters were rebuilt; register again"
                )
            self.groups = row_groups(manifest, self.layout) if self.device is None else [(0, len(self.layout))]
        else:
            check_size(manifest, self.layout, settings.bucket_bytes)
            self.groups = [_rows_of(self.layout, region) for region in range(len(self.layout.regions))]
        self._pieces = Pieces.from_columns(manifest, self.layout, len(plan.sources), plan.pieces)
        self.digest = self._pieces.digest
        if self.digest != plan.digest:
            raise PlanMismatch(f"the plan arrived with digest {self.digest}, not {plan.digest} as the coordinator computed it")

    def open(self, allowed: Sequence[Transport], here: Host, deadline: Deadline, encrypted: bool = False) -> None:
        """Allocate the staging, connect to every source and build the tables. To be closed whether or not this raises."""
        plan, manifest = self.plan, self._manifest
        clock = _Split(self.times)
        if plan.delivery == "streamed":
            if not _reaches(self.device, plan, allowed):
                self.device = None
            self.staging = Staging(manifest, self.layout, device=self.device, buffers=self.settings.buffers)
            self._owned.callback(self.staging.close)
            self.addresses = tuple(self.staging.addresses)
        tiles = tiles_of(manifest, self._pieces, self.layout, self.addresses, self.groups)
        del self._pieces
        clock.lap("tiles")
        self.group_bytes = [sum(groups[index].nbytes for groups in tiles) for index in range(len(self.groups))]
        self.nbytes = sum(self.group_bytes)
        for address, groups in zip(plan.sources, tiles, strict=True):
            self._check()
            transport, source = _connect(address, allowed, self.device, here, deadline, encrypted)
            self._owned.callback(source.close)
            self.sources.append(source)
            self.schemes.append(transport.name)
            self._transport = transport if source.stream_ordered else self._transport
            self._check()  # whoever aborted before this one was in the list could not abort it
            clock.lap("connect")
            source.prepare(groups, address.layout_digest, deadline)
            clock.lap("map")
        self._check()
        if self.device is not None:
            self._combine(manifest, self.device)
        clock.lap("tables")

    def _check(self) -> None:
        if self._aborted.is_set():
            raise Aborted("preparing was aborted for this engine rank")

    def _combine(self, manifest: Manifest, device: torch.device) -> None:
        """Build both tables of a route whose targets are on a CUDA device, so that the first round does not have to."""
        mapped = [source for source in self.sources if source.stream_ordered]
        carried = [source for source in self.sources if not source.stream_ordered]
        first = self._turn % len(carried) if carried and self.staging is None else 0
        self.carried = carried[first:] + carried[:first]
        if mapped and len(self.layout):
            with torch.cuda.device(device):
                self.combined = self._transport.combine(mapped) if self._transport is not None else None
                if self.combined is not None and self.staging is not None and not carried:
                    self.stream = DeviceStream(self.combined, self.staging, self.groups, device)
        self.digest_of = DeviceDigest(manifest, self.layout, device)
        if self.staging is None or not self.settings.reads_back:
            self.digest_of.build(self.addresses)

    @property
    def in_turn(self) -> bool:
        """Whether carried sources are begun, read and ended one after the other: all of each, straight to where it belongs."""
        return self.staging is None and bool(self.carried)

    def require(self, number: int, deadline: Deadline) -> None:
        """Raise :class:`~weightsync.errors.StaleSource` if a source that maps its owner's memory does not hold this version.

        A source that carries bytes looks when it begins.
        """
        for source in self.sources:
            source.require(number, deadline)

    def begin(self, number: int, deadline: Deadline) -> None:
        """Begin to read version ``number`` from every source, but those that are read in turn."""
        for source in self.sources:
            if not (self.in_turn and source in self.carried):
                source.begin(number, deadline)

    def end(self, deadline: Deadline) -> None:
        """End what :meth:`begin` began."""
        for source in self.sources:
            if not (self.in_turn and source in self.carried):
                source.end(deadline)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that this route allocated; zero for direct delivery."""
        return self.staging.nbytes if self.staging else 0

    def fits(self, plan: PlanSlice, addresses: tuple[int, ...]) -> bool:
        """Whether this route still serves ``plan`` with the engine's memory where it is now."""
        same_memory = plan.delivery == "streamed" or addresses == self.addresses
        return plan.digest == self.plan.digest and plan.sources == self.plan.sources and same_memory

    def abort(self) -> None:
        """Make a transfer, or an opening, that runs in another thread end soon."""
        self._aborted.set()
        for source in list(self.sources):
            source.abort()

    @cached_property
    def cover(self) -> Cover:
        """What this rank receives, as ``""``. Raises :class:`~weightsync.errors.LayoutError` unless it is everything."""
        return cover(self._manifest, {"": self.layout}, "this engine rank")

    def lend(self, user: Future[None]) -> None:
        """A thread that did not end in time still writes to the staging: :meth:`close` leaves everything to its end."""
        self._user = user

    def close(self) -> None:
        """Close the connections and free the staging."""
        if self._user is not None and not self._user.done():
            self._user.add_done_callback(lambda _: self._owned.close())
        else:
            self._owned.close()


def _rows_of(layout: Layout, region: int) -> tuple[int, int]:
    rows = np.flatnonzero(layout.region == region)
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        raise PlanMismatch(f"bucket {region} of the plan is empty or its tensors are not consecutive")
    return int(rows[0]), int(rows[-1]) + 1
