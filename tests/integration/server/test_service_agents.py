"""The agents' socket: who is let in, what is said to the others, over IPv4, IPv6 and TLS."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from tests.integration.server.service_support import Agent, RawAgent, engine_hello, fast, joined, obey, trainer_hello

from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.coordinator.events import Left
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    MembershipError,
    ProtocolError,
)
from weightsync.protocol.messages import (
    PROTOCOL,
    Cancel,
    Done,
    Progress,
    Publish,
    Quarantine,
    Refused,
    Welcome,
)
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")


# Getting in.


def test_an_agent_is_welcomed_and_named(settings: ClientSettings) -> None:
    with joined(settings, engine_hello("a")) as agent:
        welcome = agent.welcomes.get(timeout=1)
        assert (welcome.member, welcome.run) == ("a/0", "run")
        assert agent.link.connected


@pytest.mark.parametrize("token", [Secret("wrong"), None])
def test_a_wrong_or_missing_token_is_refused_at_once(server: BackgroundServer, token: Secret | None, tmp_path: Path) -> None:
    (tmp_path / "weightsync" / f"{server.address.port}.token").unlink()
    agent = Agent(fast(server.address, token), engine_hello)
    started = time.monotonic()
    with pytest.raises(AuthenticationError, match="WEIGHTSYNC_TOKEN"):
        agent.link.connect()
    assert time.monotonic() - started < 2, "a wrong token is not worth another try"


def test_the_token_that_the_coordinator_left_is_found(server: BackgroundServer) -> None:
    with joined(fast(server.address), engine_hello()) as agent:
        assert agent.link.connected


@pytest.mark.parametrize(
    ("hello", "error", "words"),
    [
        (engine_hello(run="other"), MembershipError, "other"),
        (engine_hello("trainer"), MembershipError, "trainer"),
        (engine_hello("a/b"), ProtocolError, "name"),
        (trainer_hello(rank=3, world_size=2), ProtocolError, "rank 3 of 2"),
    ],
)
def test_a_rank_that_does_not_fit_learns_why(settings: ClientSettings, hello: object, error: type[Exception], words: str) -> None:
    agent = Agent(settings, lambda: hello)  # type: ignore[arg-type, return-value]
    with pytest.raises(error, match=words):
        agent.link.connect()
    with pytest.raises(Aborted):
        agent.link.call(Publish(1), 1)


def test_a_name_in_use_is_refused_and_its_owner_stays(settings: ClientSettings) -> None:
    with joined(settings, engine_hello("a", session="one")) as owner:
        with pytest.raises(MembershipError, match="still alive"), joined(settings, engine_hello("a", session="two")):
            pass
        assert owner.link.connected


def test_agents_are_counted(settings: ClientSettings, server: BackgroundServer) -> None:
    with joined(settings, engine_hello("a")), joined(settings, engine_hello("b")), joined(settings, engine_hello("c")):
        impatient = ClientSettings(coordinator=server.address, timeouts=Timeouts(connect=0.6))
        with pytest.raises(CoordinatorUnreachable, match="WEIGHTSYNC_AGENTS"), joined(impatient, engine_hello("d")):
            pass


def test_a_hello_larger_than_the_coordinator_takes_is_not_even_sent(settings: ClientSettings) -> None:
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_FRAME_BYTES"), joined(settings, engine_hello("a" * (2 << 20))):
        pass


def test_an_oversize_frame_ends_only_its_own_connection(server: BackgroundServer, settings: ClientSettings) -> None:
    with joined(settings, engine_hello("a")) as good, RawAgent(server.address, server.token) as raw:
        # The header alone: a frame of 1 TiB is refused before a byte of it is stored.
        raw.socket.sendall(b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"\0\0\0\0")
        assert raw.close_code() == 1009
        assert good.link.connected


@pytest.mark.parametrize(
    ("data", "opcode", "kind"),
    [
        (b"rubbish", 2, "ProtocolError"),
        (b"\xc1", 2, "ProtocolError"),
        (b"text", 1, "ProtocolError"),
        (b"\x93" * 5000, 2, "ProtocolError"),
    ],
)
def test_a_bad_hello_is_refused(server: BackgroundServer, data: bytes, opcode: int, kind: str) -> None:
    with RawAgent(server.address, server.token) as raw:
        raw.say(data, opcode)
        answer = raw.frame()
        assert isinstance(answer, Refused)
        assert answer.kind == kind
        assert raw.close_code() == 1008


def test_something_else_than_a_hello_is_refused(server: BackgroundServer) -> None:
    with RawAgent(server.address, server.token) as raw:
        raw.say(Progress(1))
        answer = raw.frame()
        assert isinstance(answer, Refused)
        assert "Hello first, not Progress" in answer.message


def test_an_agent_that_says_nothing_is_sent_away(server: BackgroundServer) -> None:
    with RawAgent(server.address, server.token) as raw:
        answer = raw.frame()
        assert isinstance(answer, Refused)
        assert answer.kind == "DeadlineExceeded"


@pytest.mark.parametrize("subprotocol", ["", "weightsync.999"])
def test_another_protocol_is_refused_before_a_frame(server: BackgroundServer, subprotocol: str) -> None:
    with RawAgent(server.address, server.token, subprotocol) as raw:
        assert raw.head.startswith(b"HTTP/1.1 426")
    with RawAgent(server.address, "wrong") as raw:
        assert raw.head.startswith(b"HTTP/1.1 401")
        assert b"www-authenticate: bearer" in raw.head.lower()


def test_a_frame_that_does_not_belong_ends_the_connection(server: BackgroundServer, settings: ClientSettings) -> None:
    with Client(settings) as client, client.events() as events, RawAgent(server.address, server.token) as raw:
        raw.say(engine_hello("a"))
        assert isinstance(raw.frame(), Welcome)
        raw.say(Cancel(1))  # of nothing: harmless
        raw.say(engine_hello("a"))
        assert raw.close_code() == 1002
        assert "Hello" in next(event for event in events if isinstance(event, Left)).reason


# Other addresses.


def test_ipv6_addresses_work(runtime: None) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"this machine cannot listen on ::1: {error}")
    with BackgroundServer(ServerSettings(host="::1", port=0)) as server:
        assert server.url.startswith("http://[::1]:")
        with joined(fast(Address.parse(server.url)), engine_hello()), Client(fast(server.address)) as client:
            assert len(client.status().replicas) == 1


def test_protocol_number_is_in_the_subprotocol() -> None:
    assert engine_hello().protocol == PROTOCOL
    assert isinstance(obey(Quarantine("x"), 1.0), Done)
