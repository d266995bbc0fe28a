"""A stolen worker, who has the token, and a squatter, who has a dead coordinator's port: neither can be somebody else."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import torch
from tests.integration.server.service_support import (
    DIGESTS,
    Agent,
    RawAgent,
    engine_hello,
    fast,
    free_port,
    joined,
    trainer_hello,
)
from typer.testing import CliRunner

import weightsync
from weightsync.cli.main import app
from weightsync.config import Address, ClientSettings, Limits, Secret, ServerSettings
from weightsync.errors import (
    AuthenticationError,
    CoordinatorUnreachable,
    MembershipError,
    WeightSyncError,
)
from weightsync.protocol.messages import (
    Answer,
    Call,
    Cancel,
    Confirmed,
    Failure,
    Hello,
    Place,
    Placed,
    Progress,
    Publish,
    Refused,
    Welcome,
)
from weightsync.protocol.proof import SCHEME
from weightsync.server.client import Client
from weightsync.server.http_client import coordinator_http
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

TOKEN = "the-token-of-the-whole-run-0123456789"


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    settings = ServerSettings(port=0, run="run", heartbeat=0.3, token=Secret(TOKEN), limits=Limits(hello_seconds=5.0))
    with BackgroundServer(settings) as server:
        yield server


@pytest.fixture
def settings(server: BackgroundServer) -> ClientSettings:
    return fast(server.address, Secret(TOKEN))


def status_text(server: BackgroundServer) -> str:
    answer = httpx.get(f"{server.url}/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False)
    assert answer.status_code == 200, "curl and Prometheus go on as before"
    return answer.text


def attack(server: BackgroundServer, hello: Hello) -> str:
    """What somebody with the token is told who says this."""
    with RawAgent(server.address, TOKEN) as raw:
        raw.say(hello)
        answer = raw.frame()
        assert isinstance(answer, Refused), "the attacker took the place"
        return f"{answer.kind}: {answer.message}"


# Taking somebody's place.


def test_a_stolen_worker_cannot_take_the_place_of_the_live_trainer_or_a_live_replica(
    server: BackgroundServer, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"w": torch.full((8,), 1.0)}
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(8), requires_grad=False))
    with (
        weightsync.Trainer(weights, server.url, token=TOKEN, rank=0, world_size=1, transports=["inproc"]) as trainer,
        weightsync.Engine(weightsync.ModuleAdapter(model), "honest", server.url, token=TOKEN, transports=["inproc"]) as engine,
    ):
        assert trainer.publish(1, timeout=20).ok
        shown = status_text(server)
        for link in (trainer._link, engine._link):
            assert link._credential is not None
            assert link._credential.reveal() not in shown
        assert trainer._session.reveal() not in shown
        assert engine._session.reveal() not in shown
        known = server.coordinator._members
        held = [trainer, engine, trainer._link, engine._link, known.trainers["trainer/0"]]
        debugged = "".join(repr(vars(one)) for one in held) + repr(known.trainers["trainer/0"].node.rank)
        for link in (trainer._link, engine._link):
            assert link._credential is not None
            assert link._credential.reveal() not in debugged, "vars(), and tracebacks that show locals"
        for secret in (trainer._session.reveal(), engine._session.reveal(), TOKEN, trainer._hello().key.hex()):
            assert secret not in debugged
        for real, name in ((trainer._hello(), "trainer/0"), (engine._hello(), "honest/0")):
            for session in ("guessed", real.session):  # even if it leaked
                said = attack(server, msgspec.structs.replace(real, session=session))
                assert said.startswith(f"MembershipError: {name} is already connected from process ")
        with torch.no_grad():
            weights["w"].fill_(2.0)
        assert trainer.publish(2, timeout=20).ok
        assert model.get_parameter("w").tolist() == [2.0] * 8
        with Client(fast(server.address, Secret(TOKEN))) as client:
            assert [(one.name, one.state, one.version) for one in client.status().replicas] == [("honest", "loaded", 2)]
    assert "refused an agent: trainer/0 is already connected" in caplog.text


def test_a_rank_reconnects_before_the_coordinator_saw_its_old_connection_end(
    server: BackgroundServer, settings: ClientSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    hello = engine_hello("a")
    with joined(settings, hello) as old, Client(settings) as client:
        credential = old.welcomes.get(timeout=5).credential
        with RawAgent(server.address, TOKEN) as new:
            new.say(msgspec.structs.replace(hello, credential=credential, pid=77))
            welcome = new.frame()
            assert isinstance(welcome, Welcome)
            assert welcome.credential == credential
            # The old one is closed, and both ends say why. (Here it lives, and has the credential as well: it comes back.)
            assert "a/0 connected again, from process 77 on host" in old.losses.get(timeout=5)
            assert old.welcomes.get(timeout=5).credential == credential
            assert new.close_code() == 1008
        assert client.status().replicas[0].ranks[0].pid == hello.pid
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(text.startswith("a/0: closing the connection of process 1 on host: a/0 connected again") for text in warned)
    ended = f"a: the connection to the coordinator at {settings.coordinator} ended: a/0 connected again"
    assert any(text.startswith(ended) for text in warned), "the agent's side"


def test_nothing_counts_that_comes_over_a_connection_after_it_was_replaced(server: BackgroundServer) -> None:
    hello = trainer_hello()
    with RawAgent(server.address, TOKEN) as old, RawAgent(server.address, TOKEN) as new:
        old.say(hello)
        welcome = old.frame()
        assert isinstance(welcome, Welcome)
        old.say(Confirmed())
        new.say(msgspec.structs.replace(hello, credential=welcome.credential))
        assert isinstance(new.frame(), Welcome)
        assert old.close_code() == 1008
        old.say(Call(1, 5.0, Publish(1)))
        new.say(Call(1, 5.0, Publish(2)))
        place = new.frame()
        assert isinstance(place, Call)
        assert isinstance(place.body, Place)
        assert place.body.number == 2


def test_after_a_restart_a_rank_is_admitted_by_the_token_again(runtime: None) -> None:
    port = free_port()
    where = ServerSettings(port=port, run="run", heartbeat=0.3, token=Secret(TOKEN))
    with BackgroundServer(where) as first:
        agent = Agent(fast(first.address, Secret(TOKEN)), lambda: engine_hello("a"))
        agent.link.connect()
        before = agent.welcomes.get(timeout=5).credential
    try:
        with BackgroundServer(where):
            assert agent.welcomes.get(timeout=10).credential not in ("", before)
    finally:
        agent.link.close()


def test_a_revoked_rank_is_sent_away_and_told_why(
    server: BackgroundServer, settings: ClientSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    said: queue.Queue[None] = queue.Queue()

    def hello() -> Hello:
        said.put(None)
        return engine_hello("a")

    agent = Agent(settings, hello)
    with agent.link, Client(settings, server.secrets.operator) as client:
        agent.link.connect()
        done = CliRunner().invoke(app, ["revoke", "a/0", "--coordinator", server.url])
        assert (done.exit_code, done.output) == (0, "revoked a/0: disconnected process 1 on host\n"), done.output
        assert "its credential was revoked" in agent.losses.get(timeout=5)
        with joined(settings, engine_hello("a", session="another")) as heir:  # its place is free
            while not said.empty():
                said.get_nowait()
            for _ in range(2):  # it tries again, and was refused before it does so once more
                said.get(timeout=10)
            assert heir.link.connected
            assert not agent.link.connected
        with pytest.raises(MembershipError, match="'nobody/0' is not connected"):
            client.revoke("nobody/0")
    assert "the credential of a/0 was revoked: restart its process" in caplog.text


# Speaking for others.


def test_a_rank_speaks_for_itself_alone(server: BackgroundServer, settings: ClientSettings) -> None:
    """Answers, progress and publications belong to the connection that they come over, whatever they say."""
    with (
        RawAgent(server.address, TOKEN) as trainer,
        RawAgent(server.address, TOKEN) as thief,
        joined(settings, engine_hello("honest")) as honest,
        Client(settings) as client,
    ):
        trainer.say(trainer_hello())
        assert isinstance(trainer.frame(), Welcome)
        thief.say(engine_hello("thief"))
        assert isinstance(thief.frame(), Welcome)
        ahead = thief.frame()  # it is asked to prepare while nobody publishes
        assert isinstance(ahead, Call)
        thief.say(Failure(ahead.id, "LoadError", "not now"))
        thief.say(Call(1, 5.0, Publish(99)))
        refused = thief.frame()
        assert isinstance(refused, Failure)
        assert "thief/0 may not send Publish to the coordinator" in refused.message
        trainer.say(Call(1, 20.0, Publish(1)))
        place = trainer.frame()
        assert isinstance(place, Call)
        for number in range(64):  # the trainer's answer, a failure of the honest one, its progress
            thief.say(Answer(number, Placed(b"\1" * 8, 0.0)))
            thief.say(Failure(number, "LoadError", "forged"))
            thief.say(Cancel(number))
        thief.say(Progress(1 << 40))
        trainer.say(Answer(place.id, Placed(DIGESTS, 0.0)))
        prepare = thief.frame()
        assert isinstance(prepare, Call)
        thief.say(Failure(prepare.id, "LoadError", "its own round may fail"))
        while not isinstance(trainer.frame(), Answer):
            pass
        last = client.status().rounds[-1]
        assert {one.name: one.error is None for one in last.replicas} == {"honest": True, "thief": False}
        assert honest.link.connected


# Getting the token.


class Squatter:
    """Listens on a port and keeps everything that anybody sends; gives each request ``answer``."""

    def __init__(self, port: int, answer: bytes) -> None:
        self.heard = bytearray()
        self.came = threading.Event()
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(1.0)
                try:
                    while data := peer.recv(65536):
                        self.heard += data
                        peer.sendall(self._answer)
                        self.came.set()
                except OSError:
                    pass

    def __enter__(self) -> Squatter:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


FORGED = http("200 OK", b'{"nonce":"' + b"0" * 96 + b'","proof":"' + b"0" * 64 + b'"}')


@pytest.mark.parametrize("answer", [FORGED, http("401 Unauthorized", b"{}")])
def test_whoever_holds_a_dead_coordinators_port_gets_no_token(runtime: None, answer: bytes) -> None:
    port = free_port()
    where = ServerSettings(port=port, run="run", heartbeat=0.3, token=Secret(TOKEN))
    with BackgroundServer(where) as server:
        settings = fast(server.address, Secret(TOKEN))
        agent, client = Agent(settings, lambda: engine_hello("a")), Client(settings)
        agent.link.connect()
        client.status()
    try:
        agent.losses.get(timeout=10)
        with Squatter(port, answer) as squatter:
            assert squatter.came.wait(10), "the agent did not try to reconnect"
            with pytest.raises(CoordinatorUnreachable):
                client.status()
            with pytest.raises(AuthenticationError if answer is FORGED else WeightSyncError), Client(settings) as newcomer:
                newcomer.status()
        assert b"/v1/challenge?nonce=" in squatter.heard
        for secret in (TOKEN.encode(), b"uthorization", SCHEME.encode() + b" "):
            assert secret not in squatter.heard
        with BackgroundServer(where):  # the agent goes on as if nothing had been
            agent.welcomes.get(timeout=10)
            agent.welcomes.get(timeout=10)
            assert client.status().run == "run"
    finally:
        client.close()
        agent.link.close()


def test_a_url_from_elsewhere_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's open route names a coordinator; see also ``token_for_request``, which does not even try."""
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    monkeypatch.setenv("WEIGHTSYNC_CONNECT_TIMEOUT", "3")
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(8), requires_grad=False))
    port = free_port()
    with Squatter(port, FORGED) as squatter, pytest.raises(AuthenticationError, match="could not prove that it has the token"):
        weightsync.Engine(weightsync.ModuleAdapter(model), "victim", f"http://127.0.0.1:{port}")
    assert TOKEN.encode() not in squatter.heard
    assert b"uthorization" not in squatter.heard


