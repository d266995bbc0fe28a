# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
"""Measures digest and tile copy on one GPU against floors of the same run: ``python -m benchmarks.gpu_kernels OUT``.

Weights are random bytes. The shards of four FSDP ranks and of four TP ranks lie on the one GPU, a target rank at a time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.model import Layout, Manifest
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.planning.split import split_rows
from weightsync.protocol.messages import Host
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.cuda.copies import TileCopy
from weightsync.tensors.cuda.digest import LayoutDigest
from weightsync.tensors.digest import DigestConstants, digest_rows
from weightsync_bench.shapes import qwen3_8b, qwen3_30b_a3b
from weightsync_bench.sharding import fsdp, tensor_parallel

_DIGESTS = ((256, 4, 32), (256, 4, 64), (256, 4, 16), (512, 4, 8))
_COPIES = ((1024, 16, 64), (512, 16, 64), (2048, 16, 64), (2048, 8, 64), (1024, 16, 32))
_HOST = Host("here", "here")
_DEVICE = torch.device("cuda", 0)


@triton.jit
def _read(source, out, count, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The floor of reading: the same bytes in the same order, xor only."""
    start = tl.program_id(0).to(tl.int64) * STEP * 8
    lane = tl.arange(0, STEP)
    seen = tl.zeros((STEP,), tl.int64)
    for step in range(8):
        seen ^= tl.load(source + start + step * STEP + lane)
    if tl.sum(seen, axis=0) == count:
        tl.store(out, 1)


