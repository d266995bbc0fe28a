"""An engine rank lets others read exactly the version that it serves, from a placing until it leaves service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tests.hellos import said
from tests.unit.engine.test_aborts import Held
from tests.unit.engine.test_update import SECONDS, Stage, Watched

from weightsync import failpoints
from weightsync.coordinator.negotiation import source_coverage
from weightsync.coordinator.ranks import PublishingRank
from weightsync.deadline import Deadline
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.served_weights import ServedWeights
from weightsync.engine.session import EngineSession
from weightsync.errors import Aborted, ConfigurationError, PeerLost, PlanMismatch, ProtocolError, StaleSource
from weightsync.model import Version, fold
from weightsync.protocol.messages import CheckSources, LetGo, Pause, Place, Placed, Prepare, Quarantine
from weightsync.transports.base import LOOPBACK, Reader
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import transport


class Serving(Stage):
    """An engine that serves version 1, and its weights to others; and a reader in the middle of it."""

    def __init__(self, adapter: Watched, owned: ExitStack, scheme: str = "inproc") -> None:
        super().__init__(adapter, owned)
        self._owned, self.scheme = owned, transport(scheme)
        self.served: ServedWeights = self.engine.serve_weights([self.scheme], b"s" * 32, LOOPBACK)
        self.engine.handle(Prepare(self.plan()), SECONDS)
        self.version = self.place(1)
        assert self.update(self.version).committed

    def reader(self) -> Reader:
        reader = self.scheme.open(self.served.offers[0], self.served.key, Deadline(SECONDS))
        self._owned.callback(reader.close)
        reader.prepare([], self.served.layout.digest, Deadline(SECONDS))
        return reader

    def asked(self, number: int = 1, epoch: int = 1) -> Placed:
        answer = self.engine.handle(Place(number, epoch), SECONDS)
        assert isinstance(answer, Placed)
        return answer


@pytest.fixture(params=["inproc", "shared_memory", "tcp"])
def stage(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with ExitStack() as owned:
        yield Serving(Held(torch.nn.Linear(6, 4, bias=False)), owned, request.param)


def test_what_can_be_read_is_the_version_that_it_serves(stage: Serving) -> None:
    reader = stage.reader()
    with pytest.raises(StaleSource):
        reader.begin(1, Deadline(SECONDS))
        reader.end(Deadline(SECONDS))
    placed = stage.asked()
    source = PublishingRank(
        said("r", 0, 1, this_host(), offers=stage.served.offers, key=stage.served.key), stage.engine.manifest, stage.served.layout
    )
    digests = np.frombuffer(placed.digests, "<u8").astype(np.uint64)
    total = source_coverage(stage.engine.manifest, {"r/0": source}, "the replica").total({"r/0": digests})
    assert fold(total) == stage.version.digest
    reader.begin(1, Deadline(SECONDS))
    reader.end(Deadline(SECONDS))
    assert stage.asked() is placed, "readers that are at it are not disturbed"


@pytest.mark.parametrize(("number", "epoch"), [(2, 1), (0, 1), (1, 2)])
def test_another_version_is_not_placed(stage: Serving, number: int, epoch: int) -> None:
    with pytest.raises(StaleSource, match="does not serve version"):
        stage.asked(number, epoch)


LEAVES: dict[str, Callable[[Serving], object]] = {
    "paused": lambda stage: stage.engine.handle(Pause("keep"), SECONDS),
    "updated": lambda stage: stage.update(stage.place(2)),
    "quarantined": lambda stage: stage.engine.handle(Quarantine("a test says so"), SECONDS),
    "driven by another front": lambda stage: stage.engine.session._taken(),
}


@pytest.mark.parametrize("leaves", LEAVES)
def test_a_reader_notices_that_the_engine_left_service(stage: Serving, leaves: str) -> None:
    stage.asked()
    reader = stage.reader()
    reader.require(1, Deadline(SECONDS))
    reader.begin(1, Deadline(SECONDS))
    if stage.scheme.name == "tcp":  # it has sent everything by now: the next reader is refused
        reader.end(Deadline(SECONDS))
    LEAVES[leaves](stage)
    with pytest.raises(StaleSource):
        if stage.scheme.name == "tcp":
            reader.begin(1, Deadline(SECONDS))
        reader.end(Deadline(SECONDS))
    if stage.engine.session.served_version is None:
        with pytest.raises(StaleSource, match="does not serve version"):
            stage.asked()
    else:
        stage.asked(2)


def test_a_closed_engine_is_gone(stage: Serving) -> None:
    stage.asked()
    reader = stage.reader()
    stage.engine.close()
    with pytest.raises((PeerLost, StaleSource)):
        reader.begin(1, Deadline(SECONDS))
        reader.end(Deadline(SECONDS))


def test_an_engine_that_is_closed_while_another_front_drives_it_is_not_read(stage: Serving) -> None:
    stage.asked()
    reader = stage.reader()
    other = EngineSession(stage.adapter, "another front")
    with other.turn(other.receive("an update from outside", 1), Deadline(SECONDS)):
        stage.engine.close(0.05)
        assert stage.engine.session.served_version is None
        with pytest.raises(StaleSource):
            reader.begin(1, Deadline(SECONDS))
            reader.end(Deadline(SECONDS))


def test_a_rank_that_does_not_serve_its_weights_places_nothing() -> None:
    with ExitStack() as owned:
        stage = Stage(Watched(torch.nn.Linear(6, 4, bias=False)), owned)
        with pytest.raises(ProtocolError, match="does not serve its weights"):
            stage.engine.handle(Place(1), SECONDS)


def test_an_abort_ends_a_placing_and_leaves_nothing_to_read(stage: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_gate", lambda name: stage.engine.session.abort() if name == "engine.placing" else None)
    with pytest.raises(Aborted):
        stage.asked()
    monkeypatch.setattr(failpoints, "_gate", None)
    with pytest.raises(StaleSource):
        reader = stage.reader()
        reader.begin(1, Deadline(SECONDS))
        reader.end(Deadline(SECONDS))
    stage.asked()


def test_a_second_replica_reads_what_the_first_serves(stage: Serving) -> None:
    stage.asked()
    with ExitStack() as owned:
        other = Stage(Watched(torch.nn.Linear(6, 4, bias=False)), owned)
        other.engine = EngineRole(other.adapter, [stage.scheme.name], this_host())
        owned.callback(other.engine.close)
        served = stage.served
        other.sources = {
            "r/0": PublishingRank(
                said("r", 0, 1, this_host(), offers=served.offers, key=served.key), stage.engine.manifest, served.layout
            )
        }
        other.engine.handle(Prepare(other.plan()), SECONDS)
        other.engine.handle(CheckSources(1), SECONDS)
        assert other.update(stage.version).committed
        assert torch.equal(other.adapter.module.weight, stage.adapter.module.weight)  # type: ignore[arg-type]
        stage.engine.handle(Pause("keep"), SECONDS)
        with pytest.raises(StaleSource, match="source r/0"):
            other.update(Version("run", 1, stage.version.manifest, stage.version.digest))
        assert other.engine.session.served_version is None


def test_a_pause_that_fails_leaves_the_rank_a_source_when_it_is_asked_again(stage: Serving) -> None:
    stage.asked()
    assert isinstance(stage.adapter, Held)
    stage.adapter.moved = True
    with pytest.raises(PlanMismatch, match="other parameters"):
        stage.engine.handle(Pause("keep"), SECONDS)
    assert stage.engine.session.served_version == stage.version
    stage.asked()


def test_an_engine_that_was_closed_in_the_turn_of_another_front_frees_its_region_when_that_turn_ends(stage: Serving) -> None:
    stage.asked()
    other = EngineSession(stage.adapter, "another front")
    with other.turn(other.receive("an update from outside", 1), Deadline(SECONDS)):
        stage.engine.close(0.05)
        stage.reader().close()
    with pytest.raises(PeerLost):
        stage.reader()


def test_an_engine_that_may_be_asleep_while_it_serves_is_no_source() -> None:
    class Sleeping(Watched):
        def wake_weights(self) -> None:
            return

    class Awake(Sleeping):
        sleeps = False

    with ExitStack() as owned:
        with pytest.raises(ConfigurationError, match=r"may be asleep while it serves.*sleeps = False"):
            Serving(Sleeping(torch.nn.Linear(6, 4, bias=False)), owned)
        Serving(Awake(torch.nn.Linear(6, 4, bias=False)), owned)


def test_a_publisher_of_adapters_that_ended_holds_up_no_round(stage: Serving) -> None:
    """Where LetGo waited for another publisher's version to be staged, the round's next call waited behind it."""
    assert stage.engine.receive(LetGo(adapters=True)).beside
    assert not stage.engine.receive(LetGo()).beside
