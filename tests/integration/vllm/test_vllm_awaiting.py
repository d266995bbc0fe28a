"""A vLLM server that is started before its coordinator joins by itself when that is there. Neither vLLM nor a GPU is needed."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.server.service_support import free_port

from weightsync.config import Secret, ServerSettings
from weightsync.engines.vllm import patches
from weightsync.engines.vllm.awaiting import coordinator_answers
from weightsync.errors import ConfigurationError
from weightsync.server.server import BackgroundServer

TOKEN = "t" * 43


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    return port


def coordinator(port: int) -> BackgroundServer:
    return BackgroundServer(ServerSettings.load({}, port=port, token=Secret(TOKEN)))


async def test_an_engine_that_is_made_before_the_coordinator_joins_when_it_answers(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joined = asyncio.Event()

    async def attach(engine: object, name: str) -> None:
        joined.set()

    class Async:
        """What is looked at of vLLM's ``AsyncLLM``."""

        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="weightsync"))
            self._client_count = 1

    monkeypatch.setattr(patches, "attach_async", attach)
    patches._follow_async(Async)
    engine: Any = Async()
    await asyncio.sleep(1.2)
    assert not joined.is_set()
    server = coordinator(port)
    try:
        await asyncio.to_thread(server.__enter__)
        await asyncio.wait_for(joined.wait(), 30)
        await engine._weightsync
    finally:
        await asyncio.to_thread(server.stop)
    waits = [record for record in caplog.records if "cannot join the coordinator" in record.getMessage()]
    assert [record.levelno for record in waits] == [logging.WARNING], "once for each reason"


async def test_a_wrong_token_is_waited_out_and_named(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "x" * 43)
    server = coordinator(port)
    try:
        await asyncio.to_thread(server.__enter__)
        waiting = asyncio.ensure_future(coordinator_answers())
        done, _ = await asyncio.wait([waiting], timeout=3)
        assert not done
        assert any("the token is missing or wrong" in record.getMessage() for record in caplog.records)
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
        await asyncio.wait_for(waiting, 30)
    finally:
        await asyncio.to_thread(server.stop)


async def test_settings_that_can_never_work_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", "no url")
    with pytest.raises(ConfigurationError):
        await asyncio.wait_for(coordinator_answers(), 10)
