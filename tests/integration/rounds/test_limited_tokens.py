"""A token that is limited to some adapters publishes and retires these, and does nothing else, whatever its holder sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
import torch
from msgspec import structs
from tests.integration.rounds.test_adapters import Fleet, lora, model
from tests.integration.rounds.test_rounds import Joined
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError, RoundFailed, WeightSyncError
from weightsync.model.lora import AdapterSpec, LoraConfig
from weightsync.protocol.lora_messages import RetireLora
from weightsync.protocol.messages import CannotPublish, Hello, Offer, Traits
from weightsync.protocol.proof import Claimant, limited
from weightsync.protocol.store_messages import StoreAddress
from weightsync.protocol.tokens import bearer
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.trainer.adapters import Adapters, _AdapterPublisher
from weightsync.trainer.trainer import Trainer
from weightsync.transports import store


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


def test_it_does_not_hear_what_replicas_lack(alice: Adapters) -> None:
    with pytest.raises(ProtocolError, match="may not send WaitForReplicas"):
        alice.wait_for_replicas(timeout=10)


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


def test_no_name_of_others_is_told_where_slots_are_full(fleet: Fleet, alice: Adapters) -> None:
    for number in range(3):
        alice.publish("alice/math", number)
    with pytest.raises(
        RoundFailed, match=r"all 4 slots .*1 by other owners, and by alice/math@0, alice/math@1, alice/math@2"
    ) as failed:
        alice.publish("alice/chat")
    assert "bob" not in str(failed.value)


def test_long_limits_join_and_a_name_that_is_too_long_with_them_does_not(fleet: Fleet) -> None:
    patterns = ",".join(f"alice-{number}-{'x' * 50}/*" for number in range(8))
    token = limited(Secret(fleet.server.token), patterns).reveal()
    at: dict[str, Any] = {"alpha": 8, "coordinator": fleet.server.url, "token": token}
    with Adapters(lora(5), fleet.trainer.version, **at) as adapters:
        assert adapters.publish(f"alice-3-{'x' * 50}/math").ok
        with pytest.raises(ProtocolError, match="200 are allowed"):
            Adapters(lora(5), fleet.trainer.version, source="s" * 180, **at)
    assert fleet.trainer.publish(timeout=30).ok, "no engine got a name that it refuses"


def test_scalings_are_for_modules_of_the_adapter(fleet: Fleet, alice: Adapters) -> None:
    spec = AdapterSpec("alice/math", LoraConfig(4, 8.0, scalings={"0": 2.0, "nowhere" * 100: 1.0}), fleet.trainer.version)
    with pytest.raises(ConfigurationError, match="no module nowhere"):
        alice._publisher.publish_adapter(spec, None, None, 10.0)
    assert alice.publish("alice/math").ok


def test_engines_open_nothing_for_an_adapter_with_credentials_of_their_own(
    fleet: Fleet, of_alice: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(store, "ObjectStore", opened.append)
    where = msgspec.json.encode(StoreAddress("s3://of-her-choice", "r", 1, 0, 0)).decode()
    own = _AdapterPublisher._hello

    def hello(publisher: _AdapterPublisher) -> Hello:
        given = own(publisher)
        return structs.replace(given, offers=(Offer("store", where, given.offers[0].host, Traits(encrypted=True)),))

    monkeypatch.setattr(_AdapterPublisher, "_hello", hello)
    at: dict[str, Any] = {"alpha": 8, "coordinator": fleet.server.url, "token": of_alice.reveal()}
    with Adapters(lora(5), fleet.trainer.version, **at) as adapters, pytest.raises(RoundFailed, match="no transport reaches"):
        adapters.publish("alice/math", timeout=20)
    assert opened == []


def test_a_refused_request_is_the_last_of_its_connection(fleet: Fleet, of_alice: Secret) -> None:
    where = Address.parse(fleet.server.url)
    claimant = Claimant(of_alice, where)
    with httpx.Client(base_url=where.url, trust_env=False) as client:
        claimant.accept(client.get(claimant.target).content)
        answer = client.get("/v1/status", headers={"Authorization": claimant.authorization("GET /v1/status")[0]})
    assert (answer.status_code, answer.headers["connection"]) == (403, "close"), "strangers' connections are rate-limited"


def test_one_token_takes_an_eighth_of_the_places(of_alice: Secret, fleet: Fleet) -> None:
    settings = ServerSettings.load({"WEIGHTSYNC_TOKEN": "a-token-for-this-test", "WEIGHTSYNC_AGENTS": "16"}, port=0)
    with BackgroundServer(settings) as server, ExitStack() as owned:

        def joined(patterns: str) -> Adapters:
            token = limited(Secret(server.token), patterns).reveal()
            return owned.enter_context(
                Adapters(lora(5), None, alpha=8, coordinator=server.url, token=token, timeouts=Timeouts(connect=3.0))
            )

        first = joined("alice/*")
        joined("alice/*")
        with pytest.raises(WeightSyncError, match=r"2 agents with the token for alice/\* are connected already"):
            joined("alice/*")
        joined("bob/*")
        first.close()
        joined("alice/*")


def test_the_command_prints_one_that_works(fleet: Fleet, of_alice: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", fleet.server.token)
    done = CliRunner().invoke(app, ["token", "-c", fleet.server.url, "--adapters", "alice/*"])
    assert (done.exit_code, done.output) == (0, of_alice.reveal() + "\n")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", of_alice.reveal())
    for names in ("alice", "alice/math"):
        assert CliRunner().invoke(app, ["token", "-c", fleet.server.url, "--adapters", names]).exit_code != 0


def test_a_message_that_an_engine_would_not_take_is_not_sent() -> None:
    """The engine would end its connection, perhaps in a round of others."""
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0", "WEIGHTSYNC_FRAME_BYTES": "265000"}, port=0)
    with BackgroundServer(settings) as server, ExitStack() as owned:
        fleet = Fleet(Joined(server, owned), owned)
        large = {f"layers.{number}.{'x' * 40}.lora_{side}.weight": torch.zeros(1, 1) for number in range(700) for side in "AB"}
        at: dict[str, Any] = {"alpha": 1, "coordinator": server.url, "token": server.token}
        with Adapters(large, fleet.trainer.version, **at) as adapters, pytest.raises(RoundFailed, match=r"265,000 are allowed"):
            adapters.publish("alice/large")
        assert [replica.state for replica in fleet.trainer.publish(timeout=30).replicas] == ["loaded"]
        client = Client(ClientSettings(coordinator=Address.parse(server.url), token=Secret(server.token)))
        with client:
            assert all(not replica.missing for replica in client.status().replicas)