def milliseconds(work: Callable[[], Any], repeats: int = 15) -> float:
    """Median milliseconds of ``work`` on the device, after two warm-up calls."""
    times = []
    for index in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def floors() -> dict[str, float]:
    one = torch.empty(4 << 27, dtype=torch.int64, device=_DEVICE).random_()
    other = torch.empty_like(one)
    copy = 2 * one.nbytes / milliseconds(lambda: other.copy_(one)) / 1e6
    flag = torch.zeros(1, dtype=torch.int64, device=_DEVICE)
    reads = {}
    for step, warps in ((1024, 4), (2048, 8), (1024, 8), (2048, 4)):
        grid = (one.numel() // (step * 8),)
        ms = milliseconds(lambda step=step, warps=warps, grid=grid: _read[grid](one, flag, 12345, STEP=step, num_warps=warps))
        reads[f"{step}/{warps}"] = one.nbytes / ms / 1e6
    reads["torch.sum"] = one.nbytes / milliseconds(one.sum) / 1e6
    print("read floors GB/s", {key: round(value) for key, value in reads.items()}, "copy r+w", round(copy), flush=True)
    return {"copy_read_plus_write_GBps": copy, "read_GBps": max(reads.values())}


def check_sample(manifest: Manifest, layout: Layout, memory: torch.Tensor, got: np.ndarray[Any, Any]) -> int:
    """Compare with the CPU the rows that lie in the first 256 MiB and in 64 MiB near the end."""
    checked = 0
    host = np.zeros(layout.regions[0], np.uint8)  # untouched pages cost nothing
    ends = layout.ends(manifest)
    out = np.zeros(len(layout), np.uint64)
    for low, high in ((0, 256 << 20), (layout.regions[0] - (64 << 20), layout.regions[0])):
        host[low:high] = memory[low:high].cpu().numpy()
        rows = np.flatnonzero((layout.offset >= low) & (ends <= high))
        digest_rows(manifest, layout, (host.ctypes.data,), int(rows[0]), int(rows[-1]) + 1, out)
        if not np.array_equal(out[rows], got[rows]):
            raise SystemExit(f"digests differ in {int((out[rows] != got[rows]).sum())} of {len(rows)} rows")
        checked += len(rows)
    return checked


def case(name: str, manifest: Manifest, floor: dict[str, float], variants: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"bytes": manifest.nbytes, "tensors": len(manifest)}
    started = time.perf_counter()
    sources = [SourceRank(f"t{rank}", _HOST, layout) for rank, layout in enumerate(fsdp(manifest, 4))]
    targets = [
        TargetRank(f"e{rank}", _HOST, split_rows(manifest, layout, 1 << 20))
        for rank, layout in enumerate(tensor_parallel(manifest, 4))
    ]
    plan = plan_transfer(manifest, sources, targets)
    result["plan_seconds"] = time.perf_counter() - started
    memory = [
        torch.empty(rank.layout.regions[0] // 8 + 1, dtype=torch.int64, device=_DEVICE).random_().view(torch.uint8)
        for rank in sources
    ]
    target = torch.empty(targets[0].layout.regions[0], dtype=torch.uint8, device=_DEVICE)

    published = np.zeros(len(manifest), np.uint64)
    for rank, held in zip(sources, memory, strict=True):
        np.add.at(published, rank.layout.tensor, LayoutDigest(manifest, rank.layout, [held.data_ptr()], _DEVICE).digests())

    installed = np.zeros(len(manifest), np.uint64)
    result["ranks"] = []
    for place, rank in enumerate(targets):
        row: dict[str, Any] = {}
        started = time.perf_counter()
        pieces = plan.pieces(rank.member)
        tiles = tiles_of(manifest, pieces, rank.layout, [target.data_ptr()], [(0, len(rank.layout))])
        row["pieces_and_tiles_seconds"] = time.perf_counter() - started
        held = [memory[int(member[1:])].data_ptr() for member in pieces.sources]
        groups = [[(one[0], [base]) for one, base in zip(tiles, held, strict=True)]]
        started = time.perf_counter()
        copy = TileCopy(groups, _DEVICE)
        torch.cuda.synchronize()
        row["copy_table_seconds"] = time.perf_counter() - started
        started = time.perf_counter()
        digest = LayoutDigest(manifest, rank.layout, [target.data_ptr()], _DEVICE)
        torch.cuda.synchronize()
        row["digest_table_seconds"] = time.perf_counter() - started
        target.fill_(255)
        row |= {"bytes": copy.nbytes, "copy_table_bytes": copy.table_bytes, "digest_table_bytes": digest.table_bytes}
        row["copy_ms"] = milliseconds(copy.launch)
        got = digest.digests()
        row["digest_ms"] = milliseconds(digest.launch)
        row["keyed_digest_ms"] = milliseconds(lambda digest=digest: digest.launch(constants=DigestConstants(b"k" * 32)))
        if not np.array_equal(got, digest.digests()):
            raise SystemExit("the digest does not repeat")
        row["rows_equal_to_the_cpu"] = check_sample(manifest, rank.layout, target, got)
        # Tensors that every rank holds whole are counted with rank 0 only.
        whole = np.prod(manifest.shapes, axis=1) * manifest.itemsizes
        mine = np.bincount(rank.layout.tensor, rank.layout.sizes() * manifest.itemsizes[rank.layout.tensor], len(manifest))
        keep = (mine[rank.layout.tensor] < whole[rank.layout.tensor]) | (place == 0)
        np.add.at(installed, rank.layout.tensor[keep], got[keep])
        row["copy_over_floor"] = row["copy_ms"] / (2 * copy.nbytes / floor["copy_read_plus_write_GBps"] / 1e6)
        row["digest_GBps"] = digest.nbytes / row["digest_ms"] / 1e6
        row["digest_of_read_floor"] = row["digest_GBps"] / floor["read_GBps"]
        result["ranks"].append(row)
        print(name, rank.member, {key: round(value, 4) for key, value in row.items()}, flush=True)
        if variants and place == 1:
            result["variants"] = tune(manifest, rank.layout, target, groups)
    if not np.array_equal(published, installed):
        raise SystemExit(f"{name}: {int((published != installed).sum())} tensors arrived wrong")
    print(name, "every tensor's digest adds up to the published one; plan s", round(result["plan_seconds"], 2), flush=True)
    return result


def tune(manifest: Manifest, layout: Layout, target: torch.Tensor, groups: Any) -> dict[str, float]:
    found = {}
    for quads, warps, steps in _DIGESTS:
        digest = LayoutDigest(manifest, layout, [target.data_ptr()], _DEVICE, quads=quads, warps=warps, steps=steps)
        found[f"digest quads={quads} warps={warps} steps={steps} GBps"] = digest.nbytes / milliseconds(digest.launch, 9) / 1e6
        print(" ", *list(found.items())[-1], flush=True)
    for lanes, warps, size in _COPIES:
        copy = TileCopy(groups, _DEVICE, lanes=lanes, warps=warps, tile_bytes=size << 10)
        speed = 2 * copy.nbytes / milliseconds(copy.launch, 9) / 1e6
        found[f"copy lanes={lanes} warps={warps} tile={size}K GBps r+w"] = speed
        print(" ", *list(found.items())[-1], flush=True)
    return found


def main() -> None:
    out = Path(sys.argv[1])
    device = torch.cuda.get_device_name(_DEVICE)
    report: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }
    print(report, torch.cuda.mem_get_info(), flush=True)
    report["floors"] = floors()
    report["qwen3-8b"] = case("qwen3-8b", Manifest(qwen3_8b()), report["floors"], variants=True)
    out.write_text(json.dumps(report, indent=1))
    report["qwen3-30b-a3b"] = case("qwen3-30b-a3b", Manifest(qwen3_30b_a3b()), report["floors"], variants=True)
    report["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
