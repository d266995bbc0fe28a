"""Every built-in transport passes the contract, faults included."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from weightsync.testing.transport_contract import TransportContract, nothing_left
from weightsync.transports.nixl.agent import Agent, nixl_problem

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


def open_a_store() -> None:
    """The library under torch's stores keeps a pipe for the life of the process."""
    store: Any = dist
    store.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


class TestCollective(TransportContract):
    warm_up = "tests.contract.transports.test_transports:open_a_store"
    where = "weightsync.transports.broadcast.gloo:Collective"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}


def make_an_agent() -> None:
    """The libraries under NIXL keep what they make with the first agent."""
    Agent({}).close()


@pytest.mark.skipif(nixl_problem() is not None, reason=nixl_problem() or "")
class TestNixl(TransportContract):
    """Over UCX's shared memory."""

    warm_up = "tests.contract.transports.test_transports:make_an_agent"
    where = "weightsync.transports.nixl.transport:Nixl"
