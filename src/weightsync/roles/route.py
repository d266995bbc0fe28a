"""Everything that an engine rank prepares for one plan: connections, copy tables, groups, staging. Made while still serving."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import PlanMismatch, TransportError, TransportUnavailable
from weightsync.messages import Host, PlanSlice, SourceAddress
from weightsync.model import Layout, Manifest
from weightsync.planning.pieces import Pieces
from weightsync.tensors.staging import Staging
from weightsync.tensors.tiles import tiles_of
from weightsync.transports.base import Source
from weightsync.transports.choice import choose
from weightsync.transports.registry import scheme

__all__ = ["Route", "row_groups"]

_GROUP_BYTES = 32 << 20  # between groups the engine looks for an abort and reports its progress


def row_groups(manifest: Manifest, layout: Layout, group_bytes: int = _GROUP_BYTES) -> list[tuple[int, int]]:
    """Ranges of consecutive rows of about ``group_bytes`` each (a larger row is a group of its own)."""
    sizes = layout.sizes() * manifest.itemsizes[layout.tensor]
    if not len(sizes):
        return []
    group = (np.cumsum(sizes) - 1) // group_bytes
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    return [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def _connect(address: SourceAddress, allowed: Sequence[str], here: Host, deadline: Deadline) -> tuple[str, Source]:
    failures: list[str] = []
    for offer in choose(address.offers, allowed, here):
        try:
            return offer.scheme, scheme(offer.scheme).connect(offer, address.key, deadline)
        except TransportError as error:
            failures.append(f"{offer.scheme}: {error}")
    raise TransportUnavailable(f"no way to trainer rank {address.member} works: {'; '.join(failures)}")


class Route:
    """One engine rank's way through one plan. Raises :class:`~weightsync.errors.PlanMismatch` if the plan does not fit.

    ``addresses`` are those of the engine's own regions (direct delivery); for streamed delivery the route owns the staging, whose
    size it states in :attr:`staging_bytes`.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: PlanSlice,
        own: Layout | None,
        addresses: tuple[int, ...],
        allowed: Sequence[str],
        here: Host,
        deadline: Deadline,
    ) -> None:
        self.plan = plan
        self.layout = Layout.from_columns(manifest, plan.layout)
        self.staging: Staging | None = None
        self.addresses = addresses
        if plan.delivery == "direct":
            if own is None or own.digest != self.layout.digest:
                raise PlanMismatch(
                    "the plan was made for another layout than this engine rank's: its parameters were rebuilt; register again"
                )
            self.groups = row_groups(manifest, self.layout)
        else:
            self.groups = [_rows_of(self.layout, region) for region in range(len(self.layout.regions))]
        pieces = Pieces.from_columns(manifest, self.layout, len(plan.sources), plan.pieces)
        self.digest = pieces.digest
        if self.digest != plan.digest:
            raise PlanMismatch(f"the plan arrived with digest {self.digest}, not {plan.digest} as the coordinator computed it")
        with ExitStack() as owned:
            if plan.delivery == "streamed":
                self.staging = Staging(manifest, self.layout)
                self.addresses = tuple(self.staging.addresses)
                owned.callback(self.staging.close)
            tiles = tiles_of(manifest, pieces, self.layout, self.addresses, self.groups)
            self.group_bytes = [sum(groups[index].nbytes for groups in tiles) for index in range(len(self.groups))]
            self.nbytes = sum(self.group_bytes)
            self.sources: list[Source] = []
            self.schemes: list[str] = []
            for address, groups in zip(plan.sources, tiles, strict=True):
                name, source = _connect(address, allowed, here, deadline)
                owned.callback(source.close)
                source.prepare(groups, address.layout_digest, deadline)
                self.sources.append(source)
                self.schemes.append(name)
            self._owned = owned.pop_all()

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that this route allocated; zero for direct delivery."""
        return self.staging.nbytes if self.staging else 0

    def fits(self, plan: PlanSlice, addresses: tuple[int, ...]) -> bool:
        """Whether this route still serves ``plan`` with the engine's memory where it is now."""
        same_memory = plan.delivery == "streamed" or addresses == self.addresses
        return plan.digest == self.plan.digest and plan.sources == self.plan.sources and same_memory

    def abort(self) -> None:
        """Make a transfer that runs in another thread end soon."""
        for source in self.sources:
            source.abort()

    def close(self) -> None:
        """Close the connections and free the staging."""
        self._owned.close()


def _rows_of(layout: Layout, region: int) -> tuple[int, int]:
    rows = np.flatnonzero(layout.region == region)
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        raise PlanMismatch(f"bucket {region} of the plan is empty or its tensors are not consecutive")
    return int(rows[0]), int(rows[-1]) + 1
