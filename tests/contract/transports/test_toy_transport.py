"""A transport is added by one file and an entry point, whatever memories it writes: nothing else knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.contract.transports.toy_transport import Toy

import weightsync
from weightsync.transports.registry import known, transport
from weightsync_testing.transport_contract import TransportContract, nothing_left

__all__ = ["nothing_left"]


class TestHostMemory(TransportContract):
    where = "tests.contract.transports.toy_transport:Toy"
    target = "host"


class TestDeviceMemory(TransportContract):
    where = "tests.contract.transports.toy_transport:Toy"
    target = "cuda"
    buffers: ClassVar[dict[str, str]] = {"cuda": "tests.contract.transports.toy_transport:DeviceBuffer"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What installing a package with the transport leaves behind."""
    facts = tmp_path / "toy_transport-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-transport\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[weightsync.transports]\ntoy = tests.contract.transports.toy_transport:Toy\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_makes_it_known_by_name(no_leaks: None) -> None:
    assert "toy" in known()
    assert isinstance(transport("toy"), Toy)
    source, target = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
    with weightsync.Trainer(source, transports=["toy", "tcp"]) as trainer:
        where, token = trainer.environment["WEIGHTSYNC_COORDINATOR"], trainer.environment["WEIGHTSYNC_TOKEN"]
        adapter = weightsync.ModuleAdapter(target)
        with weightsync.Engine(adapter, replica="r", coordinator=where, token=token, transports=["tcp", "toy"]):
            result = trainer.publish(1, timeout=30)
    assert [one.transports for one in result.replicas] == [("toy",)]
    assert torch.equal(source.weight, target.weight)
