"""The coordinator's HTTP face, by a real server on loopback: who gets in, what is answered, whole rounds over sockets."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.integration.server.service_support import MANIFEST, engine_hello, joined, trainer_hello

from weightsync.config import Address, ClientSettings, Limits, Secret, ServerSettings
from weightsync.coordinator.events import Event, Left, ReplicaEnded, RoundEnded, RoundStarted
from weightsync.coordinator.replicas import Replica
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    MembershipError,
    ProtocolError,
    StaleSource,
    WeightSyncError,
)
from weightsync.protocol.messages import Publish, Published
from weightsync.server import server as serving
from weightsync.server.app import OPERATIONS
from weightsync.server.client import Client
from weightsync.server.served import SERVED_PATH, Served
from weightsync.server.server import BackgroundServer, _has

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run", limits=Limits(event_streams=2, body_bytes=1000))) as server:
        yield server


@pytest.fixture
def http(server: BackgroundServer) -> Iterator[httpx.Client]:
    operator = server.secrets.operator
    assert operator is not None
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {operator.reveal()}"}, trust_env=False) as client:
        yield client


@pytest.fixture
def settings(server: BackgroundServer) -> ClientSettings:
    return ClientSettings(coordinator=server.address)


PRIVATE = [(operation.method, operation.path) for operation in OPERATIONS if not operation.public]


def test_no_route_answers_without_the_token(server: BackgroundServer) -> None:
    routes = [*PRIVATE, ("get", "/v1/nothing"), ("delete", "/v1/status"), ("get", f"/v1/status?token={server.token}")]
    wrong = ["", "wrong", "Bearer", f"Basic {server.token}", "Bearer wrong", f"Bearer {server.token}x"]
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for (method, path), header in itertools.product(routes, wrong):
            answer = client.request(method, path, headers={"Authorization": header} if header else {})
            check_denied(answer, path, server.token)


def check_denied(answer: httpx.Response, path: str, token: str) -> None:
    assert answer.status_code == 401, path
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["kind"] == "AuthenticationError"
    assert "WEIGHTSYNC_TOKEN" in answer.json()["message"]
    assert token not in answer.text


def test_two_tokens_are_no_token(server: BackgroundServer) -> None:
    headers = [("Authorization", f"Bearer {server.token}"), ("Authorization", "Bearer other")]
    assert httpx.get(server.url + "/v1/status", headers=headers, trust_env=False).status_code == 401


def test_health_and_page_need_no_token_and_tell_nothing(server: BackgroundServer) -> None:
    assert httpx.get(server.url + "/healthz", trust_env=False).json() == {"status": "ok"}
    page = httpx.get(server.url + "/", trust_env=False)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = page.text.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")  # where the chart library comes from
    text = re.sub(r'<link rel="icon" href="data:[^"]*">', "", text)  # the icon is in it
    assert not re.findall(r"(?:src|href)=|https?://|innerHTML", text), "the page must load nothing and insert text as text"
    assert "run" not in httpx.get(server.url + "/healthz", trust_env=False).json()


def test_status_of_a_new_coordinator(settings: ClientSettings) -> None:
    with Client(settings) as client:
        status = client.status()
    assert (status.run, status.last, status.version, status.busy, status.replicas) == ("run", -1, None, False, ())


def test_a_round_over_sockets_and_everything_that_shows_it(
    server: BackgroundServer, settings: ClientSettings, http: httpx.Client
) -> None:
    operator = server.secrets.operator
    with Client(settings, operator) as client, joined(settings, engine_hello("a")), joined(settings, trainer_hello()) as trainer:
        with client.events() as events:
            published = trainer.link.call(Publish(3), 20)
            assert isinstance(published, Published)
            assert published.result.ok
            assert published.result.nbytes == 16
            seen = until(events, RoundEnded)
        assert [type(event) for event in seen if isinstance(event, RoundStarted | ReplicaEnded)] == [RoundStarted, ReplicaEnded]
        with client.events() as events, joined(settings, engine_hello("b")):  # a late one is seeded by itself
            seeded = until(events, RoundEnded)[-1]
            assert isinstance(seeded, RoundEnded)
            assert seeded.result is not None
            assert seeded.result.ok
            status = client.status()
            assert {replica.name: (replica.state, replica.version) for replica in status.replicas} == {
                "a": ("loaded", 3),
                "b": ("loaded", 3),
            }
            again = client.start_round(["b"], timeout=10)
            assert [replica.name for replica in again.replicas] == ["b"]
            text = http.get("/metrics").text
        until_left = client.status()
        assert len(until_left.rounds) == 3
    assert 'weightsync_replica_state{replica="a",service="serving",state="loaded"} 1' in text
    assert 'weightsync_replica_version{replica="b"} 3' in text
    assert re.search(r'weightsync_received_bytes_total\{transport=""\} 48\b', text), "these agents send no spans"


def until(events: Iterator[Event], kind: type[Event]) -> list[Event]:
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        if isinstance(event, kind):
            return seen
    raise AssertionError(f"the events ended without {kind.__name__}")


def test_rounds_that_cannot_be_run_say_why(server: BackgroundServer, settings: ClientSettings, http: httpx.Client) -> None:
    with Client(settings, server.secrets.operator) as client:
        with pytest.raises(MembershipError, match="nobody"):
            client.start_round(["nobody"])
        with pytest.raises(MembershipError, match="nothing to update"):
            client.start_round()
        with joined(settings, engine_hello("a")), pytest.raises(StaleSource, match="no trainer is connected"):
            client.start_round(["a"], timeout=5)
    assert http.post("/v1/rounds", json={"replicas": ["nobody"]}).status_code == 404


BAD = [
    b"{",
    b"[]",
    b'{"replica": ["a"]}',
    b'{"replicas": "a"}',
    b'{"timeout": 0}',
    b'{"timeout": -1}',
    b'{"timeout": "1"}',
    b"\xff",
]


def test_bad_requests_are_refused(http: httpx.Client) -> None:
    for body in BAD:
        answer = http.post("/v1/rounds", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["kind"] == "ConfigurationError", body


def test_a_body_that_is_too_large_is_not_read(http: httpx.Client) -> None:
    answer = http.post("/v1/rounds", content=b" " * 5000)
    assert answer.status_code == 413
    assert answer.json()["kind"] == "RequestEntityTooLarge" or answer.json()["kind"] == "ContentTooLarge"


def test_unknown_routes_and_methods_are_problems(http: httpx.Client) -> None:
    assert (http.get("/v1/nothing").status_code, http.get("/v1/nothing").json()["kind"]) == (404, "NotFound")
    assert (http.delete("/v1/status").status_code, http.delete("/v1/status").json()["kind"]) == (405, "MethodNotAllowed")


def test_what_is_served_is_waited_for(server: BackgroundServer, settings: ClientSettings, http: httpx.Client) -> None:
    for query in ("timeout=0", "timeout=x", "timeout=86401", "other=1", f"timeout={'0' * 19}1{'0' * 400}"):
        assert http.get(f"{SERVED_PATH}?{query}").status_code == 400
    late = http.get(f"{SERVED_PATH}?timeout=1")
    assert (late.status_code, late.json()["kind"]) == (504, "DeadlineExceeded")
    with Client(settings) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.served, 20)
        with joined(settings, engine_hello("a")):
            assert waiting.result(20) == Served("a", MANIFEST.tensors)


def test_a_wait_for_what_is_served_ends_with_its_client(server: BackgroundServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    waits = server.coordinator.attendance
    before, ended = waits.whole, threading.Semaphore(0)

    async def whole(timeout: float) -> Replica:
        try:
            return await before(timeout)
        finally:
            ended.release()

    waits.whole = whole  # type: ignore[method-assign]
    for _ in range(20):
        with socket.create_connection((host, int(port))) as client:
            head = f"GET {SERVED_PATH}?timeout=86400 HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.token}\r\n\r\n"
            client.sendall(head.encode())
            time.sleep(0.02)
    assert all(ended.acquire(timeout=10) for _ in range(20))


def test_a_wait_for_what_is_served_ends_with_the_coordinator(settings: ClientSettings, server: BackgroundServer) -> None:
    with Client(settings) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.served, 60)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        begun = time.monotonic()
        server.stop()
        with pytest.raises(WeightSyncError):
            waiting.result(10)
        assert time.monotonic() - begun < 10


def test_readers_of_events_are_counted(server: BackgroundServer, settings: ClientSettings, http: httpx.Client) -> None:
    with Client(settings) as one, Client(settings) as two:
        with one.events(), two.events():
            assert http.get("/v1/events").status_code == 503
        with joined(settings, engine_hello("a")), one.events() as events:
            pass  # a place is free again: the others have left
        del events


def test_events_end_with_the_coordinator(settings: ClientSettings, server: BackgroundServer) -> None:
    with Client(settings) as client, client.events() as events:
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert list(events) == []
        stopping.join(10)


def test_the_description_is_complete(http: httpx.Client) -> None:
    found = http.get("/v1/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    described = {(method, path) for path, methods in found["paths"].items() for method in methods}
    assert described == {(operation.method, operation.path) for operation in OPERATIONS}
    for method, path in described:
        named = "{" in path  # there is nothing of that name, so only the method can be told to be right
        with http.stream(method, path.replace("{", "").replace("}", "")) as answer:  # some never end
            assert (
                answer.status_code not in (404, 405) or path in ("/v1/rounds", "/v1/trace") or (named and answer.status_code == 404)
            ), path
    references = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(found)))
    assert references <= set(found["components"]["schemas"])
    assert {"Status", "RoundResult", "Problem", "RoundRequest", "RoundEnded"} <= set(found["components"]["schemas"])
    for path, methods in found["paths"].items():
        public = any(operation.path == path and operation.public for operation in OPERATIONS)
        for operation in methods.values():
            assert ("401" in operation["responses"]) is not public


def test_a_wrong_token_is_an_authentication_error(server: BackgroundServer) -> None:
    with Client(ClientSettings(coordinator=server.address, token=Secret("wrong"))) as client, pytest.raises(AuthenticationError):
        client.status()
    wrong = ClientSettings(coordinator=server.address, token=Secret("wrong"))
    with Client(wrong) as client, pytest.raises(AuthenticationError), client.events():
        pass


def test_nobody_there_names_the_address_and_what_to_check() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("http", "127.0.0.1", probe.getsockname()[1])
        with (
            Client(ClientSettings(coordinator=address)) as client,
            pytest.raises(CoordinatorUnreachable, match=re.escape(address.url)) as caught,
        ):
            client.status()
    assert "weightsync serve" in str(caught.value)


def test_something_else_that_answers_is_not_taken_for_a_coordinator(server: BackgroundServer) -> None:
    class Other(Client):
        def _request(self, kind: Any, method: str, path: str, *rest: Any) -> Any:
            return super()._request(kind, "GET", "/healthz", *rest)

    with Other(ClientSettings(coordinator=server.address)) as client, pytest.raises(ProtocolError, match="Status"):
        client.status()


def test_the_token_file_goes_with_the_server(server: BackgroundServer, tmp_path: Path) -> None:
    path = tmp_path / "weightsync" / f"{server.address.port}.token"
    assert path.read_text() == server.token
    server.stop()
    assert not path.exists()


def test_a_port_in_use_is_a_clear_error(server: BackgroundServer) -> None:
    with pytest.raises(ConfigurationError, match=f"port {server.address.port}"):
        BackgroundServer(ServerSettings(port=server.address.port)).start()


GIVEN = Secret("given-on-purpose-0123456789abcdef")
needs_ipv6 = pytest.mark.skipif(not _has("::1"), reason="this machine has no ::1")


@needs_ipv6
def test_nobody_else_can_listen_where_localhost_may_lead(server: BackgroundServer) -> None:
    """Another user's program on [::1] passed everything on between agents of ``http://localhost`` and the coordinator."""
    port = server.address.port
    for host, family in (("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET)):
        with pytest.raises(OSError, match="in use"), socket.create_server((host, port), family=family):
            pass
        own = Address("http", host, port).url
        assert httpx.get(f"{own}/healthz", trust_env=False).json() == {"status": "ok"}
    assert Address.parse(f"http://localhost:{port}") == server.address
    assert Address.parse("https://localhost:7400").host == "localhost", "certificates have names"
    with BackgroundServer(ServerSettings(host="localhost", port=0)) as other:
        assert other.address.host == "127.0.0.1"


@needs_ipv6
def test_a_coordinator_does_not_start_where_another_program_could_stand_in_between() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as squatter:
        port = squatter.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1 and ::1, and cannot listen on ::1 port {port}"):
            BackgroundServer(ServerSettings(port=port)).start()
        with socket.create_server(("127.0.0.1", port)):
            pass  # nothing was left behind


def test_a_machine_without_ipv6_has_one_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_has", lambda host: False)
    with BackgroundServer(ServerSettings(port=0)) as server, pytest.raises(httpx.ConnectError):
        httpx.get(f"http://[::1]:{server.address.port}/healthz", trust_env=False)


def test_a_public_address_without_a_token_refuses_to_start() -> None:
    with pytest.raises(ConfigurationError, match="refusing to listen"):
        BackgroundServer(ServerSettings(host="0.0.0.0", port=0)).start()
    with BackgroundServer(ServerSettings(host="0.0.0.0", port=0, token=GIVEN)) as server:
        local = Address("http", "127.0.0.1", server.address.port)
        with Client(ClientSettings(coordinator=local, token=GIVEN)) as client:
            assert client.status().last == -1


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    with pytest.raises(ConfigurationError, match=r"rubbish\.pem"):
        BackgroundServer(ServerSettings(port=0, tls_certificate=rubbish, tls_key=rubbish)).start()


def test_left_events_carry_the_reason(settings: ClientSettings) -> None:
    with Client(settings) as client, client.events() as events:
        with joined(settings, engine_hello("a")):
            pass
        left = until(events, Left)[-1]
    assert isinstance(left, Left)
    assert (left.member, left.reason) == ("a/0", "its process closed it")
    assert msgspec.json.decode(msgspec.json.encode(left), type=Event) == left
