"""Choice among several sources that hold the same box: same host first, then equal loads.

A target prefers the holders in its memory domain, else those on its machine, else all. The boxes for which the same members remain
form a **pool**. The bytes that a pool must deliver are laid end to end, target after target and in layout order within a target.
They are cut into as many equal spans as the pool has members. A piece goes to the member whose span contains the middle of the
piece. So each member's share of a pool differs from the mean by at most the largest piece, most targets read from only one member
of a pool, and at any time different targets read from different members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.arrays import Int64
from weightsync.planning.box_index import BoxIndex
from weightsync.planning.geometry import Rows
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
    members: list[Int64] = []
    kind = np.zeros(len(index), np.int64)
    for at in np.flatnonzero(np.diff(first) > 1).tolist():
        holders = member[first[at] : first[at + 1]]
        number = kinds.setdefault(holders.tobytes(), len(kinds) + 1)
        if number > len(members):
            members.append(holders)
        kind[at] = number

    hosts = list(dict.fromkeys(targets))
    choice = np.full((len(members) + 1, len(hosts)), -1, np.int64)
    candidates: list[Int64] = []
    pool: list[int] = []
    pools: dict[bytes, int] = {}
    width: list[int] = []
    for at, holders in enumerate(members, start=1):
        for where, target_host in enumerate(hosts):
            places = np.array(_nearest([sources[holder] for holder in holders.tolist()], target_host), np.int64)
            pool_number = pools.setdefault(holders[places].tobytes(), len(pools))
            if pool_number == len(width):
                width.append(len(places))
            choice[at, where] = len(candidates)
            candidates.append(places)
            pool.append(pool_number)
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
        np.array(width, np.int64),
    )
