"""OpenRLHF's own policy trainer with DeepSpeed on two ranks publishes to engines in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed here: make openrlhf-test")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import weightsync
from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.openrlhf, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


class Failing(weightsync.ModuleAdapter):
    """Fails when the weights are there."""

    def finish(self, version: weightsync.Version) -> None:
        raise RuntimeError("this engine cannot take them")


class Stage:
    """A coordinator, a checkpoint, and engines that serve it."""

    def __init__(self, owned: ExitStack, folder: Path) -> None:
        self.owned, self.folder = owned, folder
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        torch.nn.Module.to(model, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        self.coordinator = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))

    def serve(self, name: str, kind: type[weightsync.ModuleAdapter] = weightsync.ModuleAdapter) -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        url, token = self.coordinator.url, self.coordinator.token
        self.owned.enter_context(weightsync.Engine(kind(model), replica=name, coordinator=url, token=token))
        return model

    def train(self, *arguments: object) -> Sequence[dict[str, Any]]:
        """Run OpenRLHF's ranks, and return what each of them reports."""
        environment = os.environ | {
            "WEIGHTSYNC_COORDINATOR": self.coordinator.url, "WEIGHTSYNC_TOKEN": str(self.coordinator.token),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tests/integration/openrlhf_ranks.py"]
        run = subprocess.run(
            [sys.executable, *program, str(self.folder), *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(2)]

    def assert_published(self, model: torch.nn.Module) -> None:
        held = model.state_dict()
        published = load_file(self.folder / "published.safetensors")
        assert published.keys() == {name for name, _ in model.named_parameters()}
        assert [name for name, tensor in published.items() if not torch.equal(tensor, held[name])] == []


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as owned:
        yield Stage(owned, tmp_path)


@pytest.mark.parametrize("zero", [2, 3])
def test_engines_hold_the_policys_model_after_each_update(stage: Stage, zero: int) -> None:
    models = [stage.serve("vllm-0"), stage.serve("vllm-1")]
    before = {name: tensor.clone() for name, tensor in models[0].named_parameters()}
    reports = stage.train(2, zero, 2)
    for report in reports:
        assert [(name, verified) for name, _, verified in report["replicas"]] == [("vllm-0", "installed"), ("vllm-1", "installed")]
    for model in models:
        stage.assert_published(model)
    assert not any(torch.equal(before[name], tensor) for name, tensor in models[0].named_parameters())


def test_an_engine_that_fails_raises_on_every_rank_and_the_others_serve_the_version(stage: Stage) -> None:
    good = stage.serve("vllm-0")
    stage.serve("vllm-1", Failing)
    for report in stage.train(2, 2, 1):
        assert report["error"] == "RoundFailed"
        assert "reached 1 of 2 engines (vllm-1" in report["message"]
    stage.assert_published(good)


def test_adapters_are_refused_on_every_rank(stage: Stage) -> None:
    for report in stage.train(1, 2, 1, 8):
        assert (report["error"], "LoRA" in report["message"]) == ("ConfigurationError", True)