async def test_an_answer_without_a_proof_is_not_believed(runtime: None) -> None:
    """Of whoever takes the port within the seconds in which a client that asks often wants no new challenge."""
    port = free_port()
    with BackgroundServer(ServerSettings(port=port, run="run", token=Secret(TOKEN))) as server:
        client = coordinator_http(fast(server.address, Secret(TOKEN)))
        assert (await client.get("/v1/status")).status_code == 200
        auth: Any = client.auth
        auth._trusted = 3600.0
    async with contextlib.aclosing(client):
        with Squatter(port, http("200 OK", b'{"run":"run"}')) as squatter:
            with pytest.raises(httpx.ConnectError, match="cannot prove"):
                await client.get("/v1/status")
            with pytest.raises(httpx.ConnectError, match=r"could not prove|not a weightsync coordinator"):
                await client.get("/v1/status")
            assert TOKEN.encode() not in squatter.heard
        with BackgroundServer(ServerSettings(port=port, run="run", token=Secret(TOKEN))):
            assert (await client.get("/v1/status")).status_code == 200
            auth._claimant._challenge = "0" * 96  # as of another process of the coordinator
            assert (await client.get("/v1/status")).status_code == 200


async def test_a_clients_request_is_proved_once_and_cannot_be_sent_again(
    server: BackgroundServer, settings: ClientSettings
) -> None:
    seen: list[httpx.Request] = []

    async def note(request: httpx.Request) -> None:
        seen.append(request)

    async with coordinator_http(settings) as client:
        client.event_hooks = {"request": [note]}
        assert (await client.get("/v1/status")).status_code == 200
        assert (await client.get("/v1/rollouts/completions/7?epoch=x")).status_code == 404
    assert sum(request.url.path == "/v1/challenge" for request in seen) == 1, "one challenge is enough for requests in a row"
    assert not any(TOKEN in value for request in seen for value in request.headers.values())
    header = next(request.headers["Authorization"] for request in seen if request.url.path == "/v1/status")
    assert header.startswith(f"{SCHEME} ")
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as thief:
        again = await thief.get("/v1/status", headers={"Authorization": header})
        assert (again.status_code, "used before" in again.json()["message"]) == (401, True)


