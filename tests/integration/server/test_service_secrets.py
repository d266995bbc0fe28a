"""Tokens and keys never show: not in logs at any level, tracebacks, ``repr``, command lines; a refusal makes no noise."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Iterator

import httpx
import pytest
import torch
from tests.integration.server.service_support import RawAgent, engine_hello, joined, trainer_hello
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.config import ClientSettings, Secret, ServerSettings, agent_environment
from weightsync.errors import Aborted, AuthenticationError, ConfigurationError
from weightsync.protocol.messages import Publish, Welcome, encode
from weightsync.publishing.publication import ReaderAccess
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.host.inproc import InProcess
from weightsync.transports.host.shared_memory import SharedMemory
from weightsync.transports.hostinfo import this_host
from weightsync.transports.tcp.transport import Tcp

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

LOUD = ("", "uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "weightsync", "httpx", "httpcore", "asyncio")
KEY = b"key-of-the-data-sockets-32-bytes"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that anybody logs, at the lowest level that there is, as a careless embedder would have it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    before = {name: logging.getLogger(name).level for name in LOUD}
    logging.getLogger().addHandler(handler)
    for name in LOUD:
        logging.getLogger(name).setLevel(1)
    yield written
    logging.getLogger().removeHandler(handler)
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def loud_server(log: io.StringIO) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=0.3)) as server:
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(1)  # after uvicorn has set its own
        yield server


def test_neither_token_nor_key_is_in_any_log(loud_server: BackgroundServer, log: io.StringIO) -> None:
    server = loud_server
    settings = ClientSettings(coordinator=server.address)
    trainer = trainer_hello(key=KEY)
    with joined(settings, engine_hello("a")), joined(settings, trainer) as agent, Client(settings) as client:
        agent.link.call(Publish(1), 20)
        client.status()
    with RawAgent(server.address, server.token) as raw:  # as seen by the server: our own client logs nothing about it
        raw.say(encode(trainer))
        assert isinstance(raw.frame(), Welcome)
    server.stop()
    said = log.getvalue()
    assert "joined" in said, "nothing was logged at all: this test would hold nothing"
    assert server.token not in said
    assert KEY.decode() not in said
    assert KEY.hex() not in said


def test_a_wrong_token_makes_no_noise(loud_server: BackgroundServer, log: io.StringIO) -> None:
    for _ in range(3):
        with RawAgent(loud_server.address, "wrong-token-of-a-stranger") as raw:
            assert raw.head.startswith(b"HTTP/1.1 401")
        with httpx.Client(trust_env=False) as client:
            headers = {"Authorization": "Bearer wrong-token-of-a-stranger"}
            assert client.get(f"{loud_server.url}/v1/status", headers=headers).status_code == 401
    loud_server.stop()
    said = [line for line in log.getvalue().splitlines() if "completing handshake" in line or "Traceback" in line]
    assert not said
    assert "wrong-token-of-a-stranger" not in log.getvalue()


def test_no_value_that_holds_a_secret_shows_it() -> None:
    secret = Secret("do-not-show-me")
    holders = [
        secret,
        ServerSettings(token=secret),
        ClientSettings(token=secret),
        trainer_hello(key=KEY),
        [secret],
        {"token": secret},
    ]
    for holder in holders:
        for text in (repr(holder), str(holder), f"{holder}"):
            assert "do-not-show-me" not in text
            assert KEY.decode() not in text


def test_nothing_that_a_traceback_with_variables_would_show_holds_a_key() -> None:
    role = TrainerRole({"w": torch.zeros(4)}, ReaderAccess([Tcp(), SharedMemory(), InProcess()], KEY, this_host()))
    try:
        listeners = [getattr(publisher, "_listener", publisher) for publisher in role._publishers]
        shown = [repr(vars(holder)) for holder in (role, *role._publishers, *listeners)]
        assert not any(KEY.decode() in text for text in shown)
        assert role.key == KEY
    finally:
        role.close()


def test_errors_about_tokens_do_not_hold_them(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ClientSettings(coordinator=server.address, token=Secret("do-not-show-me"))
    with Client(wrong) as client, pytest.raises(AuthenticationError) as caught:
        client.status()
    assert "do-not-show-me" not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "do not show me")  # spaces: no token
    with pytest.raises(ConfigurationError) as refused:
        ClientSettings.load()
    assert "show me" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("command", ["serve", "status", "update", "push"])
def test_a_token_on_the_command_line_is_refused_and_not_repeated(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--token", "do-not-show-me"])
    assert done.exit_code == 2
    assert "do-not-show-me" not in done.output
    assert command == "update" or "--token-file" in done.output  # the nearest option; an update takes the operator's
    done = CliRunner().invoke(app, [command, "--token=do-not-show-me"])
    assert done.exit_code == 2
    assert "do-not-show-me" not in done.output


def test_children_get_the_token_by_the_environment_alone() -> None:
    assert agent_environment(ClientSettings(token=Secret("given")))["WEIGHTSYNC_TOKEN"] == "given"


def test_a_trainer_that_cannot_publish_says_what_to_do(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer({"w": torch.zeros(2, 2)}, server.url, transports=["inproc"])
    try:
        for timeout in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="give the seconds that it may take"):
                trainer.publish(1, timeout=timeout)
    finally:
        trainer.close()
    for publish in (trainer.publish, trainer.publish_async):
        with pytest.raises(Aborted, match="make a new Trainer"):
            publish(2)
