"""Do the ranks of one side hold every element exactly once, and do their digests add up?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import LayoutError, VerificationError
from weightsync.model import Layout, Manifest
from weightsync.planning.box_index import BoxIndex, first_hole
from weightsync.planning.geometry import Geometries, Rows, Side, geometries
from weightsync.planning.limits import Stop

__all__ = ["Cover", "collisions", "cover", "listed", "printed"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_SHOWN = 10


def shortened(items: Iterable[str], count: int | None = None, joint: str = ", ") -> str:
    """At most ten of ``items``, and how many more there are out of ``count``."""
    listed = list(items)
    total = len(listed) if count is None else count
    more = [f"... and {total - _SHOWN} more"] if total > _SHOWN else []
    return joint.join([*listed[:_SHOWN], *more])


def printed(manifest: Manifest, tensor: int, starts: Iterable[int], stops: Iterable[int]) -> str:
    """A box as ``[0:4, 2:8]``, without the padding of the columns; a scalar's is ``[]``."""
    pairs = list(zip(starts, stops, strict=True))
    rank = len(manifest[tensor].shape)
    return "[" + ", ".join(f"{a}:{b}" for a, b in pairs[len(pairs) - rank :]) + "]"


def listed(manifest: Manifest, kinds: Geometries, problems: Mapping[int, str]) -> tuple[int, str]:
    """How many tensors have one of the geometries in ``problems``, and what is wrong with the first ten, a line each."""
    bad = np.flatnonzero(np.isin(kinds.of, list(problems)))
    lines = [f"{manifest[int(tensor)].name}: {problems[int(kinds.of[tensor])]}" for tensor in bad[:_SHOWN]]
    return len(bad), shortened(lines, len(bad), "\n  ")


@dataclass(frozen=True, eq=False)
class _Share:
    """How one member's digests count: its rows by tensor, and those that are copies of another member's, which do not."""

    held: Int64 | slice
    """The tensors of which it holds rows."""
    first: Int32 | None
    """The first row of each of them; ``None`` where each has one row."""
    copied: Int64
    """Rows that are copies."""
    copies: list[tuple[str, Int64, Int64]]
    """The same by the member that leads: its name, rows here, and the rows there that they must equal."""


def _share(side: Side, member: int, kinds: Geometries, begin: Int64, rows: Rows, leader: Int64) -> _Share:
    """Of one member. ``begin[kind]``: its first entry of that geometry in ``rows``; ``leader``: who leads each entry's box."""
    first, layout = side.first[member], side.layouts[member]
    held = np.flatnonzero(np.diff(first))
    every = slice(None) if len(held) == len(side.manifest) else held
    single = None if len(held) == len(layout) else first[held]
    copied, copies = np.zeros(0, np.int64), list[tuple[str, Int64, Int64]]()
    if np.any(leader != np.arange(len(leader))):
        entry = begin[kinds.of[layout.tensor]] + np.arange(len(layout), dtype=np.int64) - first[layout.tensor]
        copied = np.flatnonzero(leader[entry] != entry)
        lead = leader[entry[copied]]
        for other in np.unique(rows.member[lead]).tolist():
            mine = copied[rows.member[lead] == other]
            theirs = side.first[other, layout.tensor[mine]] + rows.order[leader[entry[mine]]]
            copies.append((side.members[other], mine, theirs.astype(np.int64)))
    return _Share(every, single, copied, copies)


