"""Adapters that are received in memory of the engine, which it keeps: nothing copies them there a second time."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.integration.rounds.test_adapters import Fleet, Made, Part, Rows, gate, lora, made

from weightsync.engine.lora_memory import LoraMemory, stacked_layout
from weightsync.errors import RoundFailed
from weightsync.model import Manifest
from weightsync.model.lora import AdapterSpec

__all__ = ["gate", "made"]


class Keeping(Part):
    """A rank that stages without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.full, self.fails, self.most = False, False, 0
        self.adapter = Manifest(())

    def check_lora(self, spec: AdapterSpec, manifest: Manifest) -> None:
        self.adapter = manifest

    def lora_memory(self) -> LoraMemory | None:
        if self.full:
            raise MemoryError("injected")
        layout = stacked_layout(self.adapter, [[spec.name] for spec in reversed(list(self.adapter))], 256)
        pieces = [torch.zeros(size, dtype=torch.uint8) for size in layout.regions]
        self.given += [weakref.ref(pieces[0])]
        self.most = max(self.most, self.alive - len(self.staged))
        return LoraMemory(self.adapter, layout, pieces)

    def stage_lora(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert isinstance(tensors, LoraMemory)
        if self.fails:
            raise RuntimeError("injected")
        self.staged[label] = tensors
        return tensors

    @property
    def alive(self) -> int:
        """Versions whose memory exists."""
        gc.collect()
        return sum(piece() is not None for piece in self.given)


def holds(part: Part, label: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    staged = part.staged[label]
    return all(torch.equal(staged[f"base_model.model.{name}"], tensor) for name, tensor in tensors.items())


def keeping(made: Made) -> tuple[Fleet, list[Keeping]]:
    fleet, parts = made(engines=0), [Keeping(), Keeping()]
    for rank, part in enumerate(parts):
        fleet.joined.engine(part, "r0", rank=rank, world_size=2)
    fleet.trainer.wait_for_replicas(1)
    fleet.trainer.publish(1)
    return fleet, parts


def test_each_version_stays_in_the_memory_in_which_it_was_received(made: Made) -> None:
    fleet, parts = keeping(made)
    published = {}
    for number in range(4):
        published[number] = {name: tensor.mul_(1.5).clone() for name, tensor in fleet.tensors.items()}
        result = fleet.adapters.publish("alice/math", number)
        assert [(replica.error, replica.verified) for replica in result.replicas] == [(None, "installed")]
        assert all(holds(part, f"alice/math@{before}", published[before]) for part in parts for before in range(number + 1))
    fleet.adapters.retire("alice/math", keep=1)
    with fleet.elsewhere(fleet.trainer.version, lora(9)) as others:
        others.publish("bob/code", 1)
    for part in parts:
        assert holds(part, "bob/code@1", lora(9)) and holds(part, "alice/math@3", published[3])
        assert part.alive == 2, "memory of what was retired is free"


def test_parts_of_several_ranks_fill_it(made: Made) -> None:
    fleet, parts = keeping(made)
    whole = lora(5)
    with (
        fleet.elsewhere(fleet.trainer.version, Rows(whole, 0), source="x", rank=0, world_size=2) as first,
        fleet.elsewhere(fleet.trainer.version, Rows(whole, 1), source="x", rank=1, world_size=2) as second,
    ):
        for number in range(3):
            for tensor in whole.values():
                tensor.add_(0.5)
            with ThreadPoolExecutor(2) as pool:
                pending = [pool.submit(each.publish, "alice/math", number) for each in (first, second)]
            assert all(done.result().ok for done in pending)
            assert all(holds(part, f"alice/math@{number}", whole) for part in parts)


def refused(fleet: Fleet) -> str:
    """Why a version was not taken."""
    try:
        return str(fleet.adapters.publish("alice/math").replicas[0].error)
    except RoundFailed as error:
        return str(error)


@pytest.mark.parametrize("fault", ["fails", "full"])
def test_what_was_not_staged_takes_no_memory(made: Made, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "weightsync")  # tracebacks that pytest keeps refer to memory
    fleet, parts = keeping(made)
    assert fleet.adapters.publish("alice/math", 1).ok
    before = {name: tensor.clone() for name, tensor in fleet.tensors.items()}
    for tensor in fleet.tensors.values():
        tensor.neg_()
    setattr(parts[0], fault, True)
    for _ in range(3):
        assert "injected" in refused(fleet)
    setattr(parts[0], fault, False)
    number = fleet.adapters.publish("alice/math").version.number
    assert all(holds(part, f"alice/math@{number}", fleet.tensors) and holds(part, "alice/math@1", before) for part in parts)
    which = parts[fault == "full"]  # the other one's error may not be answered yet, and refers to memory
    assert which.most == 1, "one is about to be staged, beside those that are held"
