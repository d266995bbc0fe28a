"""Holds that a child's end takes nothing from a process that forks (data loaders do), and that no child hides its death."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from tests.integration.fork_server import FORK_SERVER, Child

from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.coordinator.events import Joined, Left
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import CoordinatorUnreachable
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Started before any test looks for what it leaves behind."""
    FORK_SERVER.start()


SECONDS = 20.0
SOON = 3.0
"""Seconds within which a loss must be noticed; by missing answers alone it takes twice the heartbeat, 20."""


class Forking(Child):
    """A process of :mod:`tests.integration.rounds.forking_agent`."""

    def __init__(self, role: str, server: BackgroundServer | None, transport: str = "shared_memory") -> None:
        where = {"url": "", "token": ""} if server is None else {"url": server.url, "token": server.token}
        super().__init__("tests.integration.rounds.forking_agent", json.dumps({"role": role, "transport": transport, **where}))
        self.first = self.line()

    def line(self) -> str:
        assert select.select([self.output], [], [], SECONDS)[0]
        return self.output.readline().strip()

    def ask(self, command: str) -> str:
        os.write(self._input, command.encode() + b"\n")
        return self.line()


@contextmanager
def coordinator() -> Iterator[tuple[BackgroundServer, Client]]:
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Client(ClientSettings(coordinator=server.address, token=Secret(server.token))) as client,
    ):
        yield server, client


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "collective"])
def test_a_child_that_unwinds_leaves_its_parent_alone(transport: str) -> None:
    models = [torch.nn.Linear(8, 8) for _ in range(2)]
    with coordinator() as (server, client), closing(Forking("trainer", server, transport)) as trainer:

        def engine(name: str, model: torch.nn.Module) -> Engine:
            return Engine(ModuleAdapter(model), name, server.url, token=server.token, transports=[transport])

        with engine("early", models[0]):
            assert trainer.ask("publish 1") == "True"
            assert trainer.ask("unwind") == "0"
            with client.events() as events, engine("late", models[1]):
                while not all(replica.state == "loaded" for replica in client.status().replicas):
                    next(events)  # it is seeded from what was published before the fork
                assert torch.equal(models[0].weight, models[1].weight)
                assert trainer.ask("publish 2") == "True"
                assert {replica.version for replica in client.status().replicas} == {2}


@pytest.mark.parametrize("role", ["trainer", "engine"])
def test_a_living_child_does_not_hide_its_parents_death(role: str) -> None:
    with ExitStack() as owned:
        server, client = owned.enter_context(coordinator())
        events = owned.enter_context(client.events())
        parent = owned.enter_context(closing(Forking(role, server)))
        member = next(event for event in events if isinstance(event, Joined)).member
        if role == "engine":
            trainer = owned.enter_context(Trainer(torch.nn.Linear(8, 8), server.url, token=server.token))
            assert trainer.publish(1, timeout=SECONDS).ok
        else:
            owned.enter_context(Engine(ModuleAdapter(torch.nn.Linear(8, 8)), "r", server.url, token=server.token))
            assert parent.ask("publish 1") == "True"
        worker = Path(f"/proc/{parent.ask('worker')}")
        started = time.monotonic()
        parent.kill()
        next(event for event in events if isinstance(event, Left) and event.member == member)
        assert time.monotonic() - started < SOON
        assert "memfd:weightsync" not in (worker / "maps").read_text()
        assert not any("memfd:weightsync" in os.readlink(link) for link in (worker / "fd").iterdir())


def test_a_living_child_does_not_hold_the_door_of_a_coordinator_in_its_dead_parent() -> None:
    """The default: rank 0 of the trainer has the coordinator in its process."""
    with closing(Forking("trainer", None)) as parent:
        url, token = json.loads(parent.first)
        settings = ClientSettings(coordinator=Address.parse(url), token=Secret(token), timeouts=Timeouts(connect=SECONDS))
        with Client(settings) as client, client.events() as events:
            parent.ask("worker")
            started = time.monotonic()
            parent.kill()
            with pytest.raises(CoordinatorUnreachable):
                list(events)
            with pytest.raises(CoordinatorUnreachable):
                client.status()
            assert time.monotonic() - started < SOON
