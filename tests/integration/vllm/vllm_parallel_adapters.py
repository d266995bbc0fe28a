"""A program: LoRA adapters of PEFT into a real vLLM server of two data-parallel engines on this CPU; prints what was seen as JSON.

``python vllm_parallel_adapters.py DIRECTORY``. See :mod:`vllm_adapters`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tests.integration.vllm.vllm_adapters import FLAGS, TARGETS, Asked, answers_of, randomize
from tests.integration.vllm.vllm_rounds import PROMPTS, build, joined, serving, tell_environment

import weightsync
from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

ENGINES = 2
TIMES = 8


def play(directory: str) -> dict[str, Any]:
    peft_model = get_peft_model(build(1, directory), LoraConfig(r=8, lora_alpha=12, target_modules=TARGETS))
    seen: dict[str, Any] = {}
    flags = (*FLAGS, "--data-parallel-size", str(ENGINES), "--api-server-count", "1", "--no-enable-prefix-caching")
    with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator:
        tell_environment(coordinator, directory)
        with serving(directory, 1, {}, flags) as server, ThreadPoolExecutor(TIMES) as threads:
            asked, wanted = Asked(server.http), {}
            joined(coordinator, ENGINES)
            with weightsync.Adapters(peft_model, None, coordinator=coordinator.url, token=coordinator.token) as adapters:
                for number in (1, 2):
                    randomize(peft_model, number)
                    wanted[number] = answers_of(peft_model)[0]
                    result = adapters.publish("alice/math", number, timeout=60)
                    seen[f"publish{number}"] = [[replica.error, replica.verified] for replica in result.replicas]

                def answers(name: str) -> list[list[int]]:
                    """Of requests at the same time, which vLLM spreads over its engines."""
                    bodies = threads.map(lambda _: asked.raw(name, PROMPTS[0]).raise_for_status().json(), range(TIMES))
                    return [body["choices"][0]["token_ids"] for body in bodies]

                seen["differ"] = wanted[1] != wanted[2]
                seen["answers"] = [answers(f"alice/math@{number}") == [wanted[number]] * TIMES for number in (1, 2)]
                seen["retired"] = adapters.retire("alice/math", keep=1)
                seen["gone"] = asked.raw("alice/math@1", PROMPTS[0]).status_code
                seen["newest"] = answers("alice/math") == [wanted[2]] * TIMES
            with torch.no_grad():
                for name, parameter in peft_model.named_parameters():
                    if "lora_" not in name and "norm" not in name:
                        parameter.mul_(1.25)
            with weightsync.Trainer(weightsync.base_weights(peft_model), coordinator.url, token=coordinator.token) as trainer:
                result = trainer.publish(1, timeout=60)
                seen["base"] = [[replica.error, replica.verified] for replica in result.replicas]
            seen["updated"] = answers("alice/math") == [answers_of(peft_model)[0]] * TIMES
            finished = re.findall(
                r'vllm:request_success_total\{engine="([0-9])"[^}]*\} ([0-9.]+)', server.http.get("/metrics").text
            )
            seen["engines"] = sorted({engine for engine, count in finished if float(count)})
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(play(sys.argv[1])), flush=True)
    os._exit(0)
