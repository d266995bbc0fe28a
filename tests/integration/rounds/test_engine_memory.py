"""Engines whose memory is not simply one tensor after another: shared, read-only, or short."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from weightsync.config import ServerSettings, control_settings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import Aborted, LayoutError, RoundFailed, WeightSyncError
from weightsync.server.server import BackgroundServer
from weightsync.trainer.adapters import Adapters
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole


class Served(nn.Module):
    """A head that is tied to the embedding without its padding rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.data[:10])


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.head = nn.Linear(4, 10, bias=False)


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as running:
        yield running


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp"])
def test_parameters_that_share_memory_get_a_version_only_if_it_agrees_there(
    server: BackgroundServer, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy, served = Untied(), Served()
    adapter = ModuleAdapter(served)
    with (
        Trainer(policy, server.url, token=server.token, transports=[transport]) as trainer,
        Engine(adapter, "tied", server.url, token=server.token, transports=[transport]),
    ):
        with pytest.raises(RoundFailed, match=r"VerificationError.*(embed|head)\.weight"):
            trainer.publish(1, timeout=30)
        assert "embed.weight and head.weight share memory" in caplog.text
        policy.head.weight.data.copy_(policy.embed.weight.data[:10])
        (replica,) = trainer.publish(2, timeout=30).replicas
        assert (replica.delivery, replica.verified) == ("direct", "installed")
        assert torch.equal(served.embed.weight, policy.embed.weight)
        assert torch.equal(served.head.weight, policy.head.weight)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_an_engine_in_read_only_memory_is_refused_when_it_joins(server: BackgroundServer, tmp_path: Path) -> None:
    np.zeros((64, 64), np.float32).tofile(tmp_path / "weights")
    layer = nn.Linear(64, 64, bias=False)
    with warnings.catch_warnings(action="ignore"):  # torch warns of such memory once
        mapped = torch.from_numpy(np.memmap(tmp_path / "weights", np.float32, "r", shape=(64, 64)))
    layer.weight = nn.Parameter(mapped, requires_grad=False)
    with pytest.raises(LayoutError, match="weight is in memory that this process cannot write"):
        Engine(ModuleAdapter(layer), "mapped", server.url, token=server.token)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("source", ["module", "stream"])
def test_the_memory_of_a_trainer_that_is_gone_is_free_and_the_next_one_publishes(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a trainer that is restarted would find its GPU's memory in use: by engines, which had mapped it."""
    policy, served = nn.Linear(64, 64), nn.Linear(64, 64)
    adapter = ModuleAdapter(served)

    def publish(trainer: Trainer, number: int) -> None:
        nn.init.normal_(policy.weight)
        if source == "stream":
            trainer.publish_stream(policy.state_dict().items(), number, timeout=30)
        else:
            trainer.publish(number, timeout=30)
        with adapter.in_use(10.0) as version:
            assert version is not None
            assert version.number == number
            assert torch.equal(served.weight, policy.weight)

    def regions() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:weightsync")

    quick = partial(msgspec.structs.replace, grace=0.2)
    monkeypatch.setattr("weightsync.server.server.control_settings", lambda settings: quick(control_settings(settings)))
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ExitStack() as owned:
        before = regions()
        owned.enter_context(Engine(adapter, "e0", server.url, token=server.token, transports=["shared_memory"], delivery="auto"))
        for number in (1, 2):
            whole = Stream(window_bytes=1 << 15) if source == "stream" else policy
            with Trainer(whole, server.url, token=server.token, transports=["shared_memory"]) as trainer:
                publish(trainer, number)
                assert regions() > before
            deadline = time.monotonic() + 10
            while regions() > before and time.monotonic() < deadline:
                threading.Event().wait(0.05)
            assert regions() == before
        with adapter.in_use(10.0) as version:
            assert version is not None


def test_memory_of_adapters_is_let_go_with_their_publisher_and_with_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def regions() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:weightsync")

    def interrupted(role: TrainerRole, placing: object, body: object, deadline: object) -> None:
        raise Aborted("interrupted")

    def wait_for(expected: int) -> None:
        deadline = time.monotonic() + 10
        while regions() > expected and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert regions() == expected

    quick = partial(msgspec.structs.replace, grace=0.2)
    monkeypatch.setattr("weightsync.server.server.control_settings", lambda settings: quick(control_settings(settings)))
    pair = {"0.lora_A.weight": torch.randn(4, 64), "0.lora_B.weight": torch.randn(64, 4)}
    slots = ModuleAdapter(nn.Sequential(nn.Linear(64, 64)), adapter_slots=4, max_lora_rank=16)
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        before = regions()
        with Engine(slots, "e0", server.url, token=server.token, transports=["shared_memory"]) as engine:
            policy = nn.Sequential(nn.Linear(64, 64))
            with Trainer(policy, server.url, token=server.token, transports=["shared_memory"]) as trainer:
                trainer.publish(1, timeout=30)
                base = regions()
                with Adapters(pair, trainer, alpha=8, transports=["shared_memory"]) as adapters:
                    adapters.publish("org/tenant", timeout=20)
                wait_for(base)
                with Adapters(pair, trainer, alpha=8, transports=["shared_memory"]) as adapters:
                    adapters.publish("org/tenant", timeout=20)
                    with monkeypatch.context() as patched, pytest.raises(WeightSyncError, match="interrupted"):
                        patched.setattr(TrainerRole, "_place_armed", interrupted)
                        adapters.publish("org/tenant", timeout=20)
                wait_for(base)  # engines had prepared for the version that failed
                with Adapters(pair, trainer, alpha=8, transports=["shared_memory"]) as adapters:
                    adapters.publish("org/tenant", timeout=20)
            wait_for(before)
            assert engine.serving is not None


@pytest.mark.parametrize("stream", [False, True])
def test_staging_buckets_that_do_not_fit_are_refused_before_the_engine_stops(
    server: BackgroundServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    for place in ("streamed", "windows"):
        monkeypatch.setattr(f"weightsync.engine.fill.{place}.available_bytes", lambda: 100)
    policy, served = nn.Linear(64, 64), nn.Linear(64, 64)
    adapter = ModuleAdapter(served)
    with (
        Trainer(Stream() if stream else policy, server.url, token=server.token) as trainer,
        Engine(adapter, "small", server.url, token=server.token, delivery="streamed"),
    ):
        with pytest.raises(RoundFailed, match="no memory for staging buffers"):
            if stream:
                trainer.publish_stream(policy.state_dict().items(), 1, timeout=30)
            else:
                trainer.publish(1, timeout=30)
        with adapter.in_use(1.0):
            pass