def test_a_stranger_gets_one_challenge_a_connection(server: BackgroundServer) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as stranger:
        first = stranger.get("/v1/challenge", params={"nonce": "0" * 32})
        assert (first.status_code, first.headers.get("connection")) == (200, None)
        second = stranger.get("/v1/challenge", params={"nonce": "0" * 32})
        assert (second.status_code, second.headers.get("connection")) == (200, "close")
        assert first.json()["nonce"] != second.json()["nonce"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7400", 200),
        ("localhost", 200),
        ("[::1]:7400", 200),
        ("evil.example:7400", 421),
        ("[", 421),
        ("evil.example:80@127.0.0.1", 421),
        ("127.0.0.1%00.evil.example", 421),
    ],
)
def test_the_page_is_not_served_under_a_foreign_name(server: BackgroundServer, host: str, status: int) -> None:
    """A name of somebody else's that resolves to this machine (DNS rebinding)."""
    assert httpx.get(server.url, headers={"Host": host}, trust_env=False).status_code == status


def test_the_page_may_have_any_name_beyond_loopback(runtime: None) -> None:
    with BackgroundServer(ServerSettings(host="0.0.0.0", port=0, token=Secret(TOKEN))) as server:
        url = Address("http", "127.0.0.1", server.address.port).url
        assert httpx.get(url, headers={"Host": "head:7400"}, trust_env=False).status_code == 200