class Cover:
    """The boxes of one side, which partition every tensor; made by :func:`cover`.

    Each distinct box has a *leader*, the first member that holds it; the others hold copies.
    """

    def __init__(self, side: Side, whose: str, kinds: Geometries, rows: Rows, index: BoxIndex) -> None:
        self.manifest, self.members, self.whose = side.manifest, side.members, whose
        self._side = side
        # rows are ordered by member, geometry, order: where each member's rows of each geometry begin
        counts = np.bincount(rows.member * len(kinds) + rows.group, minlength=len(side.members) * len(kinds))
        begin = (np.cumsum(counts) - counts).reshape(len(side.members), len(kinds))
        leader = index.order[index.first[:-1]][index.box]
        # Now, not when digests come: engines stand still then.
        self._shares = [_share(side, member, kinds, begin[member], rows, leader) for member in range(len(side.members))]

    def total(self, digests: Mapping[str, UInt64]) -> UInt64:
        """Digest of each tensor, ``uint64[tensors]``, from the digest of each row of each member's layout.

        Every distinct box counts once. Raises :class:`~weightsync.errors.VerificationError` naming the tensors and members whose
        equal boxes have unequal digests, and for a member that reported none or too many.
        """
        self._check_complete(digests)
        sums = np.zeros(len(self.manifest), np.uint64)
        differing: dict[int, set[str]] = {}
        for name, layout, share in zip(self.members, self._side.layouts, self._shares, strict=True):
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
                f"{self.manifest[tensor].name} (on {shortened(n for n in self.members if n in differing[tensor])})"
                for tensor in sorted(differing)[:_SHOWN]
            ]
            raise VerificationError(
                f"{self.whose}: copies have diverged (equal boxes, unequal digests) of {len(differing)} tensors: "
                + shortened(lines, len(differing), "; ")
            )
        return sums

    def check(self, digests: Mapping[str, UInt64], expected: UInt64) -> None:
        """Raise :class:`~weightsync.errors.VerificationError` unless the digests add up to ``expected``, ``uint64[tensors]``.

        The message names the tensors that differ (at most ten, with the count) and the members that hold them.
        """
        if expected.shape != (len(self.manifest),):
            raise VerificationError(f"{len(expected)} published digests do not fit a manifest of {len(self.manifest)} tensors")
        bad = np.flatnonzero(self.total(digests) != expected)
        if len(bad):
            lines = [f"{self.manifest[int(tensor)].name} (on {shortened(self._holders(int(tensor)))})" for tensor in bad[:_SHOWN]]
            raise VerificationError(
                f"{self.whose}: {len(bad)} of {len(self.manifest)} tensors are not what was published: "
                + shortened(lines, len(bad), "; ")
            )

    def _holders(self, tensor: int) -> list[str]:
        held = self._side.first[:, tensor + 1] > self._side.first[:, tensor]
        return [name for name, holds in zip(self.members, held, strict=True) if holds]

    def _check_complete(self, digests: Mapping[str, UInt64]) -> None:
        if set(digests) != set(self.members):
            missing = [name for name in self.members if name not in digests]
            extra = sorted(set(digests) - set(self.members))
            raise VerificationError(
                f"{self.whose}: digests are missing from {shortened(missing)}; unexpected from {shortened(extra)}"
            )
        for name, layout in zip(self.members, self._side.layouts, strict=True):
            if digests[name].dtype != np.uint64 or digests[name].shape != (len(layout),):
                raise VerificationError(f"{name} reported {digests[name].shape} digests for {len(layout)} layout rows")


def cover(manifest: Manifest, layouts: Mapping[str, Layout], whose: str, stop: Stop | None = None) -> Cover:
    """Check that the distinct boxes of ``layouts`` (by member) partition every tensor of ``manifest``.

    Equal boxes held by several members are copies and fine; zero-size tensors need no rows. Members are taken in sorted order,
    so the order in which ``layouts`` was filled does not matter. ``whose`` starts the message, for example ``"the trainer"``.

    Raises :class:`~weightsync.errors.LayoutError` naming tensors with a hole or with overlapping unequal boxes, the region or the
    boxes, and the members that hold them (at most ten tensors, with the count). Searches raise
    :class:`~weightsync.errors.Aborted` once ``stop`` is set.
    """
    members = sorted(layouts)
    side = Side(manifest, members, [layouts[name] for name in members])
    kinds = geometries(manifest, side)
    rows = side.rows(kinds.tensor)
    index = BoxIndex(rows.group, rows.starts, rows.stops, len(kinds), stop)
    problems = collisions(side, kinds, rows, index)
    problems |= _holes(side, kinds, index, set(problems))
    if problems:
        count, said = listed(manifest, kinds, problems)
        raise LayoutError(f"{whose}: not every element is held exactly once; {count} tensors are wrong:\n  {said}")
    return Cover(side, whose, kinds, rows, index)


def collisions(side: Side, kinds: Geometries, rows: Rows, index: BoxIndex) -> dict[int, str]:
    """What to say about each geometry with overlapping boxes."""
    said = {}
    for kind, pair in index.collisions().items():
        parts = []
        for box in pair:
            holders = rows.member[index.order[index.first[box] : index.first[box + 1]]]
            names = shortened(dict.fromkeys(side.members[int(member)] for member in holders))
            region = printed(side.manifest, int(kinds.tensor[kind]), index.starts[box].tolist(), index.stops[box].tolist())
            parts.append(f"{region} on {names}")
        said[kind] = f"boxes overlap without being equal: {' and '.join(parts)}"
    return said


def _holes(side: Side, kinds: Geometries, index: BoxIndex, colliding: set[int]) -> dict[int, str]:
    """What to say about each geometry whose boxes do not fill its shape; those with overlaps are left out."""
    shapes = side.manifest.shapes[kinds.tensor]
    # Disjoint boxes inside the shape hold at most its elements, 2**60: the sums are exact where they matter.
    held = np.zeros(len(kinds), np.int64)
    np.add.at(held, index.group, np.prod(index.stops - index.starts, axis=1))
    said = {}
    for kind in np.flatnonzero(held != np.prod(shapes, axis=1)).tolist():
        if kind in colliding:
            continue
        mine = slice(*np.searchsorted(index.group, [kind, kind + 1]))
        hole = first_hole(index.starts[mine], index.stops[mine], (np.zeros_like(shapes[kind]), shapes[kind]))
        if hole is not None:
            region = printed(side.manifest, int(kinds.tensor[kind]), *hole)
            tensor = int(kinds.tensor[kind])
            holders = [n for n, f in zip(side.members, side.first, strict=True) if f[tensor + 1] > f[tensor]]
            said[kind] = f"nobody holds {region}" + (f"; the rest is on {shortened(holders)}" if holders else "")
    return said
