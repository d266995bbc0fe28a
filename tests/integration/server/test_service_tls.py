"""TLS of the coordinator with certificates made on the spot: who is believed, by agents, by the client, on the command line."""

from __future__ import annotations

import re
import signal
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.integration.server.service_support import Agent, engine_hello, joined
from tests.processes import ChildProcess
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.config import Address, ClientSettings, Secret, ServerSettings, Timeouts
from weightsync.errors import AuthenticationError, ConfigurationError, CoordinatorUnreachable
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

trustme = pytest.importorskip("trustme", reason="needs trustme: pip install '.[test]'")
pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")


class Files(NamedTuple):
    certificate: Path
    key: Path
    authority: Path
    stranger: Path
    """Another authority, which signed nothing here."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    found = Files(folder / "cert.pem", folder / "key.pem", folder / "ca.pem", folder / "other.pem")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    found.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(found.key)
    authority.cert_pem.write_to_path(found.authority)
    trustme.CA().cert_pem.write_to_path(found.stranger)
    return found


@pytest.fixture
def tls(runtime: None, files: Files) -> ServerSettings:
    return ServerSettings(port=0, run="run", heartbeat=0.3, tls_certificate=files.certificate, tls_key=files.key)


def test_agents_and_clients_talk_over_tls(tls: ServerSettings, files: Files) -> None:
    with BackgroundServer(tls) as server:
        assert server.url.startswith("https://")
        trusting = ClientSettings(coordinator=server.address, ca_file=files.authority)
        with joined(trusting, engine_hello("a")), Client(trusting) as client:
            assert [replica.name for replica in client.status().replicas] == ["a"]


@pytest.mark.parametrize("authority", ["none", "stranger"])
def test_a_certificate_that_is_not_trusted_gets_no_token(tls: ServerSettings, files: Files, authority: str) -> None:
    with BackgroundServer(tls) as server:
        wrong = ClientSettings(
            coordinator=server.address,
            ca_file=files.stranger if authority == "stranger" else None,
            token=Secret(server.token),
            timeouts=Timeouts(connect=3.0),
        )
        agent = Agent(wrong, engine_hello)
        with pytest.raises(AuthenticationError, match="WEIGHTSYNC_CA_FILE"):
            agent.link.connect()
        with Client(wrong) as client, pytest.raises((AuthenticationError, CoordinatorUnreachable), match="certificate"):
            client.status()


def test_a_certificate_of_another_host_is_not_believed(tls: ServerSettings, files: Files) -> None:
    with BackgroundServer(tls) as server, socket.create_connection(("127.0.0.1", server.address.port), timeout=5) as raw:
        context = ssl.create_default_context(cafile=files.authority)
        with pytest.raises(ssl.SSLCertVerificationError, match="ostname"):
            context.wrap_socket(raw, server_hostname="head.example")


def test_plain_http_and_old_tls_are_not_spoken(tls: ServerSettings, files: Files) -> None:
    with BackgroundServer(tls) as server:
        plain = ClientSettings(
            coordinator=Address("http", "127.0.0.1", server.address.port), timeouts=Timeouts(connect=0.5), token=Secret("x")
        )
        agent = Agent(plain, engine_hello)
        with pytest.raises((CoordinatorUnreachable, ConfigurationError)):
            agent.link.connect()
        context = ssl.create_default_context(cafile=files.authority)
        with pytest.warns(DeprecationWarning):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", server.address.port), timeout=5) as raw, pytest.raises(ssl.SSLError):
            context.wrap_socket(raw, server_hostname="127.0.0.1")


def test_the_command_line_serves_and_asks_over_tls(files: Files) -> None:
    command = ("-m", "weightsync", "serve", "--port", 0, "--tls-cert", files.certificate, "--tls-key", files.key)
    with ChildProcess(*command) as child:
        address = re.search(r"https://\S+", child.line())
        assert address
        asked = CliRunner().invoke(app, ["status", "-c", address.group(), "--ca-file", str(files.authority), "--json"])
        assert asked.exit_code == 0, asked.output
        refused = CliRunner().invoke(app, ["status", "-c", address.group(), "--json"])
        assert refused.exit_code != 0
        assert "certificate" in refused.output
        child.send_signal(signal.SIGTERM)
        child.exit_code(15)


@pytest.mark.parametrize("given", [["--tls-cert", "CERT"], ["--tls-key", "KEY"], ["--tls-cert", "missing.pem", "--tls-key", "KEY"]])
def test_half_of_it_is_a_clear_error(files: Files, given: list[str]) -> None:
    arguments = [{"CERT": str(files.certificate), "KEY": str(files.key)}.get(one, one) for one in given]
    done = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert done.exit_code == 2
    assert re.search("both a certificate and a key|: No such file", done.stderr)


def test_an_open_address_without_tls_says_that_nothing_is_encrypted(runtime: None) -> None:
    token = "given-on-purpose-0123456789abcdef"
    command = ("-m", "weightsync", "serve", "--port", 0, "--host", "0.0.0.0")
    with ChildProcess(*command, environment={"WEIGHTSYNC_TOKEN": token}) as child:
        lines = child.line() + child.line()
        child.send_signal(signal.SIGTERM)
        child.exit_code(15)
    assert "not encrypted" in lines
    assert "--tls-cert" in lines
    assert token not in child.printed
