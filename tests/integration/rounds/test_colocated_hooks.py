"""Trainer and engine on one device: who makes room and who takes it back, and when, also when the round fails. One process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import RoundFailed
from weightsync.model import PauseMode, Version
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer


class Sleeping(ModuleAdapter):
    """Writes down what it is asked, and refuses to load where told."""

    def __init__(self, module: torch.nn.Module, said: list[str]) -> None:
        super().__init__(module)
        self.said, self.broken = said, False

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.said.append("pause")
        super().pause(mode, timeout)

    def wake_weights(self) -> None:
        self.said.append("wake_weights")
        weight = self.module.get_parameter("weight")
        weight.data = torch.zeros_like(weight)  # awake, elsewhere

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.said.append("load")
        if self.broken:
            raise RuntimeError("on purpose")
        super().load(tensors)

    def finish(self, version: Version) -> None:
        self.said.append("finish")
        super().finish(version)

    def wake_cache(self) -> None:
        self.said.append("wake_cache")

    def flush(self) -> bool:
        self.said.append("flush")
        return True

    def resume(self) -> None:
        self.said.append("resume")
        super().resume()


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as one:
        yield one


@pytest.mark.parametrize("buffers", [1, 2])
def test_phases_in_order_and_restored_after_a_failure(server: BackgroundServer, buffers: int) -> None:
    torch.manual_seed(5)
    said: list[str] = []
    source, target = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
    adapter = Sleeping(target, said)
    hooks = {"offload": lambda: said.append("offload"), "restore": lambda: said.append("restore")}
    with (
        Trainer(source, server.url, token=server.token, transports=["shared_memory"], **hooks) as trainer,  # type: ignore[arg-type]
        Engine(
            adapter, "r", server.url, token=server.token, delivery="streamed", bucket_bytes=1 << 10, staging_buckets=buffers,
            transports=["shared_memory"],
        ),
    ):  # fmt: skip
        assert trainer.publish(1, timeout=20).ok
        assert torch.equal(target.weight, source.weight)
        loads = said.count("load")
        assert loads == 2
        order = [name for name in said if name != "load"]
        assert order == ["offload", "pause", "wake_weights", "finish", "wake_cache", "flush", "resume", "restore"]
        said.clear()
        adapter.broken = True
        with pytest.raises(RoundFailed, match="on purpose"):
            trainer.publish(2, timeout=20)
        assert said[0] == "offload"
        assert said[-1] == "restore"
        assert "resume" not in said
        adapter.broken = False
        assert trainer.publish(3, timeout=20).ok
        assert torch.equal(target.weight, source.weight)


def test_restored_after_an_offload_that_failed_half_way(server: BackgroundServer) -> None:
    said: list[str] = []

    def offload() -> None:
        said.append("offload")
        raise RuntimeError("no room on the host")

    with Trainer(
        torch.nn.Linear(4, 4), server.url, token=server.token, offload=offload, restore=lambda: said.append("restore")
    ) as trainer:
        with pytest.raises(RuntimeError, match="no room"):
            trainer.publish(1, timeout=20)
        assert said == ["offload", "restore"]


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
def test_a_parameter_viewed_anew_is_right_or_refused_never_wrong(
    server: BackgroundServer, delivery: Literal["direct", "streamed"]
) -> None:
    source, target = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    with (
        Trainer(source, server.url, token=server.token, transports=["shared_memory"]) as trainer,
        Engine(ModuleAdapter(target), "r", server.url, token=server.token, delivery=delivery, transports=["shared_memory"]),
    ):
        assert trainer.publish(1, timeout=20).ok
        source.weight.data = source.weight.data.t()  # same address, other strides
        assert trainer.publish(2, timeout=20).ok
        assert torch.equal(target.weight, source.weight)
        target.weight.data = target.weight.data.t()
        if delivery == "direct":
            with pytest.raises(RoundFailed, match="rebuilt its parameters"):
                trainer.publish(3, timeout=20)
        else:
            assert trainer.publish(3, timeout=20).ok
            assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
def test_ties_registered_in_another_order_are_the_same_model(
    server: BackgroundServer, delivery: Literal["direct", "streamed"]
) -> None:
    def tied(names: Sequence[str]) -> torch.nn.ModuleDict:
        parts = torch.nn.ModuleDict({name: torch.nn.Linear(4, 8, bias=False) for name in names})
        parts["head"].weight = parts["embed"].weight
        return parts

    source, target = tied(["middle", "head", "embed"]), tied(["embed", "head", "middle"])
    with (
        Trainer(source, server.url, token=server.token, transports=["shared_memory"]) as trainer,
        Engine(ModuleAdapter(target), "r", server.url, token=server.token, delivery=delivery, transports=["shared_memory"]),
    ):
        (replica,) = trainer.publish(1, timeout=20).replicas
        assert replica.verified == "installed"
        assert torch.equal(target.get_parameter("head.weight"), source.get_parameter("embed.weight"))
        assert torch.equal(target.get_parameter("middle.weight"), source.get_parameter("middle.weight"))


def test_weights_that_wake_elsewhere_are_written_where_they_are_then(server: BackgroundServer) -> None:
    source, target = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
    with (
        Trainer(source, server.url, token=server.token, transports=["shared_memory"]) as trainer,
        Engine(Sleeping(target, []), "r", server.url, token=server.token, delivery="direct", transports=["shared_memory"]),
    ):
        for number in (1, 2, 3):
            torch.nn.init.normal_(source.weight)
            (replica,) = trainer.publish(number, timeout=20).replicas
            assert replica.delivery == "direct"
            assert torch.equal(target.weight, source.weight)
