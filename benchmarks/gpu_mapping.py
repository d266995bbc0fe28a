"""What mapping another process's device memory costs, handle by handle: ``python -m benchmarks.gpu_mapping [HANDLES]``.

A process makes that many allocations of 2 MiB and exports them; this one opens a share of them with 1, 2, 4 and 8 threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from weightsync.transports.cuda.driver import allocation_of, close_handle, export_handle, open_handle, still_allocated

_THREADS = (1, 2, 4, 8)


def own(count: int) -> None:
    """The owner: allocate, export, print, wait."""
    held = [torch.empty(2 << 20, dtype=torch.uint8, device="cuda") for _ in range(count)]
    started = time.perf_counter()
    allocations = [allocation_of(one.data_ptr(), 0) for one in held]
    looked = time.perf_counter()
    handles = [export_handle(one) for one in allocations]
    exported = time.perf_counter()
    still_allocated(allocations, 0)
    again = time.perf_counter()
    microseconds = [(b - a) * 1e6 / count for a, b in ((started, looked), (looked, exported), (exported, again))]
    print(json.dumps({"handles": [one.hex() for one in handles], "look_export_again_us": microseconds}), flush=True)
    sys.stdin.readline()


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_mapping", "own", str(count)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    if owner.stdout is None or owner.stdin is None:
        raise RuntimeError("no pipes")
    try:
        facts = json.loads(owner.stdout.readline())
        print("owner, us a handle: look, export, look again", facts["look_export_again_us"])
        handles = [bytes.fromhex(one) for one in facts["handles"]]
        device = torch.cuda.device_count() - 1
        torch.empty(1, device=f"cuda:{device}")
        share = count // len(_THREADS)
        for place, threads in enumerate(_THREADS):
            mine = handles[place * share : (place + 1) * share]
            started = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                opened = list(pool.map(lambda handle: open_handle(handle, device), mine))
            ended = time.perf_counter()
            print(f"open with {threads} threads: {(ended - started) * 1e6 / share:.1f} us a handle", flush=True)
        started = time.perf_counter()
        for address in opened:
            close_handle(address, device)
        print(f"close: {(time.perf_counter() - started) * 1e6 / share:.1f} us a handle", flush=True)
    finally:
        owner.stdin.close()
        owner.kill()
        owner.wait(10)
        owner.stdout.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        own(int(sys.argv[2]))
    else:
        main()
