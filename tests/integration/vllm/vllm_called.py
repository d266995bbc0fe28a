"""A program: updates of a real vLLM inside calls of its framework; prints what it saw as one line of JSON.

``python vllm_called.py RANKS DIRECTORY``. Neither vLLM's weight transfer nor weightsync's environment is set. As in
``vllm_rounds.py``, what needs numba is imported where it is used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.vllm.vllm_rounds import BLOCK, PROMPTS, build, change, expected
from transformers import PreTrainedModel

import weightsync
from weightsync.config import ServerSettings
from weightsync.integrations.engine_calls import EngineCalls
from weightsync.server.server import BackgroundServer

SECONDS = 60.0
SHORT = 5  # tokens


class Owned:
    """A ``vllm.LLM`` as a framework owns it."""

    def __init__(self, directory: str, ranks: int) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, tensor_parallel_size=ranks,
            max_model_len=256, block_size=BLOCK, max_num_seqs=8, worker_extension_cls="vllm_faults.Faults",
        )  # fmt: skip
        self.sampling = SamplingParams(temperature=0, max_tokens=SHORT, ignore_eos=True, detokenize=False)
        self.calls = EngineCalls(lambda method, arguments: self.llm.collective_rpc(method, kwargs=arguments))

    def generate(self) -> list[int]:
        """Do what the framework does after an update, and answer greedily."""
        self.llm.reset_prefix_cache()
        (answer,) = self.llm.generate([{"prompt_token_ids": PROMPTS[0]}], self.sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)


def answer_of(model: PreTrainedModel) -> list[int]:
    return expected(model)[0][:SHORT]


def error_of(work: Any) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - shown
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def play(ranks: int, directory: str) -> dict[str, Any]:
    model = build(ranks, directory)
    engine = Owned(directory, ranks)
    calls = engine.calls
    seen: dict[str, Any] = {}
    token = Path(directory) / "token"
    with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator:
        token.touch(0o600)
        token.write_text(coordinator.token)
        with weightsync.Trainer(model, coordinator.url, token=coordinator.token) as trainer:
            seen["before"] = engine.generate() == answer_of(model)
            seen["not joined"] = error_of(lambda: calls.update(1, timeout=1))
            seen["ready"] = calls.ready()
            seen["no token"] = error_of(lambda: calls.join(coordinator.url, "rollout-0", token_file=str(token) + "-"))
            seen["joined"] = [calls.join(coordinator.url, "rollout-0", token_file=str(token)) for _ in range(2)]
            trainer.wait_for_replicas(1, timeout=SECONDS, names=["rollout-0"])
            seen["rounds"] = []
            for number in (1, 2):
                change(model, number)
                started = time.monotonic()
                result = calls.publish(partial(trainer.publish, number, timeout=SECONDS), number, timeout=SECONDS)
                seen["rounds"].append(
                    {
                        "seconds": time.monotonic() - started, "verified": result.replicas[0].verified,
                        "equal": engine.generate() == answer_of(model),
                    }
                )  # fmt: skip
            started = time.monotonic()
            seen["again"] = [calls.update(2, timeout=SECONDS), time.monotonic() - started]
            seen["no update"] = error_of(lambda: calls.update(3, timeout=1))
            held = engine.generate()
            change(model, 3)
            seen["no call"] = error_of(lambda: trainer.publish(3, timeout=4))
            seen["kept"] = engine.generate() == held
            change(model, 4)
            engine.llm.collective_rpc("fail_next_load")
            seen["failed"] = error_of(lambda: calls.publish(lambda: trainer.publish(4, timeout=SECONDS), 4, timeout=SECONDS))
            # The regions hold version 4: the framework tries it again, without the trainer.
            seen["retried"] = calls.update(4, timeout=SECONDS)
            seen["retried equal"] = engine.generate() == answer_of(model)
            change(model, 5)
            calls.publish(lambda: trainer.publish(5, timeout=SECONDS), 5, timeout=SECONDS)
            seen["equal"] = engine.generate() == answer_of(model)
            calls.leave()
            seen["left"] = error_of(lambda: calls.update(6, timeout=1))
    engine.llm.llm_engine.engine_core.shutdown()
    return seen


def main() -> int:
    print("RESULT " + json.dumps(play(int(sys.argv[1]), sys.argv[2])), flush=True)
    return 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sys.exit(main())
