"""Publishes versions with deltas into a real vLLM that loads them, and prints what crossed and what it loaded: ``FOLDER RANKS``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tests.integration.vllm.vllm_rounds import build, expected, joined, offline

import weightsync
from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

STEPS = [
    [], ["model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"], ["model.embed_tokens.weight"], [],
    ["model.layers.0.mlp.gate_proj.weight"], ["model.layers.1.input_layernorm.weight"], ["model.layers.0.self_attn.v_proj.weight"],
    ["model.layers.1.mlp.up_proj.weight"],
]  # fmt: skip
ALL, FAILING, SCRIBBLED = 0, 4, 7
"""The step in which every tensor changes, the one whose load fails in a worker at first, and the one before which others write."""


def play(directory: str, ranks: int) -> list[dict[str, Any]]:
    model = build(ranks, directory)
    seen: list[dict[str, Any]] = []
    parameters = dict(model.named_parameters())
    with ExitStack() as owned:
        coordinator = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0)))
        vllm: Any = owned.enter_context(offline(directory, ranks, coordinator))

        def ask(method: str) -> Any:
            with vllm.attached.in_use(30):
                return vllm.llm.collective_rpc(method)

        with weightsync.Trainer(model, coordinator.url, token=coordinator.token, deltas=True) as trainer:
            joined(coordinator, ranks)
            ask("note_loads")
            for step, names in enumerate(STEPS):
                with torch.no_grad():
                    for name in parameters if step == ALL else names:
                        parameters[name].mul_(torch.linspace(0.5, 1.6, parameters[name].shape[-1]).bfloat16())
                if step == FAILING:
                    vllm.fail_next_load()
                elif step == SCRIBBLED:
                    ask("scribble")
                [replica] = trainer.publish(step + 1, timeout=60).replicas
                loaded = ask("noted_loads")
                answers = vllm.generate()[0]
                seen.append(
                    {
                        "base": replica.base, "nbytes": replica.nbytes, "verified": replica.verified, "loaded": loaded,
                        "wanted": sum(parameters[name].nbytes for name in (parameters if step == ALL else names)),
                        "equal": answers == expected(model), "answers": answers, "phases": replica.phases,
                        "parts": replica.parts,
                    }
                )  # fmt: skip
    return seen


if __name__ == "__main__":
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before]).rstrip(os.pathsep)  # for what vLLM starts
    print("RESULT " + json.dumps({"steps": play(sys.argv[1], int(sys.argv[2]))}), flush=True)
