"""A relay that is killed, or told to stop, at any of its fault points costs no version and changes none: the next one goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.faults.points import RELAY_POINTS, TRAINER_POINTS
from tests.integration.relays.gated_relay import PUBLISHED
from tests.integration.relays.test_relayed_stores import Far, change, model
from tests.unit.store.stored import RUN, StoringTrainer

import weightsync
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync_testing.fork_server import ForkServer

pytestmark = pytest.mark.usefixtures("runtime")

FORK_SERVER = ForkServer("tests.integration.relays.gated_relay")
SECONDS = 60.0


class Story:
    """A store, its trainer, a region of two engines, and the relays between them, one after the other."""

    def __init__(self, folder: Path, owned: ExitStack) -> None:
        self.owned, self.state, self.far = owned, model().state_dict(), Far(owned)
        self.trainer = StoringTrainer(folder / "store", self.state, ranks=2)
        self.second = model(2)
        loaded = weightsync.Engine(ModuleAdapter(self.second), "loaded", self.far.server.url, delivery="streamed")
        self.engines = {owned.enter_context(loaded): self.second, self.far.engine: self.far.served}
        self.published: dict[weightsync.Version, dict[str, torch.Tensor]] = {}

    def publish(self, number: int) -> weightsync.Version:
        change(self.state)
        version = self.trainer.publish(number)
        self.published[version] = {name: tensor.clone() for name, tensor in self.state.items()}
        return version

    def relay(self, act: str, point: str, begin: str = "armed") -> _Output:
        output, its = os.pipe()
        its_life, life = os.pipe()  # the relay ends with this test
        self.owned.callback(os.close, life)
        server = self.far.server
        arguments = [str(self.trainer.store.url), self.trainer.key.public_text, RUN, server.url, server.token]
        try:
            FORK_SERVER.fork("tests.integration.relays.gated_relay:run", [its, its_life], [*arguments, act, point, begin])
        finally:
            os.close(its)
            os.close(its_life)
        return _Output(self.owned, output)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = Deadline(SECONDS)
        while not condition():
            threading.Event().wait(min(0.02, deadline.remaining(what)))

    def look(self) -> None:
        """The relay is gone, and all is quiet: what an engine serves is a version of the trainer, in every bit."""
        coordinator = self.far.server.coordinator
        self.wait(lambda: not coordinator.status().trainer and not coordinator.status().busy, "the end of the relay")
        for engine, module in self.engines.items():
            if engine.serving is not None:
                assert engine.serving in self.published
                assert same(module, self.published[engine.serving])

    def serves(self, version: weightsync.Version) -> None:
        self.wait(lambda: all(engine.serving == version for engine in self.engines), f"serving {version}")
        assert all(same(module, self.published[version]) for module in self.engines.values())


class _Output:
    """What a relay prints until it ends."""

    def __init__(self, owned: ExitStack, descriptor: int) -> None:
        self._file = owned.enter_context(os.fdopen(descriptor))

    def line(self, part: str) -> None:
        while part not in (line := self._file.readline()):
            assert line, f"it ended without printing {part!r}"

    def rest(self) -> str:
        return self._file.read()


def same(served: torch.nn.Module, trained: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, trained[name]) for name, tensor in served.state_dict().items())


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point == "relay.verified" else [pytest.mark.rare])
        for point in (*RELAY_POINTS, *TRAINER_POINTS)
    ],
)
def test_a_relay_may_end_anywhere(tmp_path: Path, point: str) -> None:
    with ExitStack() as owned:
        story = Story(tmp_path, owned)
        first = story.publish(0)
        assert "stopped" not in story.relay("kill", point).rest()  # while it reads or publishes its first version
        story.look()
        killed = story.relay("kill", point, "once")
        killed.line(PUBLISHED)
        story.serves(first)  # also if the relay that is dead had published it
        second = story.publish(1)
        killed.rest()
        story.look()
        stopped = story.relay("stop", point, "once")
        stopped.line(PUBLISHED)
        story.serves(second)
        story.publish(2)
        assert "relay stopped" in stopped.rest()
        story.look()
        story.relay("kill", "none")
        story.serves(story.publish(3))
        assert {result.version for result in story.far.server.coordinator.status().rounds} <= story.published.keys()
