"""Changed words: found, listed, and applied through any cut of the tensors, undone bit for bit; broken lists are refused.

Every case runs on the kernels for CPUs and, where Triton is installed, on those for GPUs: on a GPU, or by Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where kernels are imported

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ProtocolError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.tensors import copies
from weightsync.tensors.change_kernels import CHANGE_BLOCK
from weightsync.tensors.changes import Changes, HostChanges, PlannedChanges, Sections, Step, find, unite
from weightsync.tensors.copies import copy_tiles
from weightsync.tensors.copy_table import CopyTable, tiles_of
from weightsync.tensors.cuda.changes import ChangeFinder, ChangeTables, DeviceChanges, DeviceStep
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.shards import Shard, shard, torch_dtype

SPECS = (
    TensorSpec("cube", (3, 5, 7), "uint8"),
    TensorSpec("embed", (130, 96), "bfloat16"),
    TensorSpec("line", (9001,), "uint8"),
    TensorSpec("narrow", (33, 3), "float32"),
    TensorSpec("scalar", (), "float64"),
    TensorSpec("wide", (5, 4099), "uint8"),
)
MANIFEST = Manifest(SPECS)
HERE = Host("here", "here")
NEVER = np.zeros(1, np.int8)


def cut(spec: TensorSpec, rank: int, ranks: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and shape of a rank's part of a tensor, cut along ``dim``."""
    if len(spec.shape) <= dim:
        return (0,) * len(spec.shape), spec.shape
    first, last = spec.shape[dim] * rank // ranks, spec.shape[dim] * (rank + 1) // ranks
    starts, shape = [0] * len(spec.shape), list(spec.shape)
    starts[dim], shape[dim] = first, last - first
    return tuple(starts), tuple(shape)


GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
KINDS = ["host", pytest.param("device", marks=pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton"))]


def soon() -> Deadline:
    return Deadline(60.0)


def moved(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor where kernels of this kind work on it, with its strides."""
    return tensor if kind == "host" or GPU.type == "cpu" else torch.empty_like(tensor, device=GPU).copy_(tensor)


class Target(NamedTuple):
    """An engine rank that holds the columns, or the rows, of a version; every other tensor of it is stored transposed."""

    shards: list[Shard]
    layout: Layout
    changes: Changes
    cut: int | None

    def bytes(self) -> list[bytes]:
        return [one.tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in self.shards]

    def digests(self) -> npt.NDArray[np.uint64]:
        out = np.zeros(len(self.layout), np.uint64)
        here = [shard(one.name, one.tensor.cpu(), one.shape, one.box.starts) for one in self.shards]
        _, addresses = layout_in_place(MANIFEST, here, self.cut)
        digest_rows(MANIFEST, self.layout, addresses, 0, len(out), out)
        return out


class Region:
    """What a trainer rank publishes, and the lists of it."""

    host_cut: int | None = 4096

    def __init__(self, seed: int, kind: str = "host", room: int = 1 << 17) -> None:
        self.kind = kind
        self.cut = self.host_cut if kind == "host" else None  # the interpreter is slow
        whole = [
            shard(spec.name, torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)), spec.shape, (0,) * len(spec.shape))
            for spec in SPECS
        ]
        self.layout = packed_layout(MANIFEST, whole)
        self.sections = Sections.from_bytes(Sections.of(MANIFEST, self.layout).to_bytes())
        self.nbytes = self.layout.regions[0]
        draw = np.random.default_rng(seed)
        self.before = torch.from_numpy(draw.integers(0, 256, self.nbytes, np.uint8))
        self.now = self.before.clone()
        self.counts = np.zeros(self.sections.blocks, np.uint16)
        self.payload = np.zeros(room, np.uint32)
        self.changed = np.zeros(len(self.sections), np.int64)
        self.step: DeviceStep | None = None

    def change(self, seed: int, share: float) -> None:
        draw = np.random.default_rng(seed)
        for first, size in zip(self.sections.offset.tolist(), self.sections.nbytes.tolist(), strict=True):
            self.now.numpy()[first : first + size][draw.random(size) < share] ^= 0x55

    def find(self, offset: int = 0, *, on_host: bool = False) -> int | None:
        """``offset``: bytes by which what is now lies off a multiple of 16. ``on_host``: as if what was before were there."""
        sections = self.sections
        if self.kind == "host":
            table = sections.table(*(sections.offset + memory.data_ptr() for memory in (self.before, self.now)))
            return find(table, self.counts, self.payload, self.changed, NEVER)
        before, now = self.before.to(GPU), torch.zeros(self.nbytes + 32, dtype=torch.uint8, device=GPU)
        offset += -now.data_ptr() % 16
        now[offset : offset + self.nbytes] = self.now.to(GPU)
        counts = torch.zeros(2 * len(self.counts), dtype=torch.uint8, device=GPU)
        payload = torch.zeros(4 * len(self.payload), dtype=torch.uint8, device=GPU)
        finder = ChangeFinder(sections, GPU, on_host=on_host, chunk_blocks=3)
        self.memory, self.finder = now[offset : offset + self.nbytes], finder
        finder.begin(sections.offset + before.data_ptr(), sections.offset + self.memory.data_ptr(), counts, payload)
        finder.launch(0, 2)
        finder.launch(2, len(sections))
        units, self.changed = finder.end(soon())
        self.step = finder.step(units or 0)
        self.before, self.counts = before.cpu(), counts.cpu().numpy().view(np.uint16)
        self.payload = payload.cpu().numpy().view(np.uint32)
        return units

    def unite(self, steps: list[Step | DeviceStep], room: int, stop: npt.NDArray[np.int8] = NEVER) -> int | None:
        """List what changed in any of ``steps``, in ``room`` units."""
        offsets, payload = self.sections.offset, np.zeros(room, np.uint32)
        if self.kind == "host":
            ours = [step for step in steps if isinstance(step, Step)]
            units = unite(self.sections, offsets + self.now.data_ptr(), ours, self.counts, payload, stop)
        else:
            theirs = [step for step in steps if isinstance(step, DeviceStep)]
            counts, lists = (torch.from_numpy(memory.view(np.uint8)).to(GPU) for memory in (self.counts, payload))
            units = self.finder.unite(theirs, offsets + self.memory.data_ptr(), counts, lists, soon())
            self.counts, payload = counts.cpu().numpy().view(np.uint16), lists.cpu().numpy().view(np.uint32)
        self.payload = payload
        return units

    def target(self, rank: int, ranks: int, dim: int, *, swapped: bool, base: torch.Tensor, total: int) -> Target:
        """A rank that holds its part of ``base``, and to which the lists, of ``total`` units, have come."""
        here, shards = [], []
        for index, spec in enumerate(SPECS):
            starts, shape = cut(spec, rank, ranks, dim)
            memory = torch.zeros(shape, dtype=torch_dtype(spec.dtype))
            if spec.name == "padded":
                memory = torch.zeros((shape[0], shape[1] + 32), dtype=memory.dtype)[:, : shape[1]]
            if swapped and index in ((1, 3, 5) if self.cut else (3,)) and len(shape) == 2:
                memory = torch.zeros(shape[::-1], dtype=memory.dtype).T
            here.append(shard(spec.name, memory, spec.shape, starts))
        layout, addresses = layout_in_place(MANIFEST, here, self.cut)
        for table in self.tables(layout, addresses):
            copy_tiles(table, [base.data_ptr()])
        shards = [shard(one.name, moved(one.tensor, self.kind), one.shape, one.box.starts) for one in here]
        layout, addresses = layout_in_place(MANIFEST, shards, self.cut)
        planned = PlannedChanges(self.tables(layout, addresses), self.sections)
        tables = None if self.kind == "host" else ChangeTables(planned, len(layout), GPU)
        changes: Changes = HostChanges(planned) if tables is None else DeviceChanges(planned, tables)
        self.copy(changes.counts_table(0, 0), self.counts)
        changes.place(total, soon())
        changes.allocate()
        self.copy(changes.lists_table(0, 0), self.payload)
        return Target(shards, layout, changes, self.cut)

    def tables(self, layout: Layout, addresses: tuple[int, ...]) -> list[CopyTable]:
        plan = plan_transfer(MANIFEST, [SourceRank("source", HERE, self.layout)], [TargetRank("target", HERE, layout)])
        pieces: Pieces = plan.pieces("target")
        return tiles_of(MANIFEST, pieces, layout, addresses, [(0, len(layout))])[0]

    def copy(self, table: CopyTable, source: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]) -> None:
        if self.kind == "host" or GPU.type == "cpu":
            copy_tiles(table, [source.ctypes.data])
        else:
            from weightsync.tensors.cuda.copies import TileCopy

            there = torch.from_numpy(source.view(np.uint8).copy()).to(GPU)
            TileCopy([[(table, [there.data_ptr()])]], GPU).launch()
            torch.cuda.synchronize()


SHARES = (0.0, 0.0005, 0.01, 0.2, 0.4, 0.6, 1.0)


def check_there_and_back(
    kind: str, seed: int, share: float, ranks: int, dim: int, *, swapped: bool, offset: int = 0, on_host: bool = False
) -> None:
    region = Region(seed, kind)
    old = region.before.clone()
    region.change(seed + 1, share)
    used = region.find(offset, on_host=on_host)
    assert used is not None and used <= region.nbytes // 4 + len(SPECS), "lists are longer than the version"
    assert torch.equal(region.before, region.now)
    words = Region(seed)
    words.change(seed + 1, share)
    assert words.find() == used
    for mine, theirs in ((region.counts, words.counts), (region.payload[:used], words.payload[:used])):
        assert np.array_equal(mine, theirs), "the two kinds of kernels list differently"
    assert region.changed.tolist() == words.changed.tolist() and words.changed.sum() == words.counts.sum()
    for rank in range(ranks):
        target = region.target(rank, ranks, dim, swapped=swapped, base=old, total=used)
        base, before = target.digests(), target.bytes()
        fresh = region.target(rank, ranks, dim, swapped=swapped, base=region.now, total=used)
        predicted, applied = base.copy(), base.copy()
        target.changes.predict(predicted, NEVER, soon())
        assert target.bytes() == before, "predicting changed the parameters"
        target.changes.apply(applied, NEVER, soon())
        assert target.bytes() == fresh.bytes()
        assert np.array_equal(applied, fresh.digests()) and np.array_equal(predicted, applied)
        reverted = base.copy()
        target.changes.revert(reverted, NEVER, soon())
        assert target.bytes() == before and np.array_equal(reverted, base)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(SHARES), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_changes_lead_to_the_new_version_and_back(seed: int, share: float, ranks: int, dim: int, swapped: bool) -> None:
    check_there_and_back("host", seed, share, ranks, dim, swapped=swapped)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05])
@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (3, 0), (2, 1)])
def test_matrices_of_many_blocks_too(share: float, ranks: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (  # of which blocks lie in one piece
        TensorSpec("long", (5, 40_001), "uint8"),
        TensorSpec("padded", (300, 96), "bfloat16"),
        TensorSpec("rows", (701, 100), "float32"),
        TensorSpec("some", (1200, 100), "bfloat16"),
        TensorSpec("third", (1, 50_000), "bfloat16"),
    )
    for name, value in (("SPECS", specs), ("MANIFEST", Manifest(specs))):
        monkeypatch.setattr(sys.modules[__name__], name, value)
    monkeypatch.setattr(Region, "host_cut", None)
    check_there_and_back("host", ranks, share, ranks, dim, swapped=False)


@pytest.mark.parametrize("share", SHARES)
def test_several_threads_do_the_same(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_shares", lambda nbytes, _: [len(nbytes) * part // 4 for part in range(5)])
    for seed in range(5):
        check_there_and_back("host", seed, share, 1 + seed % 3, seed % 3, swapped=seed % 2 == 0)


def test_only_what_runs_in_the_pause_has_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def shares(nbytes: np.ndarray, cores_each: int) -> list[int]:
        asked.append(cores_each)
        return [0, len(nbytes)]

    monkeypatch.setattr(copies, "_shares", shares)
    check_there_and_back("host", 0, 0.01, 1, 0, swapped=False)
    assert (asked[0], set(asked[1:])) == (copies.CORES_EACH, {1}), "step 0 is taken while the engine serves"


@pytest.mark.timeout(400)  # the interpreter is slow
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize(("share", "ranks", "dim", "swapped", "offset", "on_host"), [
    (0.0005, 1, 0, True, 8, False), (0.01, 2, 1, False, 0, False), (0.4, 1, 0, False, 4, False), (1.0, 1, 2, False, 12, False),
    (0.01, 1, 0, False, 0, True), (0.1, 1, 0, False, 0, True),
])  # fmt: skip
def test_kernels_for_gpus_do_the_same(
    kind: str, share: float, ranks: int, dim: int, swapped: bool, offset: int, on_host: bool
) -> None:
    check_there_and_back(kind, 1, share, ranks, dim, swapped=swapped, offset=offset, on_host=on_host)


def found(kind: str, share: float = 0.3) -> tuple[Region, Target]:
    region = Region(0, kind)
    old = region.before.clone()
    region.change(1, share)
    used = region.find()
    assert used is not None
    return region, region.target(0, 1, 0, swapped=False, base=old, total=used)


def test_only_the_lists_that_a_rank_needs_are_read() -> None:
    specs = [TensorSpec(name, (1 << 22,), "uint8") for name in "ab"]
    sections = Sections(np.zeros(2, np.int64), np.array([0, 1 << 22]), np.full(2, 1 << 22), np.ones(2, np.int64))
    tables = [CopyTable.of_table(np.array([[0, start, 0, 64, 0, 1, 4096, 0, 0, 0, 0, 0, 1]], np.int64)) for start in (0, 3 << 21)]
    planned = PlannedChanges(tables, sections)
    assert len(specs) == len(planned.starts) == 2
    assert (planned.stops - planned.starts).tolist() == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_costs_its_size_and_a_place(kind: str) -> None:
    region = Region(0, kind)
    name = [spec.name for spec in SPECS]
    for tensor, step, count in (("embed", 2, 40), ("narrow", 4, 10), ("line", 1, 8)):
        first = int(region.layout.offset[name.index(tensor)])
        region.now.numpy()[first : first + step * count : step] ^= 1
    assert region.find() == 40 + (10 * 6) // 4 + (8 * 3) // 4
    assert region.changed.tolist() == [0, 40, 8, 10, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_that_finds_no_room_is_no_list(kind: str) -> None:
    region = Region(0, kind)
    region.payload = region.payload[:1000]
    region.change(1, 0.5)
    assert region.find() is None


@pytest.mark.timeout(400)  # the interpreter is slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(0.01, 0.01), (0.01, 0.0, 0.3), (0.001, 0.6, 0.001), (1.0, 0.01)])
def test_steps_are_united_to_one_with_the_values_of_the_last(kind: str, shares: tuple[float, ...]) -> None:
    region = Region(0, kind)
    old = region.before.clone()
    steps: list[Step | DeviceStep] = []
    seen = []
    for number, share in enumerate(shares):
        region.change(number, share)
        if number == 1:
            region.now.numpy()[region.layout.offset[1] :][:2] = old.numpy()[region.layout.offset[1] :][:2]  # as it was at first
        used = region.find(4 * number)
        assert used is not None
        step = Step(region.counts.copy(), region.payload[:used].copy()) if kind == "host" else region.step
        assert step is not None
        steps.append(step)
        seen.append(region.counts.astype(int))
    used = region.unite(steps, len(region.payload))
    assert used is not None
    assert np.all(region.counts >= np.max(seen, axis=0))
    target = region.target(0, 2, 0, swapped=False, base=old, total=used)
    fresh = region.target(0, 2, 0, swapped=False, base=region.now, total=used)
    digests = target.digests()
    target.changes.predict(digests, NEVER, soon())
    target.changes.apply(target.digests(), NEVER, soon())
    assert target.bytes() == fresh.bytes() and np.array_equal(digests, fresh.digests())
    assert region.unite(steps, 10) is None
    if kind == "host":
        with pytest.raises(Aborted):
            region.unite(steps, len(region.payload), np.ones(1, np.int8))


def test_a_search_that_is_stopped_raises() -> None:
    region = Region(0)
    table = region.sections.table(*(region.sections.offset + memory.data_ptr() for memory in (region.before, region.now)))
    with pytest.raises(Aborted):
        find(table, region.counts, region.payload, region.changed, np.ones(1, np.int8))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_stopped_raises_and_is_undone(kind: str) -> None:
    _, target = found(kind)
    base, before = target.digests(), target.bytes()
    target.changes.predict(base.copy(), NEVER, soon())
    with pytest.raises(Aborted):
        target.changes.apply(base.copy(), np.ones(1, np.int8), soon())
    reverted = base.copy()
    target.changes.revert(reverted, NEVER, soon())
    assert target.bytes() == before and np.array_equal(reverted, base)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_between_shows_in_the_digests(kind: str) -> None:
    """The words are read again after they were written."""
    _, target = found(kind, 0.01)
    base = target.digests()
    predicted = base.copy()
    target.changes.predict(predicted, NEVER, soon())
    target.changes.apply(base.copy(), NEVER, soon())
    for one in target.shards:
        one.tensor.view(-1).view(torch.uint8)[:] ^= 1
    reverted = base.copy()
    assert isinstance(target.changes, HostChanges | DeviceChanges)
    target.changes._run((3,), reverted, NEVER, soon())
    assert not np.array_equal(reverted, predicted)


def wrong_order(places: npt.NDArray[np.uint16]) -> None:
    places[:2] = places[1::-1].copy()


def repeated(places: npt.NDArray[np.uint16]) -> None:
    places[1] = places[0]


def outside(places: npt.NDArray[np.uint16]) -> None:
    places[-1] = CHANGE_BLOCK // 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [wrong_order, repeated, outside])
def test_places_that_are_not_in_order_are_refused(kind: str, spoil: object) -> None:
    region = Region(0, kind)
    old = region.before.clone()
    region.change(1, 0.01)
    used = region.find()
    assert used is not None and callable(spoil)
    spoil(region.payload.view(np.uint16)[: int(region.counts[0])])
    target = region.target(0, 1, 0, swapped=False, base=old, total=used)
    with pytest.raises(ProtocolError, match="not in order"):
        target.changes.predict(np.zeros(len(target.layout), np.uint64), NEVER, soon())


def test_lists_that_were_refused_or_not_looked_at_are_not_applied() -> None:
    region = Region(0)
    old = region.before.clone()
    region.change(1, 0.01)
    used = region.find()
    assert used is not None
    outside(region.payload.view(np.uint16)[: int(region.counts[0])])
    target = region.target(0, 1, 0, swapped=False, base=old, total=used)
    digests, before = np.zeros(len(target.layout), np.uint64), target.bytes()
    for _ in range(2):
        for write in (target.changes.apply, target.changes.revert):
            with pytest.raises(ProtocolError, match="not been checked, or were refused"):
                write(digests, NEVER, soon())
        with pytest.raises(ProtocolError, match="not in order"):
            target.changes.predict(digests, NEVER, soon())
    assert target.bytes() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", ["total", "count"])
def test_counts_that_are_none_are_refused(kind: str, spoil: str) -> None:
    region = Region(0, kind)
    old = region.before.clone()
    region.change(1, 0.01)
    used = region.find()
    assert used is not None
    if spoil == "count":
        region.counts[0] = 0xFFFF
    with pytest.raises(ProtocolError, match="lists"):
        region.target(0, 1, 0, swapped=False, base=old, total=used + (spoil == "total"))


@pytest.mark.parametrize(
    "columns",
    [
        [[0], [0], [64], [3]], [[0, 0], [64, 0], [64, 64], [2, 2]], [[0, 0], [0, 0], [64, 64], [2, 2]], [[0], [-1], [64], [2]],
        [[0], [0], [1 << 50], [2]], [[1 << 30], [0], [64], [2]], [[0], [0], [-5], [2]], [[0], [0], [0], [2]],
    ],
)  # fmt: skip
def test_sections_that_are_none_are_refused(columns: list[list[int]]) -> None:
    with pytest.raises(ProtocolError, match="described"):
        Sections.from_bytes(np.array(columns, "<i8").tobytes())
    with pytest.raises(ProtocolError, match="described"):
        Sections.from_bytes(b"123")


@pytest.mark.parametrize("columns", [[[0], [64], [1 << 20], [1]], [[0], [0], [64], [1]], [[1], [0], [1 << 20], [1]]])
def test_a_plan_that_reads_beyond_the_sections_is_refused(columns: list[list[int]]) -> None:
    region = Region(0)
    shards = [
        shard(spec.name, torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)), spec.shape, (0,) * len(spec.shape))
        for spec in SPECS
    ]
    layout, addresses = layout_in_place(MANIFEST, shards, 4096)
    with pytest.raises(ProtocolError, match="the plan reads"):
        PlannedChanges(region.tables(layout, addresses), Sections.from_bytes(np.array(columns, "<i8").tobytes()))


def test_a_plan_that_reads_parts_of_words_is_refused() -> None:
    table = CopyTable.of_table(np.array([[0, 3, 0, 64, 0, 1, 5, 0, 0, 0, 0, 0, 1]], np.int64))
    with pytest.raises(ProtocolError, match="parts of their words"):
        PlannedChanges([table], Sections(*(np.array([value]) for value in (0, 0, 64, 2))))
