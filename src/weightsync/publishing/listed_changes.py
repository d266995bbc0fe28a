"""What changed in a rank's shards from one version to the next, listed in memory that readers reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch

from weightsync.arrays import Bytes, Int8, Int64, UInt16, UInt32
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, SharedMemoryTooSmall
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import ChangedWords
from weightsync.tensors.changes import Sections, Step, find, unite
from weightsync.tensors.cuda.changes import ChangeFinder, DeviceStep
from weightsync.tensors.device_memory import room_for_copy
from weightsync.transports.host.memory import available_bytes

_LINE = 64
MOST_BASES = 8
"""Versions since which changes can be listed at a time."""
_MOST_STEPS = 32  # that are remembered, if they fit in as much memory as lists may take
_SHARE, _DEVICE_SHARE = 4, 8  # lists take at most this part of the shards' bytes, unless a number says otherwise


AnyStep = TypeVar("AnyStep", Step, DeviceStep)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class ListedChanges(Generic[AnyStep]):
    """Where the changes of shards of ``layout`` are listed: in ``region``, from byte ``offset`` on, up to :attr:`end`.

    There are the sections, then the counts, then the lists, see :mod:`weightsync.tensors.changes`. ``most`` are the most bytes that
    lists may take; ``True`` stands for the shards' bytes by ``share``. A version with more changes is published without.

    Raises:
        ConfigurationError: ``most`` is negative.
    """

    def __init__(self, manifest: Manifest, layout: Layout, most: bool | int, region: int, offset: int, share: int = _SHARE) -> None:
        if not isinstance(most, int) or most < 0:
            raise ConfigurationError(f"deltas is True, or the most bytes that the changes of a version may take, not {most!r}")
        self.sections = Sections.of(manifest, layout)
        self._names = [manifest[int(layout.tensor[row])].name for row in _rows(layout)]
        self.nbytes = int(self.sections.nbytes.sum())
        room = self.nbytes // share if most is True else int(most)
        self._region, self._start = region, offset
        self._counts = _aligned(offset + 32 * len(self.sections))
        self._counts_each = _aligned(2 * self.sections.blocks)
        self._payload = self._counts + MOST_BASES * self._counts_each
        self.end = _aligned(self._payload + min(room, self.nbytes + 4 * self.sections.blocks))
        """Bytes of the region."""
        self._steps: deque[tuple[tuple[int, int], AnyStep]] = deque()
        self._past: deque[tuple[tuple[int, int], AnyStep]] = deque()
        self.wanted: tuple[int, ...] = ()
        """Numbers of versions whose changes up to the next one are wanted, beside those since the last one."""
        self._order: tuple[int, int] | None = None
        self._listed: list[tuple[tuple[int, int], int, int]] = []
        self._changed = np.zeros(len(self.sections), np.int64)
        self.changed: tuple[ChangedWords, ...] = ()
        """The lists of the version that was placed last, by their bases; empty if there are none."""

    def begin(self) -> None:
        """The words of the version before are about to be compared and replaced. :meth:`placed` must follow, if that succeeds."""
        self._base, self._order, self.changed, self._listed = self._order, None, (), []
        self._past, self._steps = self._steps, deque()

    @property
    def history(self) -> tuple[tuple[int, int], ...]:
        """Versions from which this one can be reached, the oldest first."""
        return tuple(base for base, _ in self._steps)

    def _remember(self, base: tuple[int, int], step: AnyStep) -> None:
        """Keep the step from ``base`` to this version, and those before it, in as much memory as lists may take."""
        steps = self._past
        steps.append((base, step))
        while sum(step.nbytes for _, step in steps) > self.end - self._payload or len(steps) > _MOST_STEPS:
            steps.popleft()
        self._steps = steps

    def _list_wanted(self, used: int, unite_to: Callable[[Sequence[AnyStep], int, int], int | None]) -> None:
        """List what changed since the wanted versions too, as far as there is room behind ``used`` units.

        ``unite_to`` lists steps, with the counts at a number and the lists from a unit on, and returns the units of these.
        """
        bases = self.history
        for index, base in enumerate(bases[:-1]):
            if base[1] in self.wanted and base[0] == bases[-1][0] and len(self._listed) < MOST_BASES:
                units = unite_to([step for _, step in list(self._steps)[index:]], len(self._listed), used)
                if units is not None:
                    used = self.listed(base, units)

    def listed(self, base: tuple[int, int], units: int) -> int:
        """Lists of so many 4-byte units lead from ``base`` to this version. Returns the units that all lists take."""
        first = self._listed[-1][1] + self._listed[-1][2] if self._listed else 0
        self._listed.append((base, first, units))
        return first + units

    def placed(self, epoch: int, number: int) -> None:
        """The version that was compared has this epoch and number: the base of the next one."""
        self._order = epoch, number
        self._past = deque()  # after a version without lists it would only hold memory
        words, changed = int((self.sections.nbytes // self.sections.word).sum()), int(self._changed.sum())
        self.changed = tuple(
            ChangedWords(
                *base, self._region, self._start, len(self.sections), self._counts + index * self._counts_each,
                self._payload + 4 * first, units, changed, words,
            )
            for index, (base, first, units) in enumerate(self._listed)
        )  # fmt: skip

    @property
    def shares(self) -> dict[str, float]:
        """The part of the words of each tensor of this rank that the last version changed; empty if they are not listed."""
        if not self.changed:
            return {}
        changed: dict[str, list[int]] = {}
        for name, count, of in zip(self._names, self._changed, self.sections.nbytes // self.sections.word, strict=True):
            total = changed.setdefault(name, [0, 0])
            total[0] += int(count)
            total[1] += int(of)
        return {name: count / of for name, (count, of) in changed.items()}


def _rows(layout: Layout) -> Int64:
    """The rows of the sections, in their order."""
    order = np.lexsort((layout.offset, layout.region))
    rows: Int64 = order[np.all(layout.stops > layout.starts, axis=1)[order]]
    return rows


class HostLists(ListedChanges[Step]):
    """Changes of shards in a region of host memory, listed behind them. Keeps the version before: as much memory as the shards."""

    def __init__(self, manifest: Manifest, layout: Layout, most: bool | int) -> None:
        self._shards = sum(layout.regions)
        super().__init__(manifest, layout, most, 0, _aligned(self._shards))
        self._before: Bytes | None = None

    def update(self, region: Bytes, stop: Int8) -> None:
        """List the changes of what is in ``region`` (``uint8[end]``) now.

        Raises:
            Aborted: Another thread set ``stop[0]``.
            SharedMemoryTooSmall: There is no memory for the words before.
        """
        self.begin()
        shards = region[: self._shards]
        if self._before is None:
            free = available_bytes()
            if free is not None and free < self._shards:
                raise SharedMemoryTooSmall(
                    f"deltas keep the last version of this rank's shards, {self._shards:,} bytes, and {free:,} bytes are available"
                )
            self._before = shards.copy()
            region[self._start : self._start + 32 * len(self.sections)] = np.frombuffer(self.sections.to_bytes(), np.uint8)
        elif self._base is None:
            self._before[:] = shards
        else:
            table = self.sections.table(*(self.sections.offset + memory.ctypes.data for memory in (self._before, region)))
            counts, payload = self._counts_at(region, 0), region[self._payload : self.end].view(np.uint32)
            units = find(table, counts, payload, self._changed, stop)
            if units is None:
                self._before[:] = shards
                return
            self._remember(self._base, Step(counts.copy(), payload[:units].copy()))
            self._list_wanted(self.listed(self._base, units), partial(self._unite, region, payload, stop))

    def _counts_at(self, region: Bytes, index: int) -> UInt16:
        first = self._counts + index * self._counts_each
        return region[first : first + 2 * self.sections.blocks].view(np.uint16)

    def _unite(self, region: Bytes, payload: UInt32, stop: Int8, steps: Sequence[Step], index: int, used: int) -> int | None:
        where = self.sections.offset + region.ctypes.data
        return unite(self.sections, where, steps, self._counts_at(region, index), payload[used:], stop)


class DeviceLists(ListedChanges[DeviceStep]):
    """Changes of shards in memory of a CUDA ``device``. Whoever has the memory of the lists calls :meth:`use` first."""

    def __init__(
        self, manifest: Manifest, layout: Layout, most: bool | int, region: int, offset: int, device: torch.device
    ) -> None:
        super().__init__(manifest, layout, most, region, offset, _DEVICE_SHARE)
        self._device = device
        self.scratch = torch.empty(0, dtype=torch.uint8, device=device)
        """Where copies of shards are converted. One memory for all, one after the other: there may be no room for two."""
        self._finder: ChangeFinder
        self._values: Int64

    @property
    def working_bytes(self) -> int:
        """Device memory beside that of the lists."""
        return ChangeFinder.bytes_for(self.sections)

    def use(self, memory: torch.Tensor, *, on_host: bool = False) -> None:
        """List in the region ``memory`` (``uint8``), on the device; ``on_host``: the version before is in host memory."""
        self._memory, self._finder = memory, ChangeFinder(self.sections, self._device, on_host=on_host)
        self._on_host = on_host
        content = np.frombuffer(self.sections.to_bytes(), np.uint8).copy()
        memory[self._start : self._start + len(content)] = torch.from_numpy(content).to(memory.device)

    def start(self, before: Int64, now: Int64) -> None:
        """Begin to compare the sections, which lie at these addresses."""
        self.begin()
        self._values = now if self._on_host else before  # once they are compared, both are the new version's
        self._finder.begin(before, now, *self._lists_at(0, 0))

    def _lists_at(self, index: int, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._counts + index * self._counts_each
        return self._memory[first : first + 2 * self.sections.blocks], self._memory[self._payload + 4 * used : self.end]

    def launch(self, first: int, last: int) -> None:
        """Compare the sections ``first <= i < last``, on the device's current stream, and make what was before equal."""
        self._finder.launch(first, last)

    def finish(self, deadline: Deadline) -> None:
        """Wait for all that was launched, and list what changed since the wanted versions.

        They are remembered where the device has room for another copy of the lists.
        """
        units, self._changed = self._finder.end(deadline)
        if units is None or self._base is None:
            return
        used = self.listed(self._base, units)
        full = self._device.type == "cuda" and room_for_copy(self._finder.step_bytes(units), self._device) is not None
        if not full:
            with suppress(torch.OutOfMemoryError):  # torch may have less than is free; who needs these lists gets all bytes
                self._remember(self._base, self._finder.step(units))
                self._list_wanted(used, partial(self._unite, deadline))

    def _unite(self, deadline: Deadline, steps: Sequence[DeviceStep], index: int, used: int) -> int | None:
        return self._finder.unite(steps, self._values, *self._lists_at(index, used), deadline)
