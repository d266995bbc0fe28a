"""A run of a framework: ranks of its trainer in processes of their own, and engines here that serve what they publish.

``python -m tests.integration.policy_run FOLDER NAME`` is such an engine in a process of its own, until its input ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.integration.server.service_support import free_port
from tests.processes import ChildProcess
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import weightsync
from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

__all__ = ["FailingAdapter", "PolicyRun"]

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
RANKS = 2
_SECONDS = 200.0
_JOINING = 60.0


class FailingAdapter(weightsync.ModuleAdapter):
    """Fails when the weights are there."""

    def finish(self, version: weightsync.Version) -> None:
        raise RuntimeError("this engine cannot take them")


class PolicyRun:
    """A coordinator, a checkpoint, engines that serve it, and ``program``, which every trainer rank runs.

    Args:
        owned: Closes what the run holds.
        folder: Holds the checkpoint, and what the ranks write: ``rank0.json`` and so on, and ``published.safetensors``.
        program: A file below this folder. Its first argument is the checkpoint.
        tied: Whether the output layer is the embedding.
    """

    def __init__(self, owned: ExitStack, folder: Path, program: str, *, tied: bool) -> None:
        self._owned, self.folder, self._program = owned, folder, program
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied))
        torch.nn.Module.to(model, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        words: Any = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>"))
        tokens: Any = PreTrainedTokenizerFast
        tokens(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
        self.coordinator = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))

    def serve(
        self, name: str, kind: type[weightsync.ModuleAdapter] = weightsync.ModuleAdapter
    ) -> tuple[weightsync.Engine, torch.nn.Module]:
        """An engine in this process, and its model."""
        model = _load(self.folder)
        url, token = self.coordinator.url, self.coordinator.token
        return self._owned.enter_context(weightsync.Engine(kind(model), replica=name, coordinator=url, token=token)), model

    def serve_elsewhere(self, name: str) -> ChildProcess:
        """An engine in a separate process."""
        return self.run("-m", __name__, self.folder, name)

    def start(self, *arguments: object, **variables: str) -> list[ChildProcess]:
        """Start the trainer's ranks."""
        port = free_port()
        return [
            self.run(
                f"tests/integration/{self._program}", self.folder, *arguments,
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1", **variables,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def run(self, *command: object, **variables: str) -> ChildProcess:
        """Start a process that knows the coordinator. It is killed when the run is over."""
        environment = variables | {"WEIGHTSYNC_COORDINATOR": self.coordinator.url, "WEIGHTSYNC_TOKEN": self.coordinator.token}
        return self._owned.enter_context(ChildProcess(*command, stderr=subprocess.STDOUT, environment=environment))

    def report(self, processes: Sequence[ChildProcess], rank: int, seconds: float = _SECONDS) -> dict[str, Any]:
        """What ``rank`` wrote down, which must end well."""
        status = processes[rank].exit_code(seconds)
        assert status == 0, "".join(f"rank {rank}:\n{process.printed[-4000:]}" for rank, process in enumerate(processes))
        report: dict[str, Any] = json.loads((self.folder / f"rank{rank}.json").read_text())
        return report

    def train(self, *arguments: object) -> list[dict[str, Any]]:
        """Run the trainer's ranks, and return what each of them wrote down."""
        processes = self.start(*arguments)
        until = time.monotonic() + _SECONDS
        return [self.report(processes, rank, max(0.0, until - time.monotonic())) for rank in range(RANKS)]

    def assert_published(self, model: torch.nn.Module) -> None:
        """The engine's model holds what the policy's does."""
        held = model.state_dict()
        published = load_file(self.folder / "published.safetensors")
        assert published.keys() == {name for name, _ in model.named_parameters()}
        different = [name for name, tensor in published.items() if not torch.equal(tensor, held[name])]
        assert not different, different


def _load(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model


def main(folder: str, name: str) -> None:
    with weightsync.Engine(weightsync.ModuleAdapter(_load(Path(folder))), replica=name):
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
