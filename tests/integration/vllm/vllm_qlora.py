"""A program: an adapter of QLoRA, whose base bitsandbytes holds in 4 bits, into a real vLLM server on this CPU.

``python vllm_qlora.py DIRECTORY``. vLLM serves the dequantized base. Prints what was seen as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from tests.integration.trl.qlora_ranks import adapted, quantized, refused, train
from tests.integration.vllm.vllm_adapters import FLAGS, Asked
from tests.integration.vllm.vllm_rounds import PROMPTS, TOKENS, build, joined, serving, tell_environment

import weightsync
from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer


def greedy(model: Any) -> list[list[int]]:
    """PEFT's own answers, over the quantized base."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(TOKENS):
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def play(directory: str) -> dict[str, Any]:
    build(2, directory)
    base = f"{directory}/dequantized"
    quantized(directory, torch.float32).dequantize().save_pretrained(base)
    model = adapted(quantized(directory, torch.float32))
    seen: dict[str, Any] = {"refused": refused(model), "published": [], "answers": []}
    with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator:
        tell_environment(coordinator, directory)
        with serving(base, 1, {}, (*FLAGS, "--served-model-name", "tiny")) as server:
            asked = Asked(server.http)
            joined(coordinator, 1)
            with weightsync.Adapters(model, None, coordinator=coordinator.url, token=coordinator.token) as adapters:
                for number in range(2):
                    train(model, 10)
                    (replica,) = adapters.publish("alice/math", timeout=60).replicas
                    seen["published"].append([replica.error, replica.verified])
                    seen["answers"].append(asked.tokens("alice/math") == (greedy(model), f"alice/math@{number}"))
                seen["differ"] = asked.tokens("alice/math")[0] != asked.tokens("tiny")[0]
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(play(sys.argv[1])), flush=True)
    os._exit(0)
