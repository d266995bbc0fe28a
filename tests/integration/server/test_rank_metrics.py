"""Metrics of trainer and engine processes: off by default, on loopback, only with the token, and gone with the last rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

import weightsync
from weightsync.config import ServerSettings
from weightsync.errors import ConfigurationError
from weightsync.server.agent_metrics import AGENT_METRICS, agent_metrics
from weightsync.server.server import BackgroundServer


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        yield server


def test_a_process_serves_the_metrics_of_its_ranks(
    no_leaks: None, server: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"coordinator": server.url, "token": server.token}
    monkeypatch.setenv("WEIGHTSYNC_METRICS_PORT", "0")
    with weightsync.Trainer(torch.nn.Linear(64, 64), **options) as trainer:
        port = agent_metrics.port
        adapter = weightsync.ModuleAdapter(torch.nn.Linear(64, 64))
        with weightsync.Engine(adapter, "r", **options):
            assert agent_metrics.port == port, "one server for all ranks of a process"
            trainer.publish(7)
            url = f"http://127.0.0.1:{port}/metrics"
            with httpx.Client(trust_env=False) as http:
                assert http.get(url).status_code == 401
                assert http.get(url, headers={"Authorization": "Bearer wrong"}).status_code == 401
                text = http.get(url, headers={"Authorization": f"Bearer {server.token}"}).text
    assert agent_metrics.port is None
    for line in (
        'weightsync_rank_connected{rank="r/0"} 1.0',
        'weightsync_rank_version{rank="r/0"} 7.0',
        'weightsync_rank_version{rank="trainer/0"} 7.0',
        'weightsync_rank_calls_total{call="Place",outcome="ok",rank="trainer/0"} 1.0',
        'weightsync_rank_phase_seconds_count{phase="flush",rank="r/0"} 1.0',
        'weightsync_rank_read_bytes_total{rank="r/0",transport="inproc"} 16640.0',
    ):
        assert line in text
    assert [name for name in (m.name for m in AGENT_METRICS) if f"# TYPE weightsync_{name} " not in text] == []
    with pytest.raises(httpx.ConnectError), httpx.Client(trust_env=False) as http:
        http.get(url)


def test_without_the_setting_there_is_no_server(server: BackgroundServer) -> None:
    adapter = weightsync.ModuleAdapter(torch.nn.Linear(4, 4))
    with weightsync.Engine(adapter, "r", coordinator=server.url, token=server.token):
        assert agent_metrics.port is None


def test_a_port_that_is_taken_is_named(no_leaks: None, server: BackgroundServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_METRICS_PORT", str(server.address.port))
    adapter = weightsync.ModuleAdapter(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_METRICS_PORT"):
        weightsync.Engine(adapter, "r", coordinator=server.url, token=server.token)
    assert agent_metrics.port is None
