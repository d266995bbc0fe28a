"""A whole round in one call, to the only rank of a replica: it commits nothing but the version's bytes, and nothing late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
import torch
from tests.hellos import said

from weightsync.coordinator.negotiation import negotiate, source_coverage
from weightsync.coordinator.ranks import EngineRank, PublishingRank, TrainerRank
from weightsync.engine.engine_role import EngineRole
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import DeadlineExceeded, LayoutError, LoadError, ProtocolError
from weightsync.model import Manifest, PauseMode, Version, fold
from weightsync.protocol.messages import Commit, Move, Pause, Place, Placed, PlanSlice, Prepare, Quarantine, Resume, Update, Updated
from weightsync.publishing.publication import ReaderAccess
from weightsync.tensors.shards import Shard, shard
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import transport

SECONDS = 20.0


class Watched(ModuleAdapter):
    """Says in which order things were asked of it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.said: list[str] = []
        self.flushes = True

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.said.append(f"pause {mode}")
        super().pause(mode, timeout)

    def finish(self, version: Version) -> None:
        self.said.append("finish")
        super().finish(version)

    def flush(self) -> bool:
        self.said.append("flush")
        return self.flushes

    def resume(self) -> None:
        self.said.append("resume")
        super().resume()


class Half(Watched):
    """Holds two of the four rows."""

    first = 0

    def shards(self) -> list[Shard]:
        weight = dict(self.module.named_parameters())["weight"].detach()
        return [shard("weight", weight[self.first : self.first + 2], (4, 6), (self.first, 0))]


class LowerHalf(Half):
    first = 2


class Stage:
    """A trainer's and an engine's role with nobody in between: what the coordinator would say, the test says."""

    def __init__(self, adapter: Watched, owned: ExitStack) -> None:
        here = this_host()
        self.source = torch.nn.Linear(6, 4, bias=False)
        self.adapter = adapter
        self.trainer = TrainerRole(self.source, ReaderAccess([transport("inproc")], b"k" * 32, here))
        owned.callback(self.trainer.close)
        self.engine = EngineRole(adapter, ["inproc"], here, alone=True)
        owned.callback(self.engine.close)
        role = self.trainer
        trainer = TrainerRank(said("trainer", 0, 1, here, offers=role.offers, key=role.key), role.manifest, role.layout)
        self.sources: dict[str, PublishingRank] = {"trainer/0": trainer}
        self.targets = {
            "r/0": EngineRank(
                said("r", 0, 1, here, transports=("inproc",), delivery="direct"), self.engine.manifest, self.engine.layout
            )
        }

    def plan(self) -> PlanSlice:
        return negotiate("r", self.sources, self.targets).slices["r/0"]

    def place(self, number: int) -> Version:
        self.trainer.arm(number, number)
        placed = self.trainer.handle(Place(number, call=number), SECONDS)
        assert isinstance(placed, Placed)
        digests = {"trainer/0": np.frombuffer(placed.digests, "<u8").astype(np.uint64)}
        manifest: Manifest = self.trainer.manifest
        return Version(
            "run", number, manifest.fingerprint, fold(source_coverage(manifest, self.sources, "the trainer").total(digests))
        )

    def update(self, version: Version) -> Updated:
        answer = self.engine.handle(Update(version, "keep"), SECONDS)
        assert isinstance(answer, Updated)
        return answer


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as owned:
        yield Stage(Watched(torch.nn.Linear(6, 4, bias=False)), owned)


def test_an_update_is_the_whole_round_in_its_order(stage: Stage) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    version = stage.place(1)
    answer = stage.update(version)
    assert answer.committed
    assert answer.moved.nbytes == 4 * 6 * 4
    assert stage.adapter.said == ["pause keep", "finish", "flush", "resume"]
    assert stage.engine.session.served_version == version
    assert torch.equal(stage.adapter.module.weight, stage.source.weight)  # type: ignore[arg-type]


def test_what_an_update_compares_digests_by_is_made_before_it(stage: Stage) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    assert "cover" in vars(stage.engine._filler), "numpy's part for it takes up to 200 ms to import"


def test_bytes_that_are_not_the_versions_are_never_committed(stage: Stage) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    version = stage.place(1)
    answer = stage.update(msgspec.structs.replace(version, digest="0" * 16))
    assert not answer.committed
    assert stage.adapter.said == ["pause keep"]
    assert stage.engine.session.serving is None
    with pytest.raises(ProtocolError, match="needs an engine rank that is committed"):
        stage.engine.handle(Resume(), SECONDS)
    stage.engine.handle(Quarantine("other bytes"), SECONDS)
    assert stage.update(version).committed, "a later round heals it"
    assert stage.engine.session.served_version == version


def test_an_engine_that_keeps_old_caches_is_not_resumed(stage: Stage) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    stage.adapter.flushes = False
    with pytest.raises(LoadError, match="caches"):
        stage.update(stage.place(1))
    assert stage.adapter.said == ["pause keep", "finish", "flush"]
    assert stage.engine.session.served_version is None
    stage.adapter.flushes = True
    with pytest.raises(ProtocolError, match="quarantined"):  # what the engine rebuilt is not rebuilt twice
        stage.engine.handle(Commit(stage.place(1)), SECONDS)


def test_an_update_that_comes_too_late_does_not_commit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.engine.handle(Prepare(stage.plan()), SECONDS)
    version, move, passed = stage.place(1), stage.engine._move, 0.2

    def slow(number: int, deadline: object) -> object:
        moved = move(number, deadline)  # type: ignore[arg-type]
        deadline.at -= SECONDS + passed  # type: ignore[attr-defined]  # it took all of its time
        return moved

    monkeypatch.setattr(stage.engine, "_move", slow)
    with pytest.raises(DeadlineExceeded, match="committing"):
        stage.update(version)
    assert stage.adapter.said == ["pause keep"]
    assert stage.engine.session.served_version is None


def test_a_rank_that_does_not_hold_everything_is_not_even_paused() -> None:
    with ExitStack() as owned:
        stage = Stage(Watched(torch.nn.Linear(6, 4, bias=False)), owned)
        halves = [EngineRole(half(torch.nn.Linear(6, 4, bias=False)), ["inproc"], this_host()) for half in (Half, LowerHalf)]
        for role in halves:
            owned.callback(role.close)
        ranks = {
            f"r/{index}": EngineRank(
                said("r", index, 2, this_host(), transports=("inproc",), delivery="direct"), role.manifest, role.layout
            )
            for index, role in enumerate(halves)
        }
        other = halves[0]
        other.handle(Prepare(negotiate("r", stage.sources, ranks).slices["r/0"]), SECONDS)
        with pytest.raises(LayoutError, match="no rank holds"):
            other.handle(Update(stage.place(1), "abort"), SECONDS)
        with pytest.raises(ProtocolError, match="needs a prepared plan"):
            stage.engine.handle(Update(Version("run", 1, "", ""), "abort"), SECONDS)
        adapter = other.adapter
        assert isinstance(adapter, Half)
        assert adapter.said == []
        other.handle(Pause("abort"), SECONDS)
        other.handle(Move(1), SECONDS)  # as one of two it may
