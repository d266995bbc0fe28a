"""The transports between GPUs under the contract, faults included. Publishers are on the first GPU, readers on the last.

NCCL's classes failed the census on H200s (torch 2.11, 2026-11-22): a communicator of two ranks that was aborted left one to three
descriptors in either process, and after a passed deadline the region was still mapped when the publisher was closed. Since then
the rendezvous and errors hold no connection (``tests/integration/test_groups.py``), and a thread that hangs in NCCL holds no region
(``tests/contract/transports/test_nccl_on_cpu.py``). These classes have not run on H200s since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.testing.transport_contract import TransportContract, nothing_left
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group
from weightsync.transports.nixl.agent import Agent, nixl_problem

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
    """NCCL, too, keeps threads and descriptors of its first communicator for the life of the process."""
    start_cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    deadline = Deadline(60.0)
    rendezvous = StoreRendezvous("127.0.0.1", 1, deadline)
    group = init_custom_process_group("nccl", 0, 1, "warm-up", deadline, rendezvous=rendezvous, device=device, priority=True)
    group.broadcast([torch.zeros(1, device=device)], deadline)
    group.close()
    rendezvous.close()


@pytest.fixture(autouse=True)
def on_the_last_device() -> Iterator[None]:
    before = torch.cuda.current_device()
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    yield
    torch.cuda.set_device(before)


class TestCudaIpc(TransportContract):
    where = "weightsync.transports.cuda.ipc:CudaIpc"
    warm_up = START_CUDA


@two_gpus
class TestNccl(TransportContract):
    where = "weightsync.transports.broadcast.nccl:Nccl"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    warm_up = START_NCCL
    source = "cuda"
    groups = 50  # each is a launch


@two_gpus
class TestNcclFromHostMemory(TransportContract):
    where = "weightsync.transports.broadcast.nccl:Nccl"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    warm_up = START_NCCL
    source = "host"
    groups = 50


@needs_nixl
class TestNixlBetweenGpus(TransportContract):
    where = "weightsync.transports.nixl.transport:Nixl"
    warm_up = START_NIXL
    source = "cuda"
    target = "cuda"


@needs_nixl
class TestNixlFromHostToGpu(TransportContract):
    where = "weightsync.transports.nixl.transport:Nixl"
    warm_up = START_NIXL
    source = "host"
    target = "cuda"


@needs_nixl
class TestNixlFromGpuToHost(TransportContract):
    where = "weightsync.transports.nixl.transport:Nixl"
    warm_up = START_NIXL
    source = "cuda"
    target = "host"
