"""A store that takes connections and never answers: waits end in time, and what waited holds up no exit of its process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import Aborted
from weightsync.protocol.store_messages import StoreAddress
from weightsync.transports.store import StoreReader

SECONDS = 25.0  # a request to S3 is given up after minutes


@pytest.fixture
def silent() -> Iterator[tuple[socket.socket, Mapping[str, str]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        named = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "WEIGHTSYNC_STORE": "s3://bucket/prefix",
        }  # fmt: skip
        yield server, os.environ | named


OPENING = """
import logging
import sys
from weightsync.deadline import Deadline
from weightsync.errors import TransportUnavailable
from weightsync.protocol.store_messages import StoreAddress
from weightsync.transports.store import StoreReader

logging.basicConfig(stream=sys.stdout)
reader = StoreReader(StoreAddress("s3://bucket/prefix", "run", 1, 7, 0), bytes(32))
try:
    reader.prepare([], "digest", Deadline(0.5))
except TransportUnavailable as error:
    print(error)
"""
STARTING = """
import asyncio
from types import SimpleNamespace
from weightsync.server import store_key

store_key._SECONDS = 0.5
versions = SimpleNamespace(key=SimpleNamespace(public=bytes(32)), newest=None)
print(asyncio.run(store_key.adopt_newest("s3://bucket/prefix", "run", versions)), "within 0.5 s")
"""


@pytest.mark.parametrize("waiting", [OPENING, STARTING])
def test_a_process_ends_while_a_thread_of_it_waits_for_a_store(
    silent: tuple[socket.socket, Mapping[str, str]], waiting: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", waiting], env=silent[1], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert ("did not finish within 0.5 s" if waiting == OPENING else "it does not answer within 0.5 s") in done.stdout


def test_an_abort_ends_the_opening_of_a_store_that_does_not_answer(
    silent: tuple[socket.socket, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, environment = silent
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "WEIGHTSYNC_STORE"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    reader = StoreReader(StoreAddress("s3://bucket/prefix", "run", 1, 7, 0), bytes(32))
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(reader.prepare, [], "digest", Deadline(SECONDS))
        with server.accept()[0]:
            reader.abort()
            with pytest.raises(Aborted):
                preparing.result(SECONDS / 2)
    reader.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_relay_that_waits_for_a_store_and_leaves_nothing(
    silent: tuple[socket.socket, Mapping[str, str]], tmp_path: Path, number: signal.Signals
) -> None:
    server, environment = silent
    command = [sys.executable, "-m", "weightsync", "relay", "--run", "run", "--key", "A" * 43]
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "WEIGHTSYNC_PORT": "0", "WEIGHTSYNC_STATE_DIR": "off"}
    with subprocess.Popen(command, env={**environment, **own}, stdout=subprocess.PIPE, text=True) as process:
        try:
            with server.accept()[0]:
                assert list(tmp_path.rglob("*.token"))
                process.send_signal(number)
                assert process.wait(SECONDS) == 0
            assert process.stdout is not None and "relay stopped" in process.stdout.read()
            assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        finally:
            process.kill()


def test_ctrl_c_ends_a_command_that_waits_for_a_store(silent: tuple[socket.socket, Mapping[str, str]]) -> None:
    server, environment = silent
    command = "from weightsync.cli.main import main; main()"
    with subprocess.Popen([sys.executable, "-c", command, "store", "ls"], env=environment) as process:
        try:
            server.accept()[0].close()  # it asks again, and waits
            with server.accept()[0]:
                process.send_signal(signal.SIGINT)
                assert process.wait(SECONDS) == -signal.SIGINT
        finally:
            process.kill()
