"""Changed words in GPU memory: found by the trainer rank that owns it, staged and applied by an engine rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.arrays import Int8, Int64, UInt64
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, ProtocolError
from weightsync.planning.geometry import spread
from weightsync.tensors.change_kernels import CHANGE_BLOCK
from weightsync.tensors.changes import Changes, PlannedChanges, Sections, ends_of
from weightsync.tensors.cuda.digest import weights_on
from weightsync.tensors.cuda.waiting import on_device_of, wait_for_device
from weightsync.tensors.digest import PUBLIC

CHUNK_BLOCKS = 1 << 16
"""Blocks that are compared in one launch; each takes 10 KiB of scratch memory."""
_SLOT = 10240
_QUADS = 1024  # 8 bytes each, of a block
_MOST_ITEMS = 1 << 25
_UNITED_BLOCKS = 1 << 14
"""Blocks of which a copy is made at a time: 128 MiB."""


def _waited(device: torch.device, deadline: Deadline, what: str) -> None:
    if device.type == "cuda":
        wait_for_device(device, deadline, what)


def _section_table(sections: Sections, before: Int64, now: Int64, device: torch.device) -> torch.Tensor:
    columns = np.stack([before, now, sections.nbytes, sections.word, sections.first[:-1]])
    return torch.from_numpy(np.ascontiguousarray(columns)).to(device)


def _sections_of_blocks(sections: Sections, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(sections), dtype=np.int32), np.diff(sections.first))).to(device)


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """What changed from one version to the next, in GPU memory: counts and lists, and where each block's list ends."""

    counts: torch.Tensor
    ends: torch.Tensor
    payload: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        return self.counts.nbytes + self.ends.nbytes + self.payload.nbytes


