"""Plans a 1T-parameter transfer in a process of its own and prints what it took, as JSON. Run by ``test_speed.py``."""

from __future__ import annotations

import json
import time
from pathlib import Path

from weightsync.model import Manifest
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.planning.split import split_rows
from weightsync.protocol.messages import Host
from weightsync_bench.shapes import one_trillion
from weightsync_bench.sharding import expert_parallel, fsdp


def main() -> None:
    """256 FSDP sources, one replica of 16 ranks (experts whole, the rest tensor-parallel), rows of 1 MiB, all slices kept."""
    manifest = Manifest(one_trillion())
    sources = [SourceRank(f"s{i:03}", Host(f"t{i // 8}", f"t{i // 8}"), one) for i, one in enumerate(fsdp(manifest, 256))]
    layouts = [split_rows(manifest, layout, 1 << 20) for layout in expert_parallel(manifest, 16)]
    targets = [TargetRank(f"t{i:02}", Host(f"e{i // 8}", f"e{i // 8}"), one) for i, one in enumerate(layouts)]
    begin, computing = time.perf_counter(), time.process_time()
    plan = plan_transfer(manifest, sources, targets)
    solved = time.perf_counter() - begin
    pieces = [plan.pieces(rank.member) for rank in targets]
    seconds, cpu = time.perf_counter() - begin, time.process_time() - computing
    # not getrusage: its maximum is inherited from the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    report = {
        "tensors": len(manifest),
        "source_rows": sum(len(rank.layout) for rank in sources),
        "target_rows": sum(map(len, layouts)),
        "pieces": sum(map(len, pieces)),
        "nbytes": [int((one.sizes() * 2).sum()) for one in pieces] == [layout.nbytes(manifest) for layout in layouts],
        "solve_seconds": solved,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": int(status["VmHWM"].split()[0]) * 1024,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
