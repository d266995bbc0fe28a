"""An engine rank in a process of its own that reads for ever: ``python -m tests.gpu.reader_process DEVICE ADDRESS VERSION``.

With ``nccl`` behind it, it reads once, begins to read, and stands still.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch
from tests.gpu.owner_process import HERE, KEY, LAYOUT, SIZES

from weightsync.deadline import Deadline
from weightsync.protocol.messages import Offer
from weightsync.tensors.copy_table import CopyTable
from weightsync.transports.broadcast.nccl import Nccl
from weightsync.transports.cuda.ipc import CudaIpc


def whole(target: int) -> CopyTable:
    """Tiles that copy every region to ``target``, one after the other, each beginning at a multiple of 16."""
    sizes = np.array(SIZES, np.int64)
    places = np.cumsum([0, *(-(-sizes[:-1] // 16) * 16)])
    zeros = np.zeros(len(sizes), np.int64)
    return CopyTable(np.arange(len(sizes), dtype=np.int32), zeros, zeros, target + places, zeros, zeros + 1, sizes)


def main() -> None:
    device, address, version = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.cuda.set_device(device)
    scheme = Nccl() if "nccl" in sys.argv else CudaIpc(device)
    source = scheme.open(Offer(scheme.name, address, HERE), KEY, Deadline(20))
    target = torch.zeros(sum(SIZES) + 64, dtype=torch.uint8, device="cuda")
    source.prepare([whole(target.data_ptr())], LAYOUT, Deadline(20))
    while True:
        source.begin(version, Deadline(20))
        source.read(0, Deadline(20))
        source.end(Deadline(20))
        print("read", flush=True)
        if scheme.name == "nccl":
            source.begin(version, Deadline(20))
            print("begun", flush=True)
            threading.Event().wait(60)


if __name__ == "__main__":
    main()
