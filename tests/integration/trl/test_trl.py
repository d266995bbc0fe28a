"""TRL's own trainers with a real vLLM server: after each update the server answers with the trainer's weights."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.server.service_support import free_port
from tests.integration.vllm.vllm_support import run_program

NEEDED = [name for name in ("trl", "vllm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore"),  # Transformers', while it is imported
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}: pip install --no-deps trl==1.16.0"),
]

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
APART = 1e-4
"""Largest difference of a log-probability: both sides compute in float32 with the same bfloat16 weights, with other kernels."""


ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1"}


class Served:
    """A coordinator, and a vLLM server that has joined it by its environment."""

    def __init__(self, directory: Path, url: str, process: int, coordinator: Any) -> None:
        self.directory, self.url, self.process = directory, url, process
        self.environment = {"WEIGHTSYNC_COORDINATOR": coordinator.url, "WEIGHTSYNC_TOKEN": coordinator.token}

    def train(self, kind: str, *launcher: str, **more: str) -> dict[str, Any]:
        environment = self.environment | more
        return run_program("trl/trl_trainers.py", kind, self.directory, self.url, ranks=1, more=environment, launcher=launcher)


def checkpoint(directory: Path) -> None:
    """A small Qwen2, tied and with biases, and a tokenizer that has a token for each byte."""
    from benchmarks.trl_sync import save_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    torch.nn.Module.to(model, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    save_tokenizer(directory)


@contextmanager
def started(directory: Path, *more_flags: str, engines: int = 1) -> Iterator[Served]:
    """The server is started before its coordinator, which it finds by itself when that is there."""
    from tests.integration.vllm.vllm_rounds import joined, serving

    from weightsync.config import Secret, ServerSettings
    from weightsync.server.server import BackgroundServer

    checkpoint(directory)
    port, token = free_port(), "t" * 43
    more = ON_A_CPU | {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(engines))),
        "WEIGHTSYNC_COORDINATOR": f"http://127.0.0.1:{port}", "WEIGHTSYNC_TOKEN": token, "WEIGHTSYNC_REPLICA": "vllm-0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1] / "vllm"), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    flags = ["--served-model-name", "tiny", str(directory), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    flags += more_flags
    with (
        serving(str(directory), 1, more, flags) as server,
        BackgroundServer(ServerSettings.load({}, port=port, token=Secret(token))) as coordinator,
    ):
        joined(coordinator, engines)
        yield Served(directory, str(server.http.base_url).rstrip("/"), server.process, coordinator)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("policy")) as made:
        yield made


def check(updates: list[dict[str, Any]], count: int) -> None:
    assert len(updates) == count
    numbers = [update["version"] for update in updates]
    assert numbers == list(range(numbers[0], numbers[0] + count))
    for update in updates:
        assert update["apart"] < APART, update
        assert (update["state"], update["verified"]) == ("loaded", "received"), update
        assert update["label"].endswith(f"@{update['version']}"), update
    answers = [update["served"] for update in updates]
    assert all(one != other for one, other in itertools.pairwise(answers))  # each update changed what is served


def test_grpo_updates_its_server_by_one_line(served: Served) -> None:
    seen = served.train("grpo")
    check(seen["updates"], 4)
    assert seen["metrics"] == 3, "each step's log has the update's measurements"
    assert (
        len(re.findall(r"weightsync: round \d+: .* serves in 1 of 1 replicas \(vllm-0\) .*verified as received", seen["log"])) == 4
    )
    assert seen["log"].count("rounded weights") == 1, "TRL trains in float32"


def benchmark(served: Served, name: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows of the trainer's process of a benchmark, which finds ``served``."""
    wanted = ["-m", f"benchmarks.{name}", *arguments, "--directory", str(served.directory), "--url", served.url]
    done = subprocess.run(
        [sys.executable, *wanted], env=os.environ | served.environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]


@pytest.mark.rare
def test_the_benchmark_of_trl_runs(served: Served) -> None:
    rows = benchmark(served, "trl_sync", "--train", "--updates", "1")
    assert [row["way"] for row in rows] == ["TRL through weightsync", "weightsync.Trainer"]
    for row in rows:
        assert (row["verified"], row["updates"]) == ("received", 1)
        assert 0 < row["paused_ms"] <= row["median_ms"]


