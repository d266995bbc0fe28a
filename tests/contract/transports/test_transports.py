"""Every built-in transport passes the contract, faults included."""

from __future__ import annotations

from typing import Any, ClassVar

from weightsync.transports.contract_suite import TransportContract, nothing_left

__all__ = ["nothing_left"]


class TestInProcess(TransportContract):
    where = "weightsync.transports.inproc:InProcess"
    crosses_processes = False


class TestSharedMemory(TransportContract):
    where = "weightsync.transports.shared_memory:SharedMemory"


class TestTcp(TransportContract):
    where = "weightsync.transports.tcp:Tcp"
    carries = True


class TestTcpOverIPv6(TransportContract):
    where = "weightsync.transports.tcp:Tcp"
    arguments: ClassVar[dict[str, Any]] = {"bind": "::1"}
    carries = True
