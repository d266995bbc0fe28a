"""Operators' actions need a secret that no worker holds: a stolen worker, who has the token, can send nobody away."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.integration.server.service_support import RawAgent, engine_hello, fast, free_port, joined, trainer_hello
from tests.integration.server.test_service_theft import Squatter, http
from typer.testing import CliRunner

import weightsync
from weightsync.cli.main import app
from weightsync.config import Address, ClientSettings, Secret, ServerSettings, worker_environment
from weightsync.errors import AuthenticationError, ConfigurationError
from weightsync.protocol.messages import Refused, decode
from weightsync.protocol.tokens import bearer, generate, operator_secret
from weightsync.server.app import OPERATIONS
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")

BODIES = {"/v1/revocations": b'{"member": "trainer/0"}', "/v1/rounds": b"{}"}


@pytest.fixture
def public() -> Iterator[BackgroundServer]:
    """A coordinator beyond loopback that was given a token and no operator's."""
    with BackgroundServer(ServerSettings(host="0.0.0.0", port=0, token=generate())) as server:
        yield server


def here(server: BackgroundServer) -> Address:
    return Address("http", "127.0.0.1", server.address.port)


def test_a_stolen_worker_cannot_replace_the_live_trainer(server: BackgroundServer) -> None:
    """It sent the trainer away with its token, joined in its place, and the honest engine served its weights."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
    options: dict[str, Any] = {"coordinator": server.url, "token": server.token}
    with (
        weightsync.Trainer({"w": torch.ones(8)}, **options) as trainer,
        weightsync.Engine(weightsync.ModuleAdapter(model), "honest", **options),
        httpx.Client(base_url=server.url, headers=bearer(Secret(server.token)), trust_env=False) as thief,
    ):
        trainer.publish(1, timeout=20)
        for member in ("trainer/0", "honest/0"):
            refused = thief.post("/v1/revocations", json={"member": member})
            assert (refused.status_code, refused.json()["kind"]) == (403, "AuthenticationError")
            assert "WEIGHTSYNC_OPERATOR_TOKEN" in refused.json()["message"]
        assert thief.post("/v1/rounds", json={}).status_code == 403
        with RawAgent(server.address, server.token) as stolen:
            stolen.say(trainer_hello(session="stolen"))
            assert isinstance(decode(stolen.hear()[1]), Refused)
        assert trainer.publish(2, timeout=20).ok
        assert model.w.tolist() == [1.0] * 8


def test_every_action_says_whether_it_is_an_operators(server: BackgroundServer) -> None:
    """A route that is added with another method than GET is for operators, or this test says why it is not."""
    changing = {(operation.path, operation.operator) for operation in OPERATIONS if operation.method != "get"}
    assert changing == {(path, True) for path in BODIES}
    assert not [operation.path for operation in OPERATIONS if operation.method == "get" and operation.operator]
    for secret, status in ((server.secrets.token, 403), (server.secrets.metrics, 403), (generate(), 401), (None, 401)):
        for path, body in BODIES.items():
            for spelled in (path, path.replace("r", "%72"), f"{path}?x=1"):
                answer = httpx.post(server.url + spelled, content=body, headers=bearer(secret), trust_env=False)
                assert answer.status_code == status, (spelled, secret)


def test_the_operators_secret_is_proved_and_admits_to_the_rest(server: BackgroundServer, tmp_path: Path) -> None:
    settings = fast(server.address)
    operator = operator_secret(settings)  # as another process of this user finds it
    path = tmp_path / "weightsync" / f"{server.address.port}.operator"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert operator == server.secrets.operator != server.secrets.token
    (tmp_path / "weightsync" / f"{server.address.port}.token").unlink()
    with Client(settings) as client:  # one secret is enough for the command line
        assert client.status().run == "run"
    with joined(fast(server.address, Secret(server.token)), engine_hello("a")), Client(settings, operator) as client:
        assert client.revoke("a/0").member == "a/0"
    server.stop()
    assert not path.exists()


def test_the_operators_secret_is_not_sent_to_a_squatter() -> None:
    port, operator = free_port(), generate()
    with Squatter(port, http("200 OK", b'{"nonce": "%s", "proof": "%s"}' % (b"0" * 96, b"0" * 64))) as squatter:
        with (
            Client(fast(Address("http", "127.0.0.1", port)), operator) as client,
            pytest.raises(AuthenticationError, match="operator's"),
        ):
            client.revoke("trainer/0")
        assert operator.reveal().encode() not in squatter.heard
        assert b"POST" not in squatter.heard


def test_without_an_operators_secret_beyond_loopback_operators_are_refused(
    public: BackgroundServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (tmp_path / "weightsync").exists(), "nothing was generated"
    settings = ClientSettings(coordinator=here(public), token=public.secrets.token)
    with pytest.raises(AuthenticationError, match="WEIGHTSYNC_OPERATOR_TOKEN_FILE"):
        operator_secret(settings)
    with Client(settings, generate()) as client, pytest.raises(AuthenticationError, match="has no operator's token"):
        client.revoke("trainer/0")
    answer = httpx.post(here(public).url + "/v1/rounds", headers=bearer(public.secrets.token), trust_env=False)
    assert (answer.status_code, "start it with WEIGHTSYNC_OPERATOR_TOKEN" in answer.json()["message"]) == (403, True)
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", public.token)
    for command in (["round"], ["revoke", "trainer/0"]):
        done = CliRunner().invoke(app, [*command, "-c", here(public).url])
        assert (done.exit_code != 0, "WEIGHTSYNC_OPERATOR_TOKEN" in str(done.exception) + done.output) == (True, True)


def test_a_given_operators_secret_works_beyond_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = {"WEIGHTSYNC_TOKEN": generate().reveal(), "WEIGHTSYNC_OPERATOR_TOKEN_FILE": str(tmp_path / "operator")}
    (tmp_path / "operator").write_text(generate().reveal() + "\n")
    with BackgroundServer(ServerSettings.load(secrets, host="0.0.0.0", port=0, state_dir="off")) as server:
        with joined(fast(here(server), server.secrets.token), engine_hello("a")):
            done = CliRunner().invoke(
                app, ["revoke", "a/0", "-c", here(server).url, "--operator-token-file", str(tmp_path / "operator")]
            )
        assert done.exit_code == 0, done.output


def test_the_metrics_token_admits_to_the_metrics_only(server: BackgroundServer) -> None:
    with httpx.Client(base_url=server.url, headers=bearer(server.secrets.metrics), trust_env=False) as prometheus:
        assert prometheus.get("/metrics").status_code == 200
        for path in ("/v1/status", "/v1/events", "/v1/rounds", "/v1/trace", "/v1/openapi.json", "/v1/nothing"):
            assert prometheus.get(path).status_code == 403, path
    metrics = server.secrets.metrics
    assert metrics is not None
    with RawAgent(server.address, metrics.reveal()) as agent:
        assert agent.head.startswith(b"HTTP/1.1 403")


def test_two_kinds_of_secret_are_never_the_same() -> None:
    secret = generate()
    with pytest.raises(ConfigurationError, match="the same secret"):
        ServerSettings(token=secret, operator_token=secret)


def test_the_environment_of_workers_has_no_operators_secret() -> None:
    given = {"WEIGHTSYNC_TOKEN": "a", "WEIGHTSYNC_OPERATOR_TOKEN": "b", "WEIGHTSYNC_OPERATOR_TOKEN_FILE": "c", "PATH": "d"}
    assert worker_environment(given) == {"WEIGHTSYNC_TOKEN": "a", "PATH": "d"}
