"""Every built-in transport passes the contract, faults included."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from weightsync_nixl.agent import nixl_problem
from weightsync_testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]


class TestInProcess(TransportContract):
    where = "weightsync.transports.host.inproc:InProcess"


class TestSharedMemory(TransportContract):
    where = "weightsync.transports.host.shared_memory:SharedMemory"


class TestTcp(TransportContract):
    where = "weightsync.transports.tcp.transport:Tcp"


class TestTcpEncryptedOverIPv6(TransportContract):
    where = "weightsync.transports.tcp.transport:Tcp"
    arguments: ClassVar[dict[str, Any]] = {"bind": "::1", "encrypt": True}


class TestCollective(TransportContract):
    warm_up = "tests.contract.transports.warm_up:open_a_store"
    where = "weightsync.transports.broadcast.collective:Collective"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}


@pytest.mark.skipif(nixl_problem() is not None, reason=nixl_problem() or "")
class TestNixl(TransportContract):
    """Over UCX's shared memory."""

    warm_up = "tests.contract.transports.warm_up:make_an_agent"
    where = "weightsync_nixl.transport:Nixl"
