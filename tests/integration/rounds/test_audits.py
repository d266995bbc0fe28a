"""Over the real service: an engine whose weights somebody changes while it serves gets them again, and rounds are not disturbed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import torch
from tests.integration.rounds.test_rounds import Joined, Net, change, same

from weightsync.config import ServerSettings
from weightsync.coordinator.audits import Audits
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import DeadlineExceeded, RoundFailed
from weightsync.model import Version
from weightsync.server.server import BackgroundServer

SECONDS = 30.0


class Reporting(ModuleAdapter):
    """Says which versions its module took."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.took: queue.SimpleQueue[int] = queue.SimpleQueue()

    def finish(self, version: Version) -> None:
        super().finish(version)
        self.took.put(version.number)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    monkeypatch.setattr(Audits, "least_seconds", 0.2)  # metrics are shared for a moment
    monkeypatch.setattr("weightsync.coordinator.audits.random.random", lambda: 1.0)
    with BackgroundServer(ServerSettings.load({}, port=0, audit_share=1.0)) as server, ExitStack() as owned:
        yield Joined(server, owned)


def metric(joined: Joined, name: str) -> float:
    headers = {"Authorization": f"Bearer {joined.server.token}"}
    text = httpx.get(f"{joined.server.url}/metrics", headers=headers, timeout=SECONDS).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"weightsync_{name} ")))


def failures(joined: Joined, number: int) -> None:
    """Wait until so many looks have found a difference: metrics are shared for a moment."""
    deadline = Deadline(SECONDS)
    while metric(joined, "audit_failures_total") < number:
        threading.Event().wait(min(0.05, deadline.remaining("the metric")))
    assert metric(joined, "audit_failures_total") == number


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_parameter_that_is_overwritten_while_the_engine_serves_comes_back(joined: Joined, transport: str, tied: bool) -> None:
    source, target = Net(tied), Net(tied)
    trainer = joined.trainer(source, transports=[transport])
    adapter = Reporting(target)
    joined.engine(adapter, transports=[transport])
    for number in (1, 2):
        change(source, number)
        trainer.publish(number, timeout=SECONDS)
        assert adapter.took.get(timeout=SECONDS) == number
        with torch.no_grad():
            target.up.weight[3, 7] += 1.0
        assert adapter.took.get(timeout=SECONDS) == number, "the same version, again"
        failures(joined, number)
    trainer.publish(3, timeout=SECONDS)  # after the round that brought it again
    assert same(source, target)
    assert metric(joined, "audit_seconds_count") >= 2


def test_rounds_and_looks_go_on_beside_each_other(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source, deltas=True)
    adapter = Reporting(target)
    joined.engine(adapter)
    for number in range(1, 30):
        change(source, number % 3)
        [replica] = trainer.publish(number, timeout=SECONDS).replicas
        assert (replica.version, replica.verified, replica.error) == (number, "installed", None)
        assert same(source, target)
        with adapter.in_use():
            pass
    assert adapter.took.qsize() == 29, "none came twice"
    assert metric(joined, "audit_failures_total") == 0


def test_an_engine_that_is_updated_through_its_loader_is_left_alone(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source)
    adapter = Reporting(target)
    engine = joined.engine(adapter, delivery="streamed")
    version = trainer.publish(1, timeout=SECONDS).version
    change(target, 5)
    with pytest.raises(DeadlineExceeded):
        engine.wait_for_version(2, timeout=1.0)
    assert engine.serving == version
    assert metric(joined, "audit_failures_total") == metric(joined, "audit_seconds_count") == 0


def test_what_staging_finds_counts_whether_or_not_the_round_then_reaches_the_pause() -> None:
    settings = ServerSettings.load({}, port=0, audit_share=0.0, max_unavailable=1)
    with BackgroundServer(settings) as server, ExitStack() as owned:
        joined = Joined(server, owned)
        source, target = Net(), Net()
        trainer = joined.trainer(source, deltas=True)
        busy, adapter = ModuleAdapter(Net()), Reporting(target)
        joined.engine(busy, "a")
        joined.engine(adapter, "b")
        change(source, 1)
        trainer.publish(1, timeout=SECONDS)
        assert adapter.took.get(timeout=SECONDS) == 1
        with torch.no_grad():
            target.up.weight[3, 7] += 1.0
            source.up.weight[0, 0] += 1.0
        with busy.in_use(), suppress(RoundFailed):  # unless b had its turn first
            trainer.publish(2, timeout=4.0)
        assert adapter.took.get(timeout=SECONDS) == 2, "it is updated as soon as that is possible"
        assert metric(joined, "audit_failures_total") == 1


@pytest.mark.parametrize("origin", ["trainer", "store", "replica"])
def test_looks_go_on_after_the_trainer_has_gone(
    joined: Joined, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Net(), Net()
    adapter = Reporting(target)
    if origin != "replica":
        monkeypatch.setenv("WEIGHTSYNC_STORE", str(tmp_path / "store"))
    trainer = joined.trainer(source)
    if origin == "trainer":
        engine = joined.engine(adapter)
    elif origin == "replica":
        joined.engine(ModuleAdapter(Net()), "feeding", serve_weights=True)
    change(source, 1)
    with suppress(RoundFailed):  # there may be no replica yet
        trainer.publish(1, timeout=SECONDS)
    trainer.wait_until_stored(SECONDS)
    trainer.close()
    if origin != "trainer":
        engine = joined.engine(adapter)
    assert adapter.took.get(timeout=SECONDS) == 1
    for number, parameter in enumerate((target.up.weight, target.embed.weight), 1):  # one that changes again would be left alone
        if number == (1 if origin == "trainer" else 2):  # it has freed what it had prepared
            deadline = Deadline(SECONDS)
            while engine._role._filler is not None:
                threading.Event().wait(min(0.05, deadline.remaining("letting go")))
        with torch.no_grad():
            parameter[3, 7] += 1.0
        assert adapter.took.get(timeout=SECONDS) == 1, "the same version, again"
        failures(joined, number)
    assert same(source, target)
