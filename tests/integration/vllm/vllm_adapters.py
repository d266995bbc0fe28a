"""A program: LoRA adapters of PEFT into a real vLLM server on this CPU; prints what was seen as one line of JSON.

``python vllm_adapters.py DIRECTORY``. See :mod:`vllm_rounds`.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model
from tests.integration.vllm.vllm_rounds import PROMPTS, TOKENS, build, expected, joined, serving, tell_environment

import weightsync
from weightsync.config import ServerSettings
from weightsync.errors import RoundFailed
from weightsync.server.server import BackgroundServer

FLAGS = ("--skip-tokenizer-init", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8")
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def answers_of(model: Any) -> list[list[int]]:
    """Transformers' and PEFT's greedy answers in float32."""
    return expected(torch.nn.Module.to(copy.deepcopy(model), dtype=torch.float32).merge_and_unload())


class Asked:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def raw(self, model: str, prompt: list[int], tokens: int = TOKENS, headers: dict[str, str] | None = None) -> httpx.Response:
        wish = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.http.post("/v1/completions", json=wish, headers=headers)

    def tokens(self, model: str) -> tuple[list[list[int]], str]:
        bodies = [self.raw(model, prompt).raise_for_status().json() for prompt in PROMPTS]
        return [body["choices"][0]["token_ids"] for body in bodies], bodies[0]["model"]


def play(directory: str) -> dict[str, Any]:
    base = build(1, directory)
    peft_model = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, target_modules=TARGETS, rank_pattern={"o_proj": 4}))
    seen: dict[str, Any] = {}
    with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator:
        tell_environment(coordinator, directory)
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # for those of another client
        with serving(directory, 1, {}, (*FLAGS, "--served-model-name", "tiny", "org/tiny")) as server:
            asked = Asked(server.http)
            joined(coordinator, 1)
            at: dict[str, Any] = {"coordinator": coordinator.url, "token": coordinator.token}
            expected = {}
            with weightsync.Adapters(peft_model, None, **at) as adapters:  # the base is what vLLM loaded
                for number in (1, 2):
                    randomize(peft_model, number)
                    expected[number] = answers_of(peft_model)
                    result = adapters.publish("alice/math", number, timeout=60)
                    seen[f"publish{number}"] = [
                        (replica.error, replica.verified, replica.paused_seconds) for replica in result.replicas
                    ]
                    seen[f"seconds{number}"] = result.seconds
                seen["differ"] = expected[1] != expected[2]
                seen["newest"] = asked.tokens("alice/math") == (expected[2], "alice/math@2")
                seen["first"] = asked.tokens("alice/math@1") == (expected[1], "alice/math@1")
                seen["again"] = asked.tokens("alice/math")[0] == expected[2]
                seen["unknown"] = [asked.raw(name, PROMPTS[0]).status_code for name in ("alice/math@3", "bob/code")]
                for model in ("alice/math", "alice/math@2", "alice/math@1", "tiny"):
                    for demand in ("Version", "Min-Version"):
                        answer = asked.raw(model, PROMPTS[0], headers={f"X-Weightsync-{demand}": "alice/math@2"})
                        seen.setdefault("contradicted", []).append(answer.status_code)
                try:
                    adapters.publish("org/tiny", 1, timeout=60)
                except RoundFailed as error:
                    seen["taken"] = str(error)
                seen["base before"] = asked.raw("org/tiny", PROMPTS[0]).json()["model"]
                seen["foreign"] = replaced(peft_model, asked, f"{directory}/foreign")
                seen["kept"] = asked.tokens("alice/math@2") == (expected[2], "alice/math@2")
                running: list[httpx.Response] = []
                long = threading.Thread(target=lambda: running.append(asked.raw("alice/math", PROMPTS[0], 120)))
                long.start()
                randomize(peft_model, 3)
                expected[3] = answers_of(peft_model)
                adapters.publish("alice/math", 3, timeout=60)
                seen["retired"] = adapters.retire("alice/math", keep=1)
                long.join()
                body = running[0].json()
                seen["running"] = [body["model"] == "alice/math@2", body["choices"][0]["token_ids"][:TOKENS] == expected[2][0]]
                seen["gone"] = [asked.raw(f"alice/math@{number}", PROMPTS[0]).status_code for number in (1, 2)]
                seen["newer"] = asked.tokens("alice/math") == (expected[3], "alice/math@3")
                for number in range(3):  # more than max_loras: vLLM evicts, and takes them again
                    randomize(peft_model, 10 + number)
                    expected[10 + number] = answers_of(peft_model)
                    adapters.publish(f"team/n{number}", 1, timeout=60)
                seen["evicted"] = [asked.tokens(f"team/n{number}")[0] == expected[10 + number] for number in (0, 1, 2, 0)]
                seen["others"] = asked.tokens("alice/math")[0] == expected[3]
                try:
                    adapters.publish("team/n3", 1, timeout=60)
                except RoundFailed as error:
                    seen["full"] = str(error)
                for number in range(3):
                    adapters.retire(f"team/n{number}", keep=0)
                for name, wrong in (("rank", {"r": 16}), ("module", {"target_modules": ["embed_tokens"]})):
                    other = get_peft_model(
                        build(1, f"{directory}/other"), LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **wrong})
                    )
                    with weightsync.Adapters(other, None, **at) as refused:
                        try:
                            refused.publish("bob/code", 1, timeout=60)
                        except RoundFailed as error:
                            seen[f"wrong_{name}"] = str(error)
                seen["base"] = asked.tokens("tiny")[1]
            print("SEEN " + json.dumps(seen), flush=True)
            seen["update"] = update(peft_model, asked, at)
    return seen


def replaced(peft_model: Any, asked: Asked, directory: str) -> list[list[Any]]:
    """Another client loads an adapter from files under a label, and under its name: statuses, and whether the error says why."""
    randomize(peft_model, 90)
    peft_model.save_pretrained(directory)
    answers = []
    for name in ("alice/math@2", "alice/math", "dave/own"):
        wish = {"lora_name": name, "lora_path": directory, "load_inplace": True}
        answer = asked.http.post("/v1/load_lora_adapter", json=wish)
        answers.append([answer.status_code, "weightsync serves alice/math@" in answer.text])
    asked.http.post("/v1/unload_lora_adapter", json={"lora_name": "dave/own"}).raise_for_status()
    return answers


def update(peft_model: Any, asked: Asked, at: dict[str, Any]) -> dict[str, Any]:
    """The base is updated, and adapters stay or go."""
    seen: dict[str, Any] = {}
    with weightsync.Trainer(weightsync.base_weights(peft_model), **at) as trainer:
        trainer.wait_for_replicas(1, 30)
        result = trainer.publish(1, timeout=60)
        seen["base"] = [(replica.error, replica.verified, replica.delivery) for replica in result.replicas]
        with (
            weightsync.Adapters(peft_model, trainer) as kept,
            weightsync.Adapters(peft_model, trainer, on_base_update="refuse") as strict,
        ):
            randomize(peft_model, 20)
            kept.publish("carol/kept", 1, timeout=60)
            strict.publish("carol/strict", 1, timeout=60)
            seen["before"] = [asked.tokens(name)[0] == answers_of(peft_model) for name in ("carol/kept", "carol/strict")]
            with torch.no_grad():
                for name, parameter in peft_model.named_parameters():
                    if "lora_" not in name:
                        parameter.mul_(1.0 if "norm" in name or "embed" in name else 1.25)
            trainer.publish(2, timeout=60)
            seen["after"] = asked.tokens("carol/kept")[0] == answers_of(peft_model)
            seen["strict"] = asked.raw("carol/strict", PROMPTS[0]).status_code
            seen["again"] = [replica.error for replica in strict.publish("carol/strict", 2, timeout=60).replicas]
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(play(sys.argv[1])), flush=True)
    os._exit(0)
