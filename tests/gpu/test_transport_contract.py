"""The transports between GPUs under the contract, faults included. Publishers are on the first GPU, readers on the last.

The census of NCCL's classes needs NCCL's own supervision (RAS) switched off: it connects all processes that share communicators, by
sockets that stay until the processes end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group
from weightsync_nixl.agent import Agent, nixl_problem
from weightsync_testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes each GPU once: needs two")

START_CUDA = "tests.gpu.test_transport_contract:start_cuda"
START_NCCL = "tests.gpu.test_transport_contract:start_nccl"
START_NIXL = "tests.gpu.test_transport_contract:start_nixl"
needs_nixl = pytest.mark.skipif(nixl_problem() is not None, reason=nixl_problem() or "")


def start_cuda() -> None:
    """The driver and its libraries keep threads and descriptors for the life of the process."""
    torch.zeros(1, device="cuda").add_(1).cpu()


def start_nixl() -> None:
    """UCX opens the driver's handles with its first agent on a machine with a GPU."""
    start_cuda()
    Agent({}).close()


def start_nccl() -> None:
    """NCCL keeps what the first communicator of two ranks opens, for the life of the process."""
    os.environ["NCCL_RAS_ENABLE"] = "0"
    start_cuda()
    deadline = Deadline(60.0)
    listening = StoreRendezvous("127.0.0.1", 2, deadline)

    def take_part(rank: int) -> None:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = init_custom_process_group(
            "nccl", rank, 2, "warm-up", deadline, address="127.0.0.1", port=listening.port, rendezvous=None if rank else listening,
            device=device, priority=True,
        )  # fmt: skip
        group.broadcast([torch.zeros(1, device=device)], deadline)
        torch.cuda.synchronize(device)
        group.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_part, range(2)))
    listening.close()


@pytest.fixture(autouse=True)
def on_the_last_device() -> Iterator[None]:
    before = torch.cuda.current_device()
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    yield
    torch.cuda.set_device(before)


class TestCudaIpc(TransportContract):
    where = "weightsync.transports.cuda.ipc:CudaIpc"
    warm_up = START_CUDA


class ReadsOnLastDevice:
    def on_reading_thread(self) -> AbstractContextManager[object]:
        return torch.cuda.device(torch.cuda.device_count() - 1)  # NCCL sends to the current device


@two_gpus
class TestNccl(ReadsOnLastDevice, TransportContract):
    where = "weightsync.transports.broadcast.nccl:Nccl"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    warm_up = START_NCCL
    source = "cuda"
    groups = 50  # each is a launch


@two_gpus
class TestNcclFromHostMemory(ReadsOnLastDevice, TransportContract):
    where = "weightsync.transports.broadcast.nccl:Nccl"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    warm_up = START_NCCL
    source = "host"
    groups = 50


@needs_nixl
class TestNixlBetweenGpus(TransportContract):
    where = "weightsync_nixl.transport:Nixl"
    warm_up = START_NIXL
    source = "cuda"
    target = "cuda"


@needs_nixl
class TestNixlFromHostToGpu(TransportContract):
    where = "weightsync_nixl.transport:Nixl"
    warm_up = START_NIXL
    source = "host"
    target = "cuda"


@needs_nixl
class TestNixlFromGpuToHost(TransportContract):
    where = "weightsync_nixl.transport:Nixl"
    warm_up = START_NIXL
    source = "cuda"
    target = "host"
