"""Coverage check of a set of ranks: every element is held exactly once, and the digests add up to the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from weightsync.arrays import Int32, Int64, UInt64
from weightsync.errors import LayoutError, VerificationError, few
from weightsync.model import Layout, Manifest
from weightsync.planning.box_index import BoxIndex, first_hole
from weightsync.planning.geometry import Geometries, Rows, ShardingIndex, geometries
from weightsync.planning.limits import Stop

_SHOWN = 10


def printed(manifest: Manifest, tensor: int, starts: Iterable[int], stops: Iterable[int]) -> str:
    """Format a box as ``[0:4, 2:8]``, without the padding of the columns; a scalar's box is ``[]``."""
    pairs = list(zip(starts, stops, strict=True))
    rank = len(manifest[tensor].shape)
    return "[" + ", ".join(f"{a}:{b}" for a, b in pairs[len(pairs) - rank :]) + "]"


def listed(manifest: Manifest, kinds: Geometries, problems: Mapping[int, str]) -> tuple[int, str]:
    """Count the tensors whose geometry is in ``problems``, and describe the first ten, one on each line."""
    bad = np.flatnonzero(np.isin(kinds.of, list(problems)))
    lines = [f"{manifest[int(tensor)].name}: {problems[int(kinds.of[tensor])]}" for tensor in bad[:_SHOWN]]
    return len(bad), few(lines, _SHOWN, "\n  ", len(bad))


@dataclass(frozen=True, eq=False)
class _Share:
    """Contribution of one member's digests: its rows by tensor, and its rows that copy another member's and do not count."""

    held: Int64 | slice
    """Tensors of which it holds rows."""
    first: Int32 | None
    """First row of each of these tensors; ``None`` where each has one row."""
    copied: Int64
    """Rows that are copies."""
    copies: list[tuple[str, Int64, Int64]]
    """The same rows by leading member: its name, the rows of this member, and the leader's rows that they must equal."""


def _share(sharding: ShardingIndex, member: int, kinds: Geometries, begin: Int64, rows: Rows, leader: Int64) -> _Share:
    """Contribution of one member.

    ``begin[kind]`` is its first entry of that geometry in ``rows``; ``leader`` is the leading entry of each entry's box.
    """
    first, layout = sharding.first[member], sharding.layouts[member]
    held = np.flatnonzero(np.diff(first))
    every = slice(None) if len(held) == len(sharding.manifest) else held
    single = None if len(held) == len(layout) else first[held]
    copied, copies = np.zeros(0, np.int64), list[tuple[str, Int64, Int64]]()
    if np.any(leader != np.arange(len(leader))):
        entry = begin[kinds.of[layout.tensor]] + np.arange(len(layout), dtype=np.int64) - first[layout.tensor]
        copied = np.flatnonzero(leader[entry] != entry)
        lead = leader[entry[copied]]
        for other in np.unique(rows.member[lead]).tolist():
            mine = copied[rows.member[lead] == other]
            theirs = sharding.first[other, layout.tensor[mine]] + rows.order[leader[entry[mine]]]
            copies.append((sharding.members[other], mine, theirs.astype(np.int64)))
    return _Share(every, single, copied, copies)


class Coverage:
    """Coverage: the boxes of a set of ranks, which partition every tensor. Made by :func:`coverage_of`.

    Each distinct box has a *leader*, the first member that holds it. The others hold copies.
    """

    def __init__(self, sharding: ShardingIndex, whose: str, kinds: Geometries, rows: Rows, index: BoxIndex) -> None:
        self.manifest, self.members, self.whose = sharding.manifest, sharding.members, whose
        self._sharding = sharding
        # first row of each member in each geometry; rows are ordered by member, geometry, order
        counts = np.bincount(rows.member * len(kinds) + rows.group, minlength=len(sharding.members) * len(kinds))
        begin = (np.cumsum(counts) - counts).reshape(len(sharding.members), len(kinds))
        leader = index.order[index.first[:-1]][index.box]
        # Computed now, because engines are paused when digests arrive.
        self._shares = [_share(sharding, member, kinds, begin[member], rows, leader) for member in range(len(sharding.members))]

    def total(self, digests: Mapping[str, UInt64]) -> UInt64:
        """Add up the digest of each tensor from the digests of the members' layout rows. Every distinct box counts once.

        Args:
            digests: ``uint64[rows]`` by member.

        Returns:
            ``uint64[tensors]``.

        Raises:
            VerificationError: Copies of a box have different digests, or a member reported too few or too many digests. The message
                names tensors and members.
        """
        self._check_complete(digests)
        sums = np.zeros(len(self.manifest), np.uint64)
        differing: dict[int, set[str]] = {}
        for name, layout, share in zip(self.members, self._sharding.layouts, self._shares, strict=True):
            if not len(layout):
                continue
            mine = digests[name]
            for other, rows, theirs in share.copies:
                for bad in layout.tensor[rows[digests[other][theirs] != mine[rows]]].tolist():
                    differing.setdefault(bad, set()).update((other, name))
            if len(share.copied):
                mine = mine.copy()
                mine[share.copied] = 0
            sums[share.held] += mine if share.first is None else np.add.reduceat(mine, share.first)
        if differing:
            lines = [
                f"{self.manifest[tensor].name} (on {few((n for n in self.members if n in differing[tensor]), _SHOWN)})"
                for tensor in sorted(differing)[:_SHOWN]
            ]
            raise VerificationError(
                f"{self.whose}: copies of {len(differing)} tensors have diverged (equal boxes, unequal digests): "
                + few(lines, _SHOWN, "; ", len(differing))
            )
        return sums

    def check(self, digests: Mapping[str, UInt64], expected: UInt64) -> None:
        """Check that the digests add up to ``expected``, ``uint64[tensors]``.

        Raises:
            VerificationError: They do not. The message names at most ten of the tensors that differ, and the members that hold
                them.
        """
        if expected.shape != (len(self.manifest),):
            raise VerificationError(f"received {len(expected)} published digests for a manifest of {len(self.manifest)} tensors")
        bad = np.flatnonzero(self.total(digests) != expected)
        if len(bad):
            holders = self._sharding.holders
            lines = [f"{self.manifest[int(tensor)].name} (on {few(holders(int(tensor)), _SHOWN)})" for tensor in bad[:_SHOWN]]
            raise VerificationError(
                f"{self.whose}: {len(bad)} of {len(self.manifest)} tensors differ from the published ones: "
                + few(lines, _SHOWN, "; ", len(bad))
            )

    def _check_complete(self, digests: Mapping[str, UInt64]) -> None:
        if set(digests) != set(self.members):
            missing = [name for name in self.members if name not in digests]
            extra = sorted(set(digests) - set(self.members))
            raise VerificationError(
                f"{self.whose}: digests are missing from {few(missing, _SHOWN)}; unexpected from {few(extra, _SHOWN)}"
            )
        for name, layout in zip(self.members, self._sharding.layouts, strict=True):
            if digests[name].dtype != np.uint64 or digests[name].shape != (len(layout),):
                raise VerificationError(f"{name} reported {digests[name].shape} digests for {len(layout)} layout rows")


