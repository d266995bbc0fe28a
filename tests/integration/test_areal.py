"""AReaL's own FSDP2 engine on two ranks publishes its shards to engines in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("areal", reason="AReaL is not installed here: make areal-test")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import weightsync
from weightsync.config import ServerSettings
from weightsync.integrations.__main__ import main as check_installation
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.areal, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


class Failing(weightsync.ModuleAdapter):
    """Fails when the weights are there."""

    def finish(self, version: weightsync.Version) -> None:
        raise RuntimeError("this server cannot take them")


class Stage:
    """A coordinator, AReaL's checkpoint, and engines that serve it."""

    def __init__(self, owned: ExitStack, folder: Path) -> None:
        from tokenizers import Tokenizer, models

        self.owned, self.folder = owned, folder
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        torch.nn.Module.to(model, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        words: Any = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>"))
        tokens: Any = PreTrainedTokenizerFast
        tokens(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
        self.coordinator = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))

    def serve(self, name: str, kind: type[weightsync.ModuleAdapter] = weightsync.ModuleAdapter) -> tuple[weightsync.Engine, Any]:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        url, token = self.coordinator.url, self.coordinator.token
        return self.owned.enter_context(weightsync.Engine(kind(model), replica=name, coordinator=url, token=token)), model

    def train(self, servers: int, versions: Iterable[int]) -> Sequence[dict[str, Any]]:
        """Run AReaL's ranks, and return what each of them reports."""
        environment = os.environ | {
            "WEIGHTSYNC_COORDINATOR": self.coordinator.url, "WEIGHTSYNC_TOKEN": str(self.coordinator.token),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tests/integration/areal_ranks.py"]
        arguments = [str(self.folder), str(servers), *map(str, versions)]
        run = subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(2)]

    def published(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "published.safetensors")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as owned:
        yield Stage(owned, tmp_path)


def assert_equal(model: torch.nn.Module, published: dict[str, torch.Tensor]) -> None:
    held = model.state_dict()
    assert held.keys() == published.keys()
    assert [name for name, tensor in published.items() if not torch.equal(tensor, held[name])] == []


def test_servers_hold_areals_model_under_its_own_version_also_when_it_starts_again_from_an_earlier_step(stage: Stage) -> None:
    one, other = stage.serve("vllm-0"), stage.serve("vllm-1")
    before = {name: tensor.clone() for name, tensor in one[1].state_dict().items()}
    for versions in ([4, 5, 6], [5]):
        reports = stage.train(2, versions)
        expected = [[name, versions[-1], "installed"] for name in ("vllm-0", "vllm-1")]
        assert [report["replicas"] for report in reports] == [expected, expected]
        assert {report["rollout"] for report in reports} == {versions[-1]}
        for engine, model in (one, other):
            assert str(engine.serving) == reports[0]["label"]
            assert_equal(model, stage.published())
    assert not any(torch.equal(before[name], tensor) for name, tensor in stage.published().items())


def test_a_server_that_fails_raises_on_every_rank_and_the_others_serve_the_version(stage: Stage) -> None:
    good, model = stage.serve("vllm-0")
    bad, _ = stage.serve("vllm-1", Failing)
    for report in stage.train(2, [1]):
        assert report["error"] == "RoundFailed"
        assert "reached 1 of 2 servers (vllm-1" in report["message"]
        assert "this server cannot take them" in report["message"]
    assert good.serving is not None
    assert good.serving.number == 1
    assert_equal(model, stage.published())
    assert bad.serving is None


def test_updates_that_are_not_of_a_whole_model_over_the_network_are_refused(stage: Stage) -> None:
    for report in stage.train(1, []):
        assert report["disk"]["error"] == report["error"] == "ConfigurationError"
        assert "actor.weight_update_mode=xccl" in report["disk"]["message"]
        assert "actor.use_lora=false" in report["message"]


def test_enable_replaces_the_actor_that_areals_trainer_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import areal.engine

    from weightsync.integrations.areal import enable
    from weightsync.integrations.areal.actor import PublishingFSDPActor

    monkeypatch.setattr(areal.engine, "FSDPPPOActor", areal.engine.FSDPPPOActor)
    enable()
    enable()
    assert areal.engine.FSDPPPOActor is PublishingFSDPActor
    path = f"{PublishingFSDPActor.__module__}.{PublishingFSDPActor.__name__}"  # what AReaL's controllers tell their workers
    assert path == "weightsync.integrations.areal.actor.PublishingFSDPActor"


def test_the_check_of_an_installation_finds_the_engine(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", stage.coordinator.url)
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", str(stage.coordinator.token))
    assert check_installation(["areal"]) == 0
    printed = capsys.readouterr().out
    assert "FSDPEngine has what weightsync replaces and calls" in printed
    assert stage.coordinator.url in printed
