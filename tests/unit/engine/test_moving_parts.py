"""An engine that exchanges parts of its parameters while it serves: a round follows them, and nothing is believed of what moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from tests.unit.engine.test_aborts import at
from tests.unit.engine.test_update import SECONDS, Stage, Watched
from torch import nn

from weightsync import failpoints
from weightsync.errors import PlanMismatch, StaleSource
from weightsync.model import Layout
from weightsync.protocol.messages import Audit, Done, KeepLayout, LayoutKept, Prepare, Prepared
from weightsync.tensors.shards import Shard, shard


class Exchanging(Watched):
    """Holds the rows of its matrix in two parts, which change places."""

    moves = True
    changed = stirred = by_address = False

    def hold_parameters(self, seconds: float) -> None:
        self.said.append("hold")

    def shards(self) -> list[Shard]:
        weight = dict(self.module.named_parameters())["weight"].detach()
        first, second = (2, 0) if self.changed else (0, 2)
        parts = [
            shard("weight", weight[first : first + 2], (4, 6), (0, 0)),
            shard("weight", weight[second : second + 2], (4, 6), (2, 0)),
        ]
        return sorted(parts, key=lambda part: part.tensor.data_ptr()) if self.by_address else parts

    @property
    def outdated(self) -> bool:
        return self.stirred

    def exchange(self) -> None:
        weight = dict(self.module.named_parameters())["weight"]
        with torch.no_grad():
            weight.copy_(weight.roll(2, 0))
        self.changed = not self.changed


@pytest.fixture(params=["by row", "by address"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """With parts in the order of their addresses, these are the same whatever the parts hold."""
    with ExitStack() as owned:
        owned.callback(failpoints.install, lambda name: None)
        adapter = Exchanging(nn.Linear(6, 4, bias=False))
        adapter.by_address = request.param == "by address"
        yield Stage(adapter, owned)


def prepare(stage: Stage) -> None:
    """As a coordinator does: plan for the layout that the rank keeps."""
    layout = stage.targets["r/0"].layout
    assert layout is not None
    answer = stage.engine.handle(KeepLayout(layout.digest), SECONDS)
    assert isinstance(answer, LayoutKept)
    if answer.layout is not None:
        layout = Layout.from_columns(stage.engine.manifest, answer.layout)
        stage.targets = {member: replace(rank, layout=layout) for member, rank in stage.targets.items()}
    assert isinstance(stage.engine.handle(Prepare(stage.plan()), SECONDS), Prepared)


def in_order(stage: Stage) -> torch.Tensor:
    weight = dict(stage.adapter.module.named_parameters())["weight"].detach()
    assert isinstance(stage.adapter, Exchanging)
    return weight.roll(2, 0) if stage.adapter.changed else weight


@contextmanager
def adapter_of(stage: Stage) -> Iterator[Exchanging]:
    assert isinstance(stage.adapter, Exchanging)
    yield stage.adapter


def test_rows_go_where_they_are_in_each_round(stage: Stage) -> None:
    with adapter_of(stage) as adapter:
        for number in range(1, 6):
            torch.nn.init.normal_(stage.source.weight)
            prepare(stage)
            assert adapter.said[-1] == "hold"
            version = stage.place(number)
            assert stage.update(version).committed
            assert torch.equal(in_order(stage), stage.source.weight)
            assert stage.engine.handle(Audit(version), SECONDS) == Done()
            if number != 3:
                adapter.exchange()
                assert torch.equal(in_order(stage), stage.source.weight)
                with pytest.raises(StaleSource, match="elsewhere"):
                    stage.engine.handle(Audit(version), SECONDS)


def test_rows_that_move_although_they_are_held_are_not_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with adapter_of(stage) as adapter:
        prepare(stage)
        version = stage.place(1)
        before = in_order(stage).clone()
        monkeypatch.setattr(failpoints, "_gate", at("engine.pause", adapter.exchange))
        with pytest.raises(PlanMismatch, match="which the next round follows"):
            stage.update(version)
        assert torch.equal(in_order(stage), before)
        assert stage.engine.session.served_version is None


def test_rows_that_move_while_they_are_read_are_no_difference(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with adapter_of(stage) as adapter:
        prepare(stage)
        version = stage.place(1)
        assert stage.update(version).committed

        def moving() -> None:
            adapter.stirred = True
            dict(adapter.module.named_parameters())["weight"].data[0] = 0.0

        monkeypatch.setattr(failpoints, "_gate", at("engine.audit", moving))
        with pytest.raises(StaleSource, match="moved while they were read"):
            stage.engine.handle(Audit(version), SECONDS)
        assert stage.engine.session.served_version == version
