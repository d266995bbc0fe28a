"""The transports between GPUs pass the contract, faults included. Publishers are on the first GPU, readers on the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from weightsync.testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes each GPU once: needs two")

START_CUDA = "tests.gpu.test_transport_contract:start_cuda"


def start_cuda() -> None:
    """The driver and its libraries keep threads and descriptors for the life of the process."""
    torch.zeros(1, device="cuda").add_(1).cpu()


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
    warm_up = START_CUDA
    source = "cuda"
    groups = 50  # each is a launch


@two_gpus
class TestNcclFromHostMemory(TransportContract):
    where = "weightsync.transports.broadcast.nccl:Nccl"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    warm_up = START_CUDA
    source = "host"
    groups = 50
