# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, B023, E501
"""Finds, applies and undoes changed words on one GPU, against a copy of the same bytes: ``python -m benchmarks.gpu_changes OUT``.

The shapes are those of Qwen3-30B-A3B, or as many of its tensors as fit twice (``--gigabytes``); times are scaled to all of them.
``--sweep`` tries other sizes of a program; ``--device cpu`` runs a tiny case by Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.model import Manifest
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.tensors.changes import PlannedChanges, Sections
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.cuda.changes import ChangeFinder, ChangeTables, DeviceChanges
from weightsync.tensors.cuda.digest import LayoutDigest
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.shards import shard, torch_dtype
from weightsync_bench.shapes import qwen3_30b_a3b

CASES = (("random", 0.001), ("random", 0.01), ("random", 0.03), ("random", 0.1), ("rows", 0.01))
HERE = Host("here", "here")
NEVER = np.zeros(1, np.int8)
CHUNK = 1 << 28


def soon() -> Deadline:
    return Deadline(120.0)


class Timer:
    """Milliseconds on the device, or of this process where there is none."""

    def __init__(self, device) -> None:
        self.cuda = device.type == "cuda"

    def once(self, work) -> float:
        if not self.cuda:
            started = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - started)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def median(self, work, repeats=5, between=lambda: None) -> float:
        times = []
        for index in range(repeats + 1):
            between()
            took = self.once(work)
            if index or not self.cuda:
                times.append(took)
            if not self.cuda:
                break
        return statistics.median(times)


def change(memory, kind, share) -> None:
    """Change this share of the words; the same words again when it is called again, which undoes it."""
    draw = torch.Generator(memory.device).manual_seed(7)
    words = memory.view(torch.int16)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        if kind == "rows":
            rows = part[: len(part) // 2048 * 2048].view(-1, 2048)
            rows[torch.rand(len(rows), device=memory.device, generator=draw) < share] ^= 1
        else:
            part[torch.rand(len(part), device=memory.device, generator=draw) < share] ^= 1


class Case:
    """Twice the weights, and everything that is made once."""

    def __init__(self, gigabytes: float, device) -> None:
        whole = qwen3_30b_a3b()
        self.device, self.timer = device, Timer(device)
        specs, size = [], 0
        for spec in whole:
            if size + spec.nbytes > gigabytes * 1e9:
                continue
            specs.append(spec)
            size += spec.nbytes
        self.manifest = Manifest(specs)
        self.scale = Manifest(whole).nbytes / self.manifest.nbytes
        meta = [
            shard(
                spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta"), spec.shape, (0,) * len(spec.shape)
            )
            for spec in self.manifest
        ]
        self.layout = packed_layout(self.manifest, meta)
        nbytes = self.layout.regions[0]
        self.before = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for start in range(0, nbytes // 8, CHUNK):
            self.before[: nbytes // 8 * 8].view(torch.int64)[start : start + CHUNK].random_()
        self.before.view(torch.int16)[:] &= 0x3FFF
        self.now = self.before.clone()
        self.sections = Sections.of(self.manifest, self.layout)
        self.counts = torch.zeros(2 * self.sections.blocks, dtype=torch.uint8, device=device)
        self.finder = ChangeFinder(self.sections, device)
        print(
            f"{len(self.manifest):,} tensors, {self.manifest.nbytes / 1e9:.2f} GB, scaled by {self.scale:.2f}; "
            f"{self.sections.blocks:,} blocks; finder {ChangeFinder.bytes_for(self.sections) / 1e9:.2f} GB", flush=True,
        )  # fmt: skip

    def views(self, memory):
        shards = []
        for row, spec in enumerate(self.manifest):
            first = int(self.layout.offset[row])
            view = memory[first : first + spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)
            shards.append(shard(spec.name, view, spec.shape, (0,) * len(spec.shape)))
        return shards

    def address(self, memory):
        return self.sections.offset + memory.data_ptr()

    def planned(self):
        layout, addresses = layout_in_place(self.manifest, self.views(self.before), None)
        plan = plan_transfer(self.manifest, [SourceRank("source", HERE, self.layout)], [TargetRank("target", HERE, layout)])
        tables = tiles_of(self.manifest, plan.pieces("target"), layout, addresses, [(0, len(layout))])
        started = time.perf_counter()
        planned = PlannedChanges(tables[0], self.sections)
        tables = ChangeTables(planned, len(layout), self.device)
        print(
            f"tables made in {time.perf_counter() - started:.2f} s: {sum(work.shape[1] for _, work in tables.items):,} items",
            flush=True,
        )
        return planned, tables, LayoutDigest(self.manifest, layout, addresses, self.device)


def run(case, kind, share, planned, tables, digest, sweep) -> dict:
    timer, scale = case.timer, case.scale
    change(case.now, kind, share)
    room = min(int(case.manifest.nbytes * (4.5 * share / 2 + 0.002)), case.manifest.nbytes)
    payload = torch.zeros(room // 4 * 4, dtype=torch.uint8, device=case.device)
    same_again = [False]

    def restore() -> None:
        if same_again[0]:
            change(case.before, kind, share)
        same_again[0] = True

    def find() -> None:
        case.finder.begin(case.address(case.before), case.address(case.now), case.counts, payload)
        case.finder.launch(0, len(case.sections))

    find_ms = timer.median(find, 3, restore)
    units, changed = case.finder.end(soon())
    assert units is not None, "no room"
    words = int(changed.sum())
    equal = torch.equal(case.before, case.now)
    if sweep:
        sweep_find(case, restore, payload)
    new_digests = digest.digests()
    change(case.before, kind, share)
    base = digest.digests()
    changes = DeviceChanges(planned, tables)
    changes.counts.view(torch.uint8)[:] = case.counts
    place_ms = timer.once(lambda: changes.place(units, soon()))
    changes.allocate()
    assert changes.units == units
    changes._payload.view(torch.uint8)[:] = payload[: 4 * units]
    out = {}

    def step(*steps):
        digests = base.copy()
        out["digests"] = digests
        changes._run(steps, digests, NEVER, soon())

    predict_ms = timer.median(lambda: step(0))
    predicted = np.array_equal(out["digests"], new_digests)
    changes._check("the lists are not in order")
    apply_ms = timer.median(lambda: step(1))
    read_ms = timer.median(lambda: step(3))
    both_ms = timer.median(lambda: step(1, 3))
    exact = np.array_equal(out["digests"], new_digests) and torch.equal(case.before, case.now)
    if sweep:
        sweep_apply(case, changes, planned, tables)
    undo_ms = timer.median(lambda: step(2, 3))
    change(case.now, kind, share)
    undone = torch.equal(case.before, case.now) and np.array_equal(out["digests"], base)
    row = {
        "kind": kind, "share": share, "changed": words / (case.manifest.nbytes / 2), "find_ms": find_ms * scale, "place_ms": place_ms * scale,
        "predict_ms": predict_ms * scale, "apply_ms": apply_ms * scale, "read_back_ms": read_ms * scale,
        "apply_and_read_back_ms": both_ms * scale, "undo_ms": undo_ms * scale,
        "bytes_per_word": (4 * units + case.counts.nbytes) / max(words, 1), "gigabytes": (4 * units + case.counts.nbytes) * scale / 1e9,
        "found": equal, "predicted": predicted, "exact": exact, "undone": undone,
    }  # fmt: skip
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return row


def sweep_find(case, restore, payload) -> None:
    from weightsync.tensors.cuda import changes as module
    from weightsync.tensors.cuda.change_kernels import find_kernel

    finder = case.finder
    for lanes, warps in ((128, 4), (64, 2), (128, 2), (256, 4), (256, 8), (128, 8)):
        find_kernel[(1,)](
            finder._table, len(case.sections), finder._blocks, 0, finder._counts, finder._units, finder._changed,
            finder._scratch.data_ptr(), WORD=finder._word, ALIGNED=finder._aligned, MANY=finder._many, LANES=lanes, num_warps=warps,
        )  # fmt: skip
        restore()
        finder.begin(case.address(case.before), case.address(case.now), case.counts, payload)

        def only() -> None:
            for begin in range(0, case.sections.blocks, finder._chunk):
                stop = min(begin + finder._chunk, case.sections.blocks)
                kernel = find_kernel[(stop - begin,)](
                    finder._table, len(case.sections), finder._blocks, begin, finder._counts, finder._units, finder._changed,
                    finder._scratch.data_ptr(), WORD=finder._word, ALIGNED=finder._aligned, MANY=finder._many, LANES=lanes,
                    num_warps=warps,
                )  # fmt: skip
            only.kernel = kernel

        took = case.timer.once(only)
        registers = getattr(only.kernel, "n_regs", None)
        print(f"  find alone, {lanes} lanes, {warps} warps: {took * case.scale:.1f} ms, {registers} registers", flush=True)
    del module


def sweep_apply(case, changes, planned, tables) -> None:
    for group in (2, 4, 8):
        other = ChangeTables(planned, tables.rows, case.device, group)
        changes._tables = other
        out = torch.zeros(other.rows, dtype=torch.int64, device=case.device)
        for lanes in (32, 64):
            for warps in (1, 2, 4):
                took = {}
                for step in (1, 3):

                    def work(step=step, lanes=lanes, warps=warps) -> None:
                        for word, items in other.items:
                            changes._launch(step, word, items, out, lanes=lanes, warps=warps)

                    took[step] = case.timer.median(work, 3) * case.scale
                print(
                    f"  group {group}, {lanes} lanes, {warps} warps: scatter {took[1]:.1f} ms, read back {took[3]:.1f} ms",
                    flush=True,
                )
    changes._tables = tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=30.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sweep", action="store_true", help="at 1 %% random")
    options = parser.parse_args()
    device = torch.device(options.device) if options.device == "cpu" else torch.device("cuda", 0)
    case = Case(options.gigabytes, device)
    copy_ms = case.timer.median(lambda: case.now.copy_(case.before)) * case.scale
    planned, tables, digest = case.planned()
    digest_ms = case.timer.median(digest.digests) * case.scale
    print(f"copy {copy_ms:.1f} ms, digest {digest_ms:.1f} ms", flush=True)
    rows = [
        run(case, kind, share, planned, tables, digest, options.sweep and (kind, share) == ("random", 0.01))
        for kind, share in CASES
    ]
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    options.out.write_text(json.dumps({"device": name, "copy_ms": copy_ms, "digest_ms": digest_ms, "rows": rows}, indent=1))
    assert all(row["found"] and row["predicted"] and row["exact"] and row["undone"] for row in rows), "a result is wrong"
    print("all exact and undone", flush=True)


if __name__ == "__main__":
    main()
