"""Transfer plan: which target reads what from which source. A pure function of the manifest and the layouts of both ends.

Boxes are intersected once for each geometry (:mod:`weightsync.planning.geometry`) and kept as *templates*. The pieces of a target
are expanded from them on demand, by array indexing, so a plan holds little more than its layouts.

Among several sources that hold the same box, a target prefers the holders in its memory domain, else those on its machine, else
all. The boxes for which the same members remain form a **pool**. The bytes that a pool must deliver are laid end to end, target
after target and in layout order within a target. They are cut into as many equal spans as the pool has members. A piece goes to the
member whose span contains the middle of the piece. So each member's share of a pool differs from the mean by at most the largest
piece, most targets read from only one member of a pool, and at any time different targets read from different members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from weightsync.arrays import Int32, Int64
from weightsync.errors import LayoutError
from weightsync.model import Layout, Manifest
from weightsync.planning.box_index import BoxIndex, first_hole
from weightsync.planning.coverage import collisions, listed, printed
from weightsync.planning.geometry import Geometries, Rows, ShardingIndex, geometries, ranges
from weightsync.planning.limits import Allowance, Stop
from weightsync.planning.pieces import Pieces
from weightsync.protocol.messages import Host


@dataclass(frozen=True, eq=False)
class Choices:
    """Sources of each box for each target host.

    ============  ======================  =================================================================
    field         type                    meaning
    ============  ======================  =================================================================
    first         int64[boxes + 1]        a box's holders are ``member[first[b]:first[b + 1]]``
    member        int64[holders]          source member
    order         int64[holders]          position of the box among that member's rows of the tensor
    kind          int64[boxes]            the box's set of holders; 0 stands for every set of one
    host          int64[targets]          the target's host
    choice        int64[kinds, hosts]     index into ``candidates`` and ``pool``; -1 where a box has one holder
    candidates    tuple of int64 arrays   positions of the preferred members among the box's holders
    pool          int64[choices]          the pool that these members form
    width         int64[pools]            number of members of a pool
    ============  ======================  =================================================================
    """

    first: Int64
    member: Int64
    order: Int64
    kind: Int64
    host: Int64
    choice: Int64
    candidates: tuple[Int64, ...]
    pool: Int64
    width: Int64


def _nearest(holders: Sequence[Host], target_host: Host) -> list[int]:
    for near in ([host.memory == target_host.memory for host in holders], [host.name == target_host.name for host in holders]):
        if any(near):
            return [place for place, is_near in enumerate(near) if is_near]
    return list(range(len(holders)))


def choices(index: BoxIndex, rows: Rows, sources: Sequence[Host], targets: Sequence[Host]) -> Choices:
    """Find the holders of each box and the preferred ones for each target. A member that holds a box twice counts once."""
    box, member, order = index.box[index.order], rows.member[index.order], rows.order[index.order]
    distinct = np.ones(len(box), bool)
    distinct[1:] = (np.diff(box) != 0) | (np.diff(member) != 0)  # rows of a box are in the order of members
    box, member, order = box[distinct], member[distinct], order[distinct]
    first = np.searchsorted(box, np.arange(len(index) + 1))

    # Boxes with one holder, the usual case, are kind 0. The others are numbered by their set of holders.
    kinds: dict[bytes, int] = {}
    kind = np.zeros(len(index), np.int64)
    for at in np.flatnonzero(np.diff(first) > 1).tolist():
        kind[at] = kinds.setdefault(member[first[at] : first[at + 1]].tobytes(), len(kinds) + 1)

    hosts = list(dict.fromkeys(targets))
    choice = np.full((len(kinds) + 1, len(hosts)), -1, np.int64)
    candidates: list[Int64] = []
    pool: list[int] = []
    pools: dict[bytes, int] = {}
    for number, key in enumerate(kinds, start=1):
        holders = np.frombuffer(key, np.int64)
        for where, target_host in enumerate(hosts):
            places = np.array(_nearest([sources[holder] for holder in holders.tolist()], target_host), np.int64)
            choice[number, where] = len(candidates)
            candidates.append(places)
            pool.append(pools.setdefault(holders[places].tobytes(), len(pools)))
    place = {host: where for where, host in enumerate(hosts)}
    return Choices(
        first,
        member,
        order,
        kind,
        np.array([place[host] for host in targets], np.int64),
        choice,
        tuple(candidates),
        np.array(pool, np.int64),
        np.array([len(key) // 8 for key in pools], np.int64),  # a key is its members, int64
    )


_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class _PlannedRank:
    member: str
    host: Host
    layout: Layout


class SourceRank(_PlannedRank):
    """A trainer rank that can provide pieces."""


class TargetRank(_PlannedRank):
    """An engine rank whose layout is to be filled."""


@dataclass(frozen=True, eq=False)
class _Templates:
    """Pieces of each geometry, ordered by target, geometry, layout row, source box.

    ``first[m, g]`` and ``count[m, g]`` locate the templates of target ``m`` in geometry ``g``. ``order`` is the position among the
    target's rows of the tensor. ``inside`` is the piece's start relative to its source box. For ``choice`` see :class:`Choices`.
    """

    first: Int64
    count: Int64
    order: Int64
    box: Int64
    starts: Int64
    stops: Int64
    inside: Int64
    nbytes: Int64
    choice: Int64


class Plan:
    """For each target rank, the boxes that come from each source rank. Made by :func:`plan_transfer`. Immutable."""

    def __init__(
        self,
        sources: Sequence[SourceRank],
        targets: Sequence[TargetRank],
        sides: tuple[ShardingIndex, ShardingIndex],
        kinds: Geometries,
        templates: _Templates,
        options: Choices,
        counts: Int64,
        stop: Stop,
    ) -> None:
        self.manifest = sides[0].manifest
        self.sources, self.targets = tuple(sources), tuple(targets)
        self._source, self._target = sides
        self._kinds, self._templates, self._options = kinds, templates, options
        self._counts, self._stop = counts, stop
        self._place = {rank.member: place for place, rank in enumerate(targets)}
        self._spread()

    def _spread(self) -> None:
        """Compute where each target begins in its pool's bytes, ``float64[pools, targets]``, and each pool's total."""
        parts, options = self._templates, self._options
        shared = np.flatnonzero(parts.choice >= 0)
        # templates are ordered by target and geometry
        owner = np.repeat(np.arange(parts.count.size), parts.count.ravel())[shared]
        target, kind = owner // max(len(self._kinds), 1), owner % max(len(self._kinds), 1)
        weight = parts.nbytes[shared].astype(np.float64) * self._kinds.count[kind]
        pools, targets = len(options.width), len(self.targets)
        slot = options.pool[parts.choice[shared]] * targets + target
        amounts = np.bincount(slot, weights=weight, minlength=pools * targets).reshape(pools, targets)
        self._total = amounts.sum(axis=1)
        self._begin = np.cumsum(amounts, axis=1) - amounts

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over the manifest, and the member, host and layout of every source and target."""
        sides = (self.sources, self.targets)
        ranks = [[[rank.member, rank.host.name, rank.host.memory, rank.layout.digest] for rank in side] for side in sides]
        return hashlib.blake2b(msgspec.msgpack.encode(["plan 1", self.manifest.fingerprint, ranks]), digest_size=16).hexdigest()

    def nbytes(self, member: str) -> int:
        """Bytes that target ``member`` receives: its whole layout, each element once."""
        return self.targets[self._place[member]].layout.nbytes(self.manifest)

    @property
    def count(self) -> int:
        """Number of pieces of all targets."""
        return int(self._counts.sum())

    def _expand(self, place: int) -> tuple[Int64, Int64]:
        """Template and tensor of each piece of a target, ordered by tensor and template."""
        tensors = np.flatnonzero(np.diff(self._target.first[place]))
        kind = self._kinds.of[tensors]
        count = self._templates.count[place, kind]
        return ranges(self._templates.first[place, kind], count), np.repeat(tensors, count)

    def _holder(self, place: int, part: Int64) -> Int64:
        """Index into the holders for each piece: the only holder of its box, or the one whose span contains the piece."""
        parts, options = self._templates, self._options
        holder = options.first[parts.box[part]]
        if not len(options.width):
            return holder
        shared = np.flatnonzero(parts.choice[part] >= 0)
        if not len(shared):
            return holder
        choice = parts.choice[part[shared]]
        amount = parts.nbytes[part[shared]].astype(np.float64)
        pool = options.pool[choice]
        by_pool = np.argsort(pool, kind="stable")
        middle = np.empty(len(shared))
        ordered, pooled = amount[by_pool], pool[by_pool]
        ends = np.cumsum(ordered)
        head = np.flatnonzero(np.concatenate([[True], pooled[1:] != pooled[:-1]]))
        before = np.repeat((ends - ordered)[head], np.diff(np.append(head, len(pooled))))
        middle[by_pool] = ends - before - ordered / 2
        middle += self._begin[pool, place]
        width = options.width[pool]
        span = np.clip(np.floor(middle * width / self._total[pool]).astype(np.int64), 0, width - 1)
        begins = np.cumsum([0, *(len(places) for places in options.candidates)])
        holder[shared] += np.concatenate(options.candidates)[begins[choice] + span]
        return holder

    def pieces(self, member: str) -> Pieces:
        """Pieces that target ``member`` receives. Recomputed at each call, so keep the result if it is needed again."""
        place = self._place[member]
        parts = self._templates
        part, tensor = self._expand(place)
        holder = self._holder(place, part)
        source = self._options.member[holder]
        order = self._options.order[holder]
        region = np.empty(len(part), np.int32)
        offset = np.empty(len(part), np.int64)
        strides = np.empty((len(part), self.manifest.dims), np.int64)
        for begin in range(0, len(part), _CHUNK):  # scattered by source, so in chunks that fit the cache
            self._stop.check()
            chunk = slice(begin, begin + _CHUNK)
            self._gather(source[chunk], tensor[chunk], order[chunk], region[chunk], offset[chunk], strides[chunk])
            for dim in range(self.manifest.dims):
                offset[chunk] += parts.inside[part[chunk], dim] * strides[chunk, dim]
        used = np.flatnonzero(np.bincount(source, minlength=len(self.sources)))
        number = np.zeros(len(self.sources), np.int32)
        number[used] = np.arange(len(used))
        return Pieces(
            sources=tuple(self.sources[index].member for index in used),
            source=number[source],
            source_region=region,
            source_offset=offset,
            source_strides=strides,
            target_row=(self._target.first[place][tensor] + parts.order[part]).astype(np.int32),
            starts=np.take(parts.starts, part, axis=0),
            stops=np.take(parts.stops, part, axis=0),
        )

    def _gather(self, source: Int64, tensor: Int64, order: Int64, region: Int32, offset: Int64, strides: Int64) -> None:
        """Fill ``region``, ``offset`` and ``strides`` with those of the source rows that hold these pieces."""
        load = np.bincount(source, minlength=len(self.sources))
        # NumPy sorts 16-bit keys by radix
        by_source = np.argsort(source.astype(np.uint16) if len(self.sources) <= 1 << 16 else source, kind="stable")
        ends = np.cumsum(load)
        for index in np.flatnonzero(load).tolist():
            chosen = by_source[ends[index] - load[index] : ends[index]]
            layout = self.sources[index].layout
            row = self._source.first[index][tensor[chosen]] + order[chosen]
            region[chosen] = layout.region[row]
            offset[chosen] = layout.offset[row]
            for dim in range(strides.shape[1]):
                strides[chosen, dim] = layout.strides[row, dim]


