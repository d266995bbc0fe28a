"""A token that is limited to some adapters publishes and retires these, and does nothing else, whatever its holder sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from tests.integration.rounds.test_adapters import Fleet, lora, model
from tests.integration.rounds.test_rounds import Joined
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.config import Address, ClientSettings, Secret, ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import AuthenticationError
from weightsync.protocol.lora_messages import RetireLora
from weightsync.protocol.messages import CannotPublish
from weightsync.protocol.proof import limited
from weightsync.protocol.tokens import bearer
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.trainer.adapters import Adapters
from weightsync.trainer.trainer import Trainer


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with BackgroundServer(ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=0)) as server, ExitStack() as owned:
        made = Fleet(Joined(server, owned), owned)
        made.adapters.publish("bob/math")
        yield made


@pytest.fixture
def of_alice(fleet: Fleet) -> Secret:
    return limited(Secret(fleet.server.token), "alice/*")


@pytest.fixture
def alice(fleet: Fleet, of_alice: Secret) -> Adapters:
    """A publisher in a process that has no other token."""
    adapters = Adapters(lora(5), fleet.trainer.version, alpha=8, coordinator=fleet.server.url, token=of_alice.reveal())
    return fleet.owned.enter_context(adapters)


def test_it_publishes_and_retires_what_it_is_for(fleet: Fleet, alice: Adapters) -> None:
    for number in range(2):
        assert alice.publish("alice/math", number).ok
    alice.publish("alice/chat")
    alice.retire("alice/math", keep=1)
    assert sorted(fleet.names()) == ["alice/chat@0", "alice/math@1", "bob/math@0"]
    version, _ = fleet.answer("alice/math")
    assert str(version) == "alice/math@1"


def test_names_of_others_are_refused_and_stay_as_they_are(fleet: Fleet, alice: Adapters) -> None:
    alice.publish("alice/math")
    link = alice._publisher._link
    attempts: list[Callable[[], object]] = [
        lambda: alice.publish("bob/math"),
        lambda: alice.publish("alicex/math"),
        lambda: alice.retire("bob/math"),
        lambda: link.call(RetireLora("bob/math", 0), 5.0),
        lambda: link.call(CannotPublish(None, "Aborted", "it failed", adapter="bob/math"), 5.0),
        lambda: link.call(CannotPublish(None, "Aborted", "it failed"), 5.0),
    ]
    for attempt in attempts:
        with pytest.raises(AuthenticationError, match=r"is not among the adapters that this token admits to: alice/\*"):
            attempt()
    assert sorted(fleet.names()) == ["alice/math@0", "bob/math@0"]
    assert fleet.adapters.publish("bob/math").version.number == 1, "nobody waits for a rank of the attacker"


def test_it_admits_to_no_other_role(fleet: Fleet, of_alice: Secret) -> None:
    for join in (
        lambda: Trainer(model(), fleet.server.url, token=of_alice.reveal()),
        lambda: Engine(ModuleAdapter(model()), "r9", fleet.server.url, token=of_alice.reveal()),
    ):
        with pytest.raises(AuthenticationError, match="not to a rank of role"):
            join()


def test_it_opens_no_route(fleet: Fleet, of_alice: Secret) -> None:
    where = Address.parse(fleet.server.url)
    only = r"admits to publishing the adapters alice/\* only"
    with Client(ClientSettings(coordinator=where, token=of_alice)) as client, pytest.raises(AuthenticationError, match=only):
        client.status()
    for path in ("/v1/status", "/v1/events", "/v1/trace", "/metrics"):
        answer = httpx.get(where.url + path, headers=bearer(of_alice), trust_env=False)
        assert answer.status_code == 401, "it is proved, and never sent"


def test_publishers_of_other_limits_are_other_sources(fleet: Fleet, of_alice: Secret) -> None:
    """Else a holder could join as rank 1 of somebody else's publisher, and what that publishes would wait for it."""
    whole = fleet.owned.enter_context(fleet.elsewhere(fleet.trainer.version, source="shared", rank=0, world_size=1))
    other = Adapters(
        lora(6), fleet.trainer.version, alpha=8, coordinator=fleet.server.url, token=of_alice.reveal(), source="shared",
        rank=0, world_size=1,
    )  # fmt: skip
    with other:
        assert other.publish("alice/math").ok
        assert whole.publish("carol/math").ok
    assert whole.publish("carol/math").version.number == 1


def test_the_command_prints_one_that_works(fleet: Fleet, of_alice: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", fleet.server.token)
    done = CliRunner().invoke(app, ["token", "-c", fleet.server.url, "--adapters", "alice/*"])
    assert (done.exit_code, done.output) == (0, of_alice.reveal() + "\n")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", of_alice.reveal())
    for names in ("alice", "alice/math"):
        assert CliRunner().invoke(app, ["token", "-c", fleet.server.url, "--adapters", names]).exit_code != 0
