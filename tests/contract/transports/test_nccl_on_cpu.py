"""Scheme ``nccl`` passes the transports' contract, faults included, over sockets and host memory; between GPUs: ``tests/gpu``."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from weightsync.testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")


class TestNccl(TransportContract):
    warm_up = "tests.contract.transports.test_transports:open_a_store"
    where = "tests.contract.transports.nccl_on_cpu:NcclOnCpu"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    buffers: ClassVar[dict[str, str]] = {"cuda": ""}  # host memory stands in for the GPU's
    groups = 50  # each is a launch, and a broadcast over a socket