@pytest.mark.rare
@pytest.mark.parametrize("trainer", ["grpo", "async"])
def test_the_benchmark_of_trainings_runs(served: Served, trainer: str) -> None:
    (row,) = benchmark(served, "trl_training", "--trainer", trainer, "--way", "weightsync", "--seed", "0", "--steps", "2")
    assert (row["steps"], row["verified"]) == (2, "received")
    assert row["updates"] >= 2
    assert row["step_ms"] > 0


@pytest.mark.rare
@pytest.mark.parametrize("kind", ["rloo", "lora", "async-lora"])
def test_other_trainers_and_a_server_without_lora(served: Served, kind: str) -> None:
    seen = served.train(kind)
    check(seen["updates"], 4)
    assert seen["log"].count("merges the adapter into its base") == ("lora" in kind)
    assert ("vLLM server was started without --enable-lora" in seen["log"]) == ("lora" in kind)


@pytest.mark.rare
@pytest.mark.parametrize("kind", ["fsdp2", "async-fsdp2"])
def test_two_ranks_of_fsdp2_publish_their_shards(served: Served, kind: str) -> None:
    check(served.train(kind, *LAUNCHER)["updates"], 4)


@pytest.mark.rare
def test_the_example_of_the_page_does_its_job(served: Served) -> None:
    check(served.train("page")["updates"], 1)


@pytest.mark.rare
def test_the_shells_of_the_page_train(tmp_path: Path) -> None:
    """To the letter, but for the model and the ports, and for how vLLM's CPU build is started."""
    from tests.integration.server.page_shells import blocks, run_shells, vllm_on_this_machine

    model = tmp_path / "policy"
    model.mkdir()
    checkpoint(model)
    (code,) = blocks("integrations/trl.md", "python", "A complete example")
    (tmp_path / "train.py").write_text(code)
    vllm_on_this_machine(tmp_path, "--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32")
    coordinator, server = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    changes = {
        "Qwen/Qwen2.5-0.5B": str(model), "http://127.0.0.1:7400": coordinator, "http://127.0.0.1:8000": server,
        "weightsync serve": f"weightsync serve --port {coordinator.rpartition(':')[2]}",
        "vllm serve": f"VLLM_PORT_HERE={server.rpartition(':')[2]} vllm serve",
    }  # fmt: skip
    environment = ON_A_CPU | {"ACCELERATE_USE_CPU": "true", "XDG_STATE_HOME": str(tmp_path)}
    ready = [lambda: answers(f"{coordinator}/healthz"), lambda: answers(f"{server}/health")]
    printed = run_shells(blocks("integrations/trl.md", "bash", "A complete example"), changes, ready, tmp_path, environment, 400)
    assert len(re.findall(r"weightsync: round \d+: .* serves in 1 of 1 replicas \(vllm-0\)", printed)) == 3, printed


def answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.rare
def test_async_grpo_cuts_no_rollout_off(served: Served) -> None:
    """The coordinator's default is to abort; TRL would train on what was generated until then."""
    seen = served.train("inflight")
    check(seen["updates"], 4)
    assert max(seen["running"]) > 0, "no request was running in any update"
    assert seen["aborted"] == 0, seen


@pytest.mark.rare
def test_async_grpo_updates_its_server_and_goes_on_from_a_checkpoint(served: Served) -> None:
    first = served.train("async")
    check(first["updates"], 4)
    assert first["model_version"] == 4
    second = served.train("resume")
    check(second["updates"], 4)
    assert second["model_version"] > 4
    assert second["updates"][0]["version"] == first["updates"][-1]["version"] + 1


@pytest.mark.rare
def test_a_server_that_is_killed_in_an_update_ends_the_training_within_its_deadline(served: Served) -> None:
    """The last test of this module: there is no server after it."""
    seen = served.train("async", VICTIM=str(served.process))
    check(seen["updates"], 1)
    assert seen["failed"].startswith("RoundFailed: "), seen
    assert seen["seconds"] < 60
