"""Holds that a real Transformers model, trained under FSDP2 over NCCL, is published in place, bit for bit what FSDP gathers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.gpu.fsdp_rank import build
from tests.processes import ranks

from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180), pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")

VERSIONS = 3


class Watched(ModuleAdapter):
    """Keeps what the engine held when it resumed, by version."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.held: list[dict[str, torch.Tensor]] = []

    def resume(self) -> None:
        self.held.append({name: value.cpu() for name, value in self.module.state_dict().items()})
        super().resume()


def test_versions_of_a_sharded_model_arrive_whole(tmp_path: Path) -> None:
    world = min(2, torch.cuda.device_count())  # NCCL wants a GPU for every rank
    engine = Watched(build(f"cuda:{torch.cuda.device_count() - 1}"))
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        environment = {"WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token}
        with (
            Engine(engine, "here", server.url, token=server.token, delivery="direct"),
            ranks(
                world, "tests.gpu.fsdp_rank", world, tmp_path, VERSIONS, environment=environment, without=("RANK", "WORLD_SIZE")
            ) as processes,
        ):
            lines, *_ = [process.output(150).splitlines() for process in processes]
    seen = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    assert seen == [["direct", ["cuda_ipc"], "installed", True]] * VERSIONS
    assert len(engine.held) == VERSIONS
    for version, held in enumerate(engine.held, 1):
        wanted = load_file(tmp_path / f"{version}.safetensors")
        assert wanted.keys() == held.keys()
        different = [name for name in wanted if not torch.equal(wanted[name].view(torch.int16), held[name].view(torch.int16))]
        assert different == [], f"version {version}"
    first, last = engine.held[0], engine.held[-1]
    assert all(not torch.equal(first[name], last[name]) for name in first)  # every tensor was trained
