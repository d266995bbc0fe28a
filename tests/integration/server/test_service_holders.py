"""What a holder of the token cannot do: take the coordinator's memory or loop with little, forge its log, write on terminals."""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import numpy as np
import pytest
from tests.integration.server.service_support import Agent, RawAgent, engine_hello, fast, joined, obey, trainer_hello

from weightsync.config import ClientSettings, ServerSettings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.errors import LoadError, ProtocolError, WeightSyncError
from weightsync.model import Layout, Manifest, TensorSpec, Version
from weightsync.model.layout import LayoutColumns
from weightsync.protocol.messages import (
    Answer,
    Body,
    Call,
    Done,
    Failure,
    Hello,
    Host,
    Prepare,
    Prepared,
    Publish,
    Published,
    Refused,
    RoundResult,
    Update,
    Welcome,
    decode,
)
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")


@pytest.fixture
def server(runtime: None) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run", heartbeat=5.0)) as server:
        yield server


@contextmanager
def written() -> Iterator[io.StringIO]:
    """The coordinator's log, as a plain handler writes it."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root = logging.getLogger("weightsync")
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield log
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def greet(server: BackgroundServer, hello: Hello) -> tuple[RawAgent, Welcome | Refused]:
    raw = RawAgent(server.address, server.token)
    raw.say(hello)
    answer = decode(raw.hear()[1])
    assert isinstance(answer, Welcome | Refused)
    return raw, answer


def changed(hello: Hello, **fields: object) -> Hello:
    return msgspec.structs.replace(hello, **fields)


def publish(trainer: Agent, number: int) -> RoundResult:
    answer = trainer.link.call(Publish(number), 30)
    assert isinstance(answer, Published)
    return answer.result


def strips(count: int, dim: int) -> tuple[Manifest, LayoutColumns]:
    manifest = Manifest([TensorSpec("w", (count, count), "int8")])
    starts, stops = np.zeros((count, 2), np.int64), np.full((count, 2), count, np.int64)
    starts[:, dim], stops[:, dim] = np.arange(count), np.arange(count) + 1
    zeros, strides = np.zeros(count, np.int32), np.tile(np.array([count, 1], np.int64), (count, 1))
    layout = Layout(manifest, zeros, starts, stops, zeros, np.zeros(count, np.int64), strides, (count * count,))
    return manifest, layout.to_columns()


def test_two_small_hellos_make_no_large_plan(server: BackgroundServer) -> None:
    manifest, rows = strips(6000, 0)
    _, columns = strips(6000, 1)
    bomb = changed(engine_hello("bomb"), manifest=manifest.tensors, layout=columns, delivery="direct")
    source = changed(trainer_hello(), manifest=manifest.tensors, layout=rows)

    def place(body: Body, timeout: float) -> Body:
        answer = obey(body, timeout)
        return msgspec.structs.replace(answer, digests=bytes(8 * 6000)) if type(answer).__name__ == "Placed" else answer

    began = time.monotonic()
    with joined(fast(server.address), bomb), joined(fast(server.address), source, place) as trainer:
        result = publish(trainer, 1)
    assert not result.ok
    assert "LayoutError: the plan for bomb/0 alone has more than" in (result.error or "")
    assert time.monotonic() - began < 10


def test_ranks_that_do_not_exist_cost_nothing(server: BackgroundServer) -> None:
    with Client(ClientSettings(coordinator=server.address)) as client, ExitStack() as held:
        raw, answer = greet(server, changed(engine_hello("too-many"), world_size=65536))
        held.enter_context(raw)
        assert isinstance(answer, Refused)
        assert "at most 4,096 ranks are allowed" in answer.message
        before = len(msgspec.json.encode(client.status()))
        for number in range(64):
            raw, answer = greet(server, changed(engine_hello(f"e{number}"), world_size=4096))
            held.enter_context(raw)
            assert isinstance(answer, Welcome)
        status = client.status()
        assert status.replicas[0].missing == tuple(range(1, 17))
        assert len(msgspec.json.encode(status)) - before < 64 * 600
        held.close()
        ends = time.monotonic() + 10
        while client.status().replicas and time.monotonic() < ends:
            threading.Event().wait(0.02)
        assert not client.status().replicas, "replicas that never were complete are remembered"


def test_metrics_take_no_status(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setattr(Coordinator, "status", lambda self: 1 / 0)
    headers = {"Authorization": f"Bearer {server.token}"}
    with joined(fast(server.address), engine_hello("a")), httpx.Client(headers=headers, trust_env=False) as http:
        answer = http.get(server.url + "/metrics")
        assert answer.status_code == 200
        assert 'replica="a"' in answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapter": "\x1b]0;OWNED\x07\x1b[2Jx"}, "not printable"),
        ({"host": Host("h\n2026-01-01 INFO round 9: forged\x1b[31m", "m")}, "not printable"),
        ({"host": Host("h", "m\r\nforged")}, "not printable"),
        ({"transports": ("tcp\x1b[31m",)}, "not printable"),
        ({"serving": Version("run", 1, "0" * 32, "[/nope]")}, "hexadecimal"),
        ({"serving": Version("run\nforged", 1, "0" * 32, "0" * 16)}, "a malformed version"),
        ({"adapter": "x" * 201}, "length <= 200"),
        ({"host": Host("h" * 1_000_000, "m")}, "length <= 200"),
        ({"session": "s\nforged"}, "printable"),
    ],
)
def test_who_describes_itself_by_more_than_words_does_not_get_in(
    server: BackgroundServer, fields: dict[str, object], words: str
) -> None:
    with written() as log:
        raw, answer = greet(server, changed(engine_hello("evil"), **fields))
        with raw:
            assert isinstance(answer, Refused)
            assert words in answer.message
            assert answer.kind == ProtocolError.__name__
    assert "\x1b" not in log.getvalue()
    assert "\nforged" not in log.getvalue()
    assert len(log.getvalue()) < 2000


EVIL = "\x1b]0;OWNED\x07\x1b[2J\r\nforged\n2026 INFO forged " + "A" * 5_000_000


def test_what_an_engine_says_of_its_failure_is_cut_and_cannot_be_taken_for_the_log(server: BackgroundServer) -> None:
    def fail(body: Body, timeout: float) -> Body:
        if isinstance(body, Update):
            raise LoadError(EVIL)
        return obey(body, timeout)

    with written() as log, Client(ClientSettings(coordinator=server.address)) as client:
        with joined(fast(server.address), engine_hello("evil"), fail), joined(fast(server.address), trainer_hello()) as trainer:
            for number in range(1, 4):
                result = publish(trainer, number)
                assert not result.ok
                assert "LoadError" in (result.error or "")
            assert len(msgspec.json.encode(client.status())) < 64 << 10
        said = [result.error or "", *(one.error or "" for one in result.replicas), log.getvalue()]
    for text in said:
        assert "\x1b" not in text
        assert "\r" not in text
        assert not [line for line in text.splitlines() if line.startswith(("forged", "2026"))]
        assert len(text) < 20_000


@contextmanager
def raw_answers(server: BackgroundServer, name: str, answer: Callable[[Body], Body | Failure]) -> Iterator[None]:
    """An agent that answers with what no agent of ours would send."""
    raw, welcome = greet(server, engine_hello(name))
    assert isinstance(welcome, Welcome)

    def serve() -> None:
        with raw:
            while True:
                try:
                    opcode, data = raw.hear()
                except (EOFError, OSError):
                    return
                if opcode == 8:
                    return
                if opcode != 2:
                    continue
                frame = decode(data)
                if isinstance(frame, Call):
                    said = answer(frame.body)
                    raw.say(Failure(frame.id, said.kind, said.message) if isinstance(said, Failure) else Answer(frame.id, said))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError):
            raw.socket.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda body: Failure(0, "LoadError", EVIL), "broke the protocol"),
        (lambda body: Failure(0, "LoadError", EVIL[:4000]), "OWNED"),
        (lambda body: Failure(0, "\x1b[31m\nforged", "why"), "why"),
        (lambda body: Prepared(body.plan.digest, ("[/boom]\x1b[31m",)) if isinstance(body, Prepare) else Done(), "not printable"),
        (lambda body: Prepared("x" * 1_000_000, ()) if isinstance(body, Prepare) else Done(), "broke the protocol"),
        (lambda body: Prepared("\x1b\nforged", ("none",)) if isinstance(body, Prepare) else Done(), "not printable"),
    ],
)
def test_a_forged_answer_is_as_harmless(server: BackgroundServer, answer: Callable[[Body], Body | Failure], words: str) -> None:
    with written() as log, joined(fast(server.address), trainer_hello()) as trainer, raw_answers(server, "evil", answer):
        result = publish(trainer, 1)
    assert not result.ok
    for text in (result.error or "", log.getvalue()):
        assert "\x1b" not in text
        assert not [line for line in text.splitlines() if line.startswith("forged")]
        assert len(text) < 20_000
    assert words in (result.error or "")


def test_errors_of_our_own_keep_their_lines() -> None:
    from weightsync.errors import from_wire, readable

    text = "2 differences:\n  missing: a\n  missing: b"
    assert str(from_wire("ManifestMismatch", text)) == text
    assert readable("a\nb\tc\u2028d\x85e") == "a\n  b\\tc\\u2028d\\x85e"
    assert len(readable("\x1b" * 100_000)) <= 4096
    assert readable(readable("x" * 9999)) == readable("x" * 9999)
    assert isinstance(from_wire("no such class", "x" * 9999), WeightSyncError)