class ChangeFinder:
    """Lists the changed words of a trainer rank's ``sections`` on ``device``, as :func:`weightsync.tensors.changes.find` does.

    ``on_host``: what was before lies in host memory, where writing a whole block soon costs less than writing single words. Work
    goes to the device's current stream. Not thread-safe.
    """

    def __init__(
        self, sections: Sections, device: torch.device, *, on_host: bool = False, chunk_blocks: int = CHUNK_BLOCKS
    ) -> None:
        self._sections, self._device = sections, device
        self._chunk = min(chunk_blocks, max(sections.blocks, 1))
        self._blocks = _sections_of_blocks(sections, device)
        self._units = torch.zeros(sections.blocks, dtype=torch.int32, device=device)
        self._ends = torch.zeros(sections.blocks + 1, dtype=torch.int64, device=device)
        self._changed = torch.zeros(len(sections), dtype=torch.int64, device=device)
        self._scratch = torch.empty(self._chunk * _SLOT, dtype=torch.uint8, device=device)
        words = np.unique(sections.word).tolist()
        self._word = words[0] if len(words) == 1 else 0
        self._many = _QUADS // 4 if on_host else _QUADS

    @staticmethod
    def bytes_for(sections: Sections) -> int:
        """Device memory of this object, in bytes."""
        return min(CHUNK_BLOCKS, sections.blocks) * _SLOT + 16 * (sections.blocks + 1) + 48 * len(sections)

    def begin(self, before: Int64, now: Int64, counts: torch.Tensor, payload: torch.Tensor) -> None:
        """Compare sections at the addresses ``before`` (multiples of 16) and ``now``; counts and lists go to these (bytes)."""
        self._table = _section_table(self._sections, before, now, self._device)
        self._aligned = not np.any(now % 16)
        self._counts, self._payload = counts.view(torch.uint16), payload
        self._changed.zero_()

    def launch(self, first: int, last: int) -> None:
        """Start to list the changes of the sections ``first <= i < last``: from the first section on, without gaps."""
        start, end = int(self._sections.first[first]), int(self._sections.first[last])
        with on_device_of(self._scratch):
            for begin in range(start, end, self._chunk):
                self._compare(begin, min(begin + self._chunk, end))

    def _compare(self, begin: int, stop: int) -> None:
        """List the changes of some blocks, behind those of the blocks before them."""
        from weightsync.tensors.cuda.change_kernels import find_kernel, pack_kernel

        scratch, payload = self._scratch.data_ptr(), self._payload.data_ptr()
        find_kernel[(stop - begin,)](
            self._table, len(self._sections), self._blocks, begin, self._counts, self._units, self._changed, scratch,
            WORD=self._word, ALIGNED=self._aligned, MANY=self._many, LANES=128, num_warps=4,
        )  # fmt: skip
        ends = self._ends[begin + 1 : stop + 1]
        torch.cumsum(self._units[begin:stop], 0, dtype=torch.int64, out=ends)
        ends += self._ends[begin]
        pack_kernel[(-(-(stop - begin) // 8),)](
            self._table, len(self._sections), self._blocks, begin, stop, self._counts, self._ends[1:], scratch, payload,
            self._payload.nbytes // 4, ALIGNED=self._aligned, GROUP=8, LANES=64, num_warps=4,
        )  # fmt: skip

    def step_bytes(self, units: int) -> int:
        """What :meth:`step` takes, in bytes."""
        return self._counts.nbytes + self._ends.nbytes + 4 * units

    def step(self, units: int) -> DeviceStep:
        """A copy of what :meth:`end` has listed in so many units."""
        return DeviceStep(self._counts.clone(), self._ends.clone(), self._payload[: 4 * units].clone())

    def unite(
        self, steps: Sequence[DeviceStep], now: Int64, counts: torch.Tensor, payload: torch.Tensor, deadline: Deadline
    ) -> int | None:
        """List the words that changed in any of ``steps``, with the values at the addresses ``now``, as :meth:`begin` says.

        A copy of some blocks at a time, in which these words are others, is compared with what is now. Returns as :meth:`end` does.
        """
        from weightsync.tensors.cuda.change_kernels import mark_kernel

        self.begin(now, now, counts, payload)
        with on_device_of(self._scratch):
            size = min(self._chunk, _UNITED_BLOCKS)
            copies = torch.empty(size * CHANGE_BLOCK, dtype=torch.uint8, device=self._device)
            lists = [[step.counts.data_ptr(), step.ends.data_ptr(), step.payload.data_ptr()] for step in steps]
            chain = torch.tensor(lists, dtype=torch.int64).to(self._device)
            for begin in range(0, self._sections.blocks, size):
                stop = min(begin + size, self._sections.blocks)
                self._table[0] = (self._table[4] - begin) * CHANGE_BLOCK + copies.data_ptr()
                mark_kernel[(stop - begin,)](
                    self._table, len(self._sections), self._blocks, begin, chain, len(steps), copies.data_ptr(),
                    ALIGNED=self._aligned, LANES=256, num_warps=4,
                )  # fmt: skip
                self._compare(begin, stop)
            return self.end(deadline)[0]

    def end(self, deadline: Deadline) -> tuple[int | None, Int64]:
        """Wait, and return the units of the lists (``None`` if there was no room) and the changed words of each section."""
        _waited(self._device, deadline, f"looking for changes on {self._device}")
        units = int(self._ends[-1])
        return (units if 4 * units <= self._payload.nbytes else None), self._changed.to("cpu", copy=True).numpy()


class ChangeTables:
    """What kernels need to know of planned changes, on ``device``. Made once for a plan.

    Raises:
        ConfigurationError: The shards of both ends interleave too finely.
    """

    def __init__(self, planned: PlannedChanges, rows: int, device: torch.device, group: int = 4) -> None:
        sections, tiles = planned.sections, planned.tiles
        self.device, self.rows, self.group = device, rows, group
        first = tiles[:, 0] // CHANGE_BLOCK
        count = -(-(-(-ends_of(tiles) // CHANGE_BLOCK) - first) // group)
        if int(count.sum()) > _MOST_ITEMS:
            raise ConfigurationError("shards of the trainer and of this engine rank interleave too finely for changes")
        self.items: list[tuple[int, torch.Tensor]] = []
        """For each size of a word, the work of the programs."""
        for word in np.unique(tiles[:, 14]).tolist():
            chosen = np.flatnonzero(tiles[:, 14] == word)
            tile, part = spread(count[chosen])
            work = np.stack([chosen[tile], first[chosen[tile]] + part * group]).astype(np.int32)
            self.items.append((int(word), torch.from_numpy(work).to(device)))
        self.tiles = torch.from_numpy(np.ascontiguousarray(tiles.T)).to(device)
        nothing = np.zeros(len(sections), np.int64)
        self.sections = _section_table(sections, nothing, nothing, device)
        self.blocks = _sections_of_blocks(sections, device)
        runs = np.zeros(max(sections.blocks, 1), np.int32)
        for run, (start, stop) in enumerate(zip(planned.starts.tolist(), planned.stops.tolist(), strict=True)):
            runs[start:stop] = run
        self.runs = torch.from_numpy(runs).to(device)
        self.edges = torch.from_numpy(np.concatenate([planned.starts, planned.stops, [sections.blocks]])).to(device)


class DeviceChanges(Changes):
    """Changes that are staged in GPU memory, of targets there. Work goes to the current stream of the tables' device."""

    def __init__(self, planned: PlannedChanges, tables: ChangeTables) -> None:
        self.counts = torch.empty(max(planned.sections.blocks, 1), dtype=torch.uint16, device=tables.device)
        super().__init__(planned, self.counts.data_ptr())
        self._tables = tables
        self._bad = torch.zeros(1, dtype=torch.int32, device=tables.device)

    def _edges(self, deadline: Deadline) -> tuple[Int64, Int64, int]:
        from weightsync.tensors.cuda.change_kernels import units_kernel

        tables, sections = self._tables, self._planned.sections
        with on_device_of(tables.tiles):
            units = torch.zeros(sections.blocks, dtype=torch.int32, device=tables.device)
            self._ends = torch.zeros(sections.blocks + 1, dtype=torch.int64, device=tables.device)
            if sections.blocks:
                units_kernel[(-(-sections.blocks // 1024),)](
                    tables.sections, len(sections), tables.blocks, sections.blocks, self.counts, units, self._bad, LANES=1024
                )
                torch.cumsum(units, 0, dtype=torch.int64, out=self._ends[1:])
            edges = self._ends[tables.edges]
            _waited(tables.device, deadline, "counting changes")
            self._check("the source lists more changes than there are words")
            firsts, stops = np.split(edges[:-1].cpu().numpy(), 2)
            return firsts, stops, int(edges[-1])

    def _check(self, message: str) -> None:
        if int(self._bad):
            raise ProtocolError(message)

    @property
    def _address(self) -> int:
        return self._payload.data_ptr()

    def allocate(self) -> None:
        """See :meth:`Changes.allocate`. Raises :class:`~weightsync.errors.ConfigurationError` if the device has no room."""
        device = self._tables.device
        try:
            with on_device_of(self._bad):
                self._payload = torch.empty(max(self.units, 1), dtype=torch.int32, device=device)
                self._kept = torch.empty(max(self.units, 1), dtype=torch.int32, device=device)
                shift = self._offsets[:-1] - self._firsts if len(self._firsts) else np.zeros(1, np.int64)
                self._shift = torch.from_numpy(shift).to(device)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(f"{device} has no room for {8 * self.units:,} bytes of changes: {error}") from None

    def predict(self, digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        """See :meth:`Changes.predict`."""
        super().predict(digests, stop, deadline)
        self._check("the changes of a block of the source are not in order, or outside of it")

    def warm(self, deadline: Deadline) -> None:
        """Compile and load the kernels by changes of nothing, so that the first pause does not pay for it."""
        self.counts.view(torch.int16).zero_()
        self.place(0, deadline)
        self.allocate()
        self._run((0, 1, 2, 3), np.zeros(self._tables.rows, np.uint64), np.zeros(1, np.int8), deadline)

    def _run(self, steps: tuple[int, ...], digests: UInt64, stop: Int8, deadline: Deadline) -> None:
        """Launch ``steps`` one after the other, and wait for the last."""
        tables = self._tables
        with on_device_of(tables.tiles):
            out = torch.zeros(tables.rows, dtype=torch.int64, device=tables.device)
            for step in steps:
                if stop[0]:
                    raise Aborted("the changes of this version were not all applied: the update was aborted")
                for word, work in tables.items:
                    self._launch(step, word, work, out)
            _waited(tables.device, deadline, "applying changes")
            digests += out.cpu().numpy().view(np.uint64)

    def _launch(self, step: int, word: int, work: torch.Tensor, out: torch.Tensor, *, lanes: int = 64, warps: int = 4) -> None:
        from weightsync.tensors.cuda.change_kernels import apply_kernel

        tables = self._tables
        apply_kernel[(work.shape[1],)](
            tables.tiles, tables.tiles.shape[1], work, work.shape[1], self.counts, self._ends, self._shift, tables.runs,
            self._payload.data_ptr(), self._kept.data_ptr(), weights_on(PUBLIC, tables.device), out, self._bad,
            STEP=step, WORD=word, GROUP=tables.group, LANES=lanes, num_warps=warps,
        )  # fmt: skip
