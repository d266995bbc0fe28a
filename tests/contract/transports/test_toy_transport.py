"""A transport is added by one file and an entry point, whatever memories it writes: nothing else knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.contract.transports.toy_transport import Toy

import weightsync
from weightsync.cli import doctor
from weightsync.config import ClientSettings
from weightsync.protocol.messages import Offer
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import choose, known, transport, transports_for
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
    assert "toy" not in [one.name for one in transports_for(None)]
    assert isinstance(transport("toy"), Toy)
    source, target = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
    with weightsync.Trainer(source, transports=["toy", "tcp"]) as trainer:
        where, token = trainer.environment["WEIGHTSYNC_COORDINATOR"], trainer.environment["WEIGHTSYNC_TOKEN"]
        adapter = weightsync.ModuleAdapter(target)
        with weightsync.Engine(adapter, replica="r", coordinator=where, token=token, transports=["tcp", "toy"]):
            result = trainer.publish(1, timeout=30)
    assert [one.transports for one in result.replicas] == [("toy",)]
    assert torch.equal(source.weight, target.weight)


@pytest.mark.usefixtures("installed")
def test_one_that_says_its_place_is_chosen_there_without_being_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "before", "tcp")
    names = [one.name for one in transports_for(None)]
    assert names.index("shared_memory") + 1 == names.index("toy") == names.index("tcp") - 1
    here, (*_, toy, tcp) = this_host(), transports_for(["toy", "tcp"])
    offers = [Offer("tcp", "127.0.0.1:80/" + "0" * 32, here), Offer("toy", "", here)]
    monkeypatch.setattr(Toy, "reaches", lambda *_: True)
    assert [each.name for each, _ in choose(offers, [tcp, toy], here)] == ["toy", "tcp"]
    monkeypatch.setattr(Toy, "before", "collective")
    assert [each.name for each, _ in choose(offers, [tcp, toy], here)] == ["tcp", "toy"]


@pytest.mark.usefixtures("installed")
def test_doctor_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", {})
    findings = {finding.name: finding for finding in doctor.examine(ClientSettings())}
    assert (findings["toy"].status, findings["toy"].value) == ("ok", "available")
    monkeypatch.setattr(Toy, "unavailable", lambda _: "no such device")
    findings = {finding.name: finding for finding in doctor.examine(ClientSettings())}
    assert (findings["toy"].status, findings["toy"].value) == ("missing", "no such device")


@pytest.mark.usefixtures("installed")
def test_one_that_is_broken_stops_only_who_names_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def breaks(_: Toy) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(Toy, "__init__", breaks)
    assert "tcp" in [one.name for one in transports_for(None)]
    assert "transport 'toy' is left out: no such device" in caplog.text
    with pytest.raises(RuntimeError):
        transports_for(["toy"])
