# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
"""Orders in which colocated ranks read their own GPU's memory and each other's: ``python -m benchmarks.gpu_orders [GPUS]``.

One process with peer access, FSDP N -> TP N of Qwen3-30B-A3B on the same N GPUs, all readers at once.
Milliseconds of the slowest reader.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time

import numpy as np
import torch

from weightsync.model import Manifest
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.cuda import device_copy_table
from weightsync.tensors.cuda.copies import TileCopy
from weightsync_bench.shapes import qwen3_30b_a3b
from weightsync_bench.sharding import fsdp, tensor_parallel

_HOST = Host("here", "here")


def _memory(layout, device):
    return [torch.empty(-(-size // 8), dtype=torch.int64, device=device).random_() for size in layout.regions]


def _interleaved(owners):
    together = np.concatenate(owners, axis=1)
    places = np.concatenate([np.argsort(np.argsort(one[1], kind="stable")) / one.shape[1] for one in owners])
    return together[:, np.argsort(places, kind="stable")]


def _far_first(owners):
    ordered = [one[:, np.argsort(one[1], kind="stable")] for one in owners]
    return np.concatenate(ordered, axis=1)


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    manifest = Manifest(qwen3_30b_a3b())
    sources, targets = fsdp(manifest, count), tensor_parallel(manifest, count)
    plan = plan_transfer(
        manifest,
        [SourceRank(f"t{rank}", _HOST, layout) for rank, layout in enumerate(sources)],
        [TargetRank(f"e{rank}", _HOST, layout) for rank, layout in enumerate(targets)],
    )
    devices = [torch.device("cuda", rank) for rank in range(count)]
    held = [_memory(layout, device) for layout, device in zip(sources, devices, strict=True)]
    places = [_memory(layout, device) for layout, device in zip(targets, devices, strict=True)]
    for one in devices:
        for other in devices:
            torch.empty(1, device=one).copy_(torch.empty(1, device=other))
    parts = []  # for each reader: own tiles, others' tiles
    for rank, layout in enumerate(targets):
        pieces = plan.pieces(f"e{rank}")
        cut = tiles_of(manifest, pieces, layout, [one.data_ptr() for one in places[rank]], [(0, len(layout))])
        owners = [
            (groups[0], [one.data_ptr() for one in held[int(member[1:])]], int(member[1:]))
            for member, groups in zip(pieces.sources, cut, strict=True)
        ]
        parts.append(([one[:2] for one in owners if one[2] == rank], [one[:2] for one in owners if one[2] != rank]))
    print("bytes own / others, GB", [[round(sum(t.nbytes for t, _ in side) / 1e9, 2) for side in part] for part in parts])
    usual = device_copy_table._ordered
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def together(order):
        device_copy_table._ordered = order
        made = [TileCopy([[*far, *near]], device) for (near, far), device in zip(parts, devices, strict=True)]
        device_copy_table._ordered = usual
        return [[(copy, None)] for copy in made]

    def apart(programs, order):
        device_copy_table._ordered = order
        made = [
            [(TileCopy([far], device, programs=programs), torch.cuda.Stream(device)), (TileCopy([near], device), None)]
            for (near, far), device in zip(parts, devices, strict=True)
        ]
        device_copy_table._ordered = usual
        return made

    def timed(readers):
        times = []
        for _ in range(7):
            for device in devices:
                torch.cuda.synchronize(device)
            events = []
            for copies, device in zip(readers, devices, strict=True):
                with torch.cuda.device(device):
                    own = torch.cuda.current_stream()
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    for copy, stream in copies:
                        if stream is None:
                            copy.launch()
                        else:
                            stream.wait_stream(own)
                            with torch.cuda.stream(stream):
                                copy.launch()
                    for _, stream in copies:
                        if stream is not None:
                            own.wait_stream(stream)
                    end.record()
                    events.append((begin, end))
            for device in devices:
                torch.cuda.synchronize(device)
            times.append(max(begin.elapsed_time(end) for begin, end in events))
        return f"median {statistics.median(times[2:]):6.2f}  min {min(times):6.2f}"

    swap = [torch.empty(1 << 28, dtype=torch.int64, device=device) for device in devices]
    for way in ("one way", "both ways"):
        readers = devices[:1] if way == "one way" else devices
        times = []
        for _ in range(5):
            events = []
            for rank, device in enumerate(readers):
                with torch.cuda.device(device):
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    stream = torch.cuda.current_stream().cuda_stream
                    begin.record()
                    driver.cuMemcpyDtoDAsync_v2(swap[rank].data_ptr(), held[(rank + 1) % count][0].data_ptr(), 2 << 30, stream)
                    end.record()
                    events.append((begin, end))
            for device in devices:
                torch.cuda.synchronize(device)
            times.append(max(begin.elapsed_time(end) for begin, end in events))
        print(f"driver's copy of 2 GiB, {way}: {(2 << 30) / statistics.median(times) / 1e6:.0f} GB/s a reader", flush=True)

    near_only = [[(TileCopy([near], device), None)] for (near, _), device in zip(parts, devices, strict=True)]
    print("own memory alone         ", timed(near_only), flush=True)
    for programs in (0, 32, 64, 132, 264):
        far_only = [[(TileCopy([far], device, programs=programs), None)] for (_, far), device in zip(parts, devices, strict=True)]
        print(f"others' alone, {programs:3d} programs", timed(far_only), flush=True)
    for name, order in (("random", usual), ("interleaved", _interleaved), ("others' first", _far_first)):
        print(f"together, {name:15s}", timed(together(order)), flush=True)
    for programs in (16, 32, 48, 64, 96, 132, 0):
        print(f"apart, others' with {programs:3d}  ", timed(apart(programs, _far_first)), flush=True)
    print("at", round(time.monotonic()))


if __name__ == "__main__":
    main()
