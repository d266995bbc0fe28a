"""A trainer rank in a process of its own, told what to do line by line: ``python -m tests.gpu.owner_process DEVICE SEED [nccl]``.

Answers every line with one line of JSON. Its regions are random bytes that the seed and the version determine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import WeightSyncError
from weightsync.protocol.messages import Host
from weightsync.transports.broadcast.nccl import Nccl
from weightsync.transports.cuda.ipc import CudaIpc
from weightsync.transports.cuda.region import CudaRegion

KEY = b"a run key of the gpu tests"
LAYOUT = "0123456789abcdef0123456789abcdef"
SIZES = (1 << 20, (3 << 20) + 5, 77)
HERE = Host("this machine", "this memory")


def contents(seed: int, version: int) -> list[npt.NDArray[np.uint8]]:
    """What each region holds in ``version``."""
    random = np.random.default_rng([seed, version])
    return [random.integers(0, 256, size, np.uint8) for size in SIZES]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    device, seed, exports = int(sys.argv[1]), int(sys.argv[2]), "nccl" not in sys.argv
    torch.cuda.set_device(device)
    remembered: list[int] = []
    held = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]
    try:
        region = CudaRegion(SIZES, LAYOUT, lambda: [one.data_ptr() for one in held] if held else remembered, device)
        owner = (CudaIpc() if exports else Nccl(buffer_bytes=2 << 20)).publish(region, KEY, HERE)
    except WeightSyncError as error:
        say(error=type(error).__name__, message=str(error))
        return
    say(address=owner.offer.address)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        try:
            if command == "place":
                with region.placing(int(argument)):
                    for one, data in zip(held, contents(seed, int(argument)), strict=True):
                        one.copy_(torch.from_numpy(data))
            elif command == "move":
                old = held
                held = [torch.zeros(size + 4096, dtype=torch.uint8, device="cuda")[4096:] for size in SIZES]
                del old
            elif command == "free":
                torch.cuda.synchronize()
                remembered[:] = [one.data_ptr() for one in held]
                held.clear()
                torch.cuda.empty_cache()
            elif command == "withdraw":
                region.withdraw()
            elif command == "close":
                owner.close()
                region.close()
            say(done=command, count=region.exported.count if exports else 0)
        except WeightSyncError as error:
            say(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main()
