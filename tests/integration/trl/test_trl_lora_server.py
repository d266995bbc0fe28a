"""TRL's own trainers with PEFT and a real vLLM server that takes adapters: it answers with the adapter after each update."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trl.test_trl import LAUNCHER, Served, check, started

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.rare,  # test_trl_adapters.py holds each step without a server
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore"),  # Transformers', while it is imported
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("trl", "vllm", "peft")), reason="needs TRL, vLLM, PEFT"
    ),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "16")
    with started(tmp_path_factory.mktemp("policy"), *flags) as made:
        yield made


def check_adapter(seen: dict[str, Any], name: str, engines: int = 1) -> None:
    updates = seen["updates"]
    assert [update["label"] for update in updates] == [f"{name}@{number}" for number in range(4)]
    for update in updates:
        assert update["equal"], "the greedy answers are the PEFT model's"
        assert update["answering"] == [update["label"]]
        assert update["nbytes"] == engines * update["adapter"] > 0
        assert (update["paused"], update["verified"]) == (0, "installed")
        kept = {label for label in update["models"] if label.startswith(f"{name}@")}
        assert len(kept) <= 2 and update["label"] in kept
    assert len({update["base"] for update in updates}) == 1, "the base moved once"
    assert all(one["served"] != other["served"] for one, other in itertools.pairwise(updates)), "each update changed the answers"
    assert "merges the adapter" not in seen["log"]


def test_grpo_publishes_the_adapter_and_its_requests_name_it(served: Served) -> None:
    seen = served.train("adapter", WEIGHTSYNC_ADAPTER="alice/math")
    check_adapter(seen, "alice/math")
    assert seen["asked"] == ["alice/math@0", "alice/math@1", "alice/math@2"], "what answered TRL's requests"
    assert seen["metrics"] == 3, "each step's log has the update's measurements"


def test_async_grpo_publishes_the_adapter_while_rollouts_run(served: Served) -> None:
    seen = served.train("async-adapter", WEIGHTSYNC_ADAPTER="tenant/policy")
    check_adapter(seen, "tenant/policy")
    assert seen["asks"] == "tenant/policy"
    assert seen["fresh"] and max(map(abs, seen["fresh"])) < 1e-6, "what the first adapter sampled has the trainer's probabilities"
    assert max(seen["running"]) > 0, "no request was running in any update"
    assert (seen["aborted"], seen["model_version"]) == (0, 4)


@pytest.mark.parametrize("kind", ["adapter-fsdp2", "async-adapter-fsdp2"])
def test_two_ranks_of_fsdp2_publish_their_shards_of_the_adapter(served: Served, kind: str) -> None:
    seen = served.train(kind, *LAUNCHER, WEIGHTSYNC_ADAPTER=f"tenant/{kind}")
    check_adapter(seen, f"tenant/{kind}")


@pytest.mark.parametrize("launcher", [(), LAUNCHER])
def test_an_adapter_of_layers_that_vllm_has_no_lora_for_is_merged(served: Served, launcher: tuple[str, ...]) -> None:
    seen = served.train("lora-of-embeddings" + ("-fsdp2" if launcher else ""), *launcher)
    check(seen["updates"], 4)
    assert seen["log"].count("merges the adapter into its base") == 1
    assert "this vLLM has no LoRA layer for it" in seen["log"]


def test_a_server_of_two_data_parallel_engines_gets_the_adapter_alone(tmp_path: Path) -> None:
    flags = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "16")
    with started(tmp_path, *flags, "--data-parallel-size", "2", "--api-server-count", "1", engines=2) as served:
        check_adapter(served.train("adapter", WEIGHTSYNC_ADAPTER="alice/math"), "alice/math", engines=2)
