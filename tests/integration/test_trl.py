"""TRL's own trainers with a real vLLM server: after each update the server answers with the trainer's weights."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.vllm_support import run_program

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


class Served:
    """A coordinator, and a vLLM server that has joined it by its environment."""

    def __init__(self, directory: Path, url: str, process: int, coordinator: Any) -> None:
        self.directory, self.url, self.process = directory, url, process
        self.environment = {"WEIGHTSYNC_COORDINATOR": coordinator.url, "WEIGHTSYNC_TOKEN": coordinator.token}

    def train(self, kind: str, *launcher: str, **more: str) -> dict[str, Any]:
        environment = self.environment | more
        return run_program("trl_trainers.py", kind, self.directory, self.url, ranks=1, more=environment, launcher=launcher)


def checkpoint(directory: Path) -> None:
    """A small Qwen2, tied and with biases, and a tokenizer that has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    torch.nn.Module.to(model, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special)
    plain.train_from_iterator([], trainer)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokens: Any = PreTrainedTokenizerFast
    tokens(tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template).save_pretrained(
        directory
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.integration.vllm_rounds import joined, serving

    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    directory = tmp_path_factory.mktemp("policy")
    checkpoint(directory)
    with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator:
        more = {
            "WEIGHTSYNC_COORDINATOR": coordinator.url, "WEIGHTSYNC_TOKEN": coordinator.token, "WEIGHTSYNC_REPLICA": "vllm-0",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        flags = ["--served-model-name", "tiny", str(directory), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        with serving(str(directory), 1, more, flags) as server:
            joined(coordinator, 1)
            yield Served(directory, str(server.http.base_url).rstrip("/"), server.process, coordinator)


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
    check(served.train("grpo")["updates"], 4)


@pytest.mark.rare
@pytest.mark.parametrize("kind", ["rloo", "lora"])
def test_other_trainers_in_server_mode(served: Served, kind: str) -> None:
    check(served.train(kind)["updates"], 4)


@pytest.mark.rare
def test_two_ranks_of_fsdp2_publish_their_shards(served: Served) -> None:
    check(served.train("fsdp2", *LAUNCHER)["updates"], 4)


@pytest.mark.rare
def test_the_example_of_the_page_does_its_job(served: Served) -> None:
    check(served.train("page")["updates"], 1)


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