def plan_transfer(
    manifest: Manifest,
    sources: Sequence[SourceRank],
    targets: Sequence[TargetRank],
    claim: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> Plan:
    """Plan how every element of every target's layout is fetched exactly once.

    Both ends are processed in the order of member names, so the given order does not matter. If several sources hold the same box,
    one in the target's memory domain (``Host.memory``) is preferred, then one on its machine (``Host.name``), then any. For pools
    see :mod:`weightsync.planning.plan`.

    Bound: **in each pool the load of a source differs from the pool's mean by at most the largest piece**. So a source's load
    differs from the sum of its pools' means by at most the largest piece times the number of its pools. A piece is never larger
    than the target's row; layouts split into rows of 1 MiB (:func:`~weightsync.planning.split.split_rows`) make that 1 MiB. The
    balance is over the targets of one plan.

    Args:
        manifest: The tensors.
        sources: The trainer ranks.
        targets: The engine ranks.
        claim: Called with the number of pieces before arrays are allocated for them; may raise.
        stop: Aborts planning, and :meth:`Plan.pieces`, soon after it is set.

    Raises:
        LayoutError: Sources hold overlapping boxes that differ, no source holds elements that a target needs (at most ten tensors
            are named), a member is named twice, or there are more pieces than such layouts need
            (:mod:`weightsync.planning.limits`).
        Aborted: ``stop`` was set.
    """
    stop = stop or Stop()
    sources = sorted(sources, key=lambda rank: rank.member)
    targets = sorted(targets, key=lambda rank: rank.member)
    sides = (
        ShardingIndex(manifest, [rank.member for rank in sources], [rank.layout for rank in sources]),
        ShardingIndex(manifest, [rank.member for rank in targets], [rank.layout for rank in targets]),
    )
    kinds = geometries(manifest, *sides)
    held = sides[0].rows(kinds.tensor)
    wanted = sides[1].rows(kinds.tensor)
    index = BoxIndex(held.group, held.starts, held.stops, stop)
    problems = collisions(sides[0], kinds, held, index)
    if problems:
        number, listing = listed(manifest, kinds, problems)
        raise LayoutError(f"sources overlap in {number} tensors:\n  {listing}")
    allowance = Allowance(*sides, kinds, claim)
    row, box = index.meeting(
        wanted.group, wanted.starts, wanted.stops, lambda rows: allowance.take(wanted.member[rows], wanted.group[rows])
    )
    starts = np.maximum(wanted.starts[row], index.starts[box])
    stops = np.minimum(wanted.stops[row], index.stops[box])
    sizes = np.prod(stops - starts, axis=1)
    _check_filled(sides[1], kinds, wanted, row, (starts, stops, sizes))
    options = choices(index, held, [rank.host for rank in sources], [rank.host for rank in targets])
    slots = wanted.member[row] * len(kinds) + wanted.group[row]
    count = np.bincount(slots, minlength=len(targets) * len(kinds))
    templates = _Templates(
        first=(np.cumsum(count) - count).reshape(len(targets), len(kinds)),
        count=count.reshape(len(targets), len(kinds)),
        order=wanted.order[row],
        box=box,
        starts=starts,
        stops=stops,
        inside=starts - index.starts[box],
        nbytes=sizes * manifest.itemsizes[kinds.tensor[wanted.group[row]]],
        choice=options.choice[options.kind[box], options.host[wanted.member[row]]],
    )
    return Plan(sources, targets, sides, kinds, templates, options, allowance.taken, stop)


def _check_filled(sharding: ShardingIndex, kinds: Geometries, rows: Rows, row: Int64, overlaps: tuple[Int64, Int64, Int64]) -> None:
    starts, stops, sizes = overlaps
    filled = np.zeros(len(rows), np.int64)
    np.add.at(filled, row, sizes)
    short = np.flatnonzero(filled != np.prod(rows.stops - rows.starts, axis=1))
    if not len(short):
        return
    kind, head = np.unique(rows.group[short], return_index=True)
    problems = {}
    for group, at in zip(kind.tolist(), short[head].tolist(), strict=True):
        mine = slice(*np.searchsorted(row, [at, at + 1]))
        hole = first_hole(starts[mine], stops[mine], (rows.starts[at], rows.stops[at]))
        region = printed(sharding.manifest, int(kinds.tensor[group]), *hole) if hole else "a part"
        problems[group] = f"{region}, needed by {sharding.members[int(rows.member[at])]}"
    number, listing = listed(sharding.manifest, kinds, problems)
    raise LayoutError(f"no source holds all elements that targets need of {number} tensors:\n  {listing}")