def coverage_of(manifest: Manifest, layouts: Mapping[str, Layout], whose: str, stop: Stop | None = None) -> Coverage:
    """Check that the distinct boxes of ``layouts`` (by member) partition every tensor of ``manifest``.

    Several members may hold equal boxes, which are copies. Tensors without elements need no rows. Members are processed in sorted
    order, so the order of ``layouts`` does not matter.

    Args:
        manifest: The tensors.
        layouts: The layout of each member.
        whose: Start of error messages, for example ``"the trainer"``.
        stop: Aborts the search once it is set.

    Raises:
        LayoutError: A tensor has a hole, or overlapping boxes that differ. The message names at most ten tensors, the regions, and
            the members that hold them.
        Aborted: ``stop`` was set.
    """
    members = sorted(layouts)
    side = ShardingIndex(manifest, members, [layouts[name] for name in members])
    kinds = geometries(manifest, side)
    rows = side.rows(kinds.tensor)
    index = BoxIndex(rows.group, rows.starts, rows.stops, stop)
    problems = collisions(side, kinds, rows, index)
    problems |= _holes(side, kinds, index, set(problems))
    if problems:
        count, listing = listed(manifest, kinds, problems)
        raise LayoutError(f"{whose}: every element must be held exactly once, but {count} tensors are wrong:\n  {listing}")
    return Coverage(side, whose, kinds, rows, index)


def collisions(sharding: ShardingIndex, kinds: Geometries, rows: Rows, index: BoxIndex) -> dict[int, str]:
    """Describe the overlapping boxes of each geometry that has any."""
    messages = {}
    for kind, pair in index.collisions().items():
        parts = []
        for box in pair:
            holders = rows.member[index.order[index.first[box] : index.first[box + 1]]]
            names = few(dict.fromkeys(sharding.members[int(member)] for member in holders), _SHOWN)
            region = printed(sharding.manifest, int(kinds.tensor[kind]), index.starts[box].tolist(), index.stops[box].tolist())
            parts.append(f"{region} on {names}")
        messages[kind] = f"boxes overlap without being equal: {' and '.join(parts)}"
    return messages


def _holes(sharding: ShardingIndex, kinds: Geometries, index: BoxIndex, colliding: set[int]) -> dict[int, str]:
    """Describe a hole of each geometry whose boxes do not fill its shape, except those in ``colliding``."""
    shapes = sharding.manifest.shapes[kinds.tensor]
    # Disjoint boxes inside the shape hold at most its 2**60 elements, so the sums that matter are exact.
    held = np.zeros(len(kinds), np.int64)
    np.add.at(held, index.group, np.prod(index.stops - index.starts, axis=1))
    messages = {}
    for kind in np.flatnonzero(held != np.prod(shapes, axis=1)).tolist():
        if kind in colliding:
            continue
        mine = slice(*np.searchsorted(index.group, [kind, kind + 1]))
        hole = first_hole(index.starts[mine], index.stops[mine], (np.zeros_like(shapes[kind]), shapes[kind]))
        if hole is not None:
            region = printed(sharding.manifest, int(kinds.tensor[kind]), *hole)
            holders = sharding.holders(int(kinds.tensor[kind]))
            messages[kind] = f"no rank holds {region}" + (f"; the rest is on {few(holders, _SHOWN)}" if holders else "")
    return messages
