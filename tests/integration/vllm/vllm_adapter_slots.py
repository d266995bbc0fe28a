"""A program: adapters in a real vLLM of several ranks are read back from its slots; prints what was seen as one line of JSON.

``python vllm_adapter_slots.py DIRECTORY RANKS [MUTANT]``. See :mod:`vllm_rounds`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from peft import LoraConfig, get_peft_model
from tests.integration.vllm.vllm_adapters import FLAGS, Asked, answers_of, randomize
from tests.integration.vllm.vllm_rounds import PROMPTS, build, joined, serving, tell_environment

import weightsync
from weightsync.config import ServerSettings
from weightsync.errors import RoundFailed
from weightsync.server.server import BackgroundServer

TARGETS = {"fused": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "rows": ["o_proj", "down_proj"]}


def play(directory: str, ranks: int, mutant: str = "") -> dict[str, Any]:
    seen: dict[str, Any] = {}
    models = {
        name: get_peft_model(build(1, directory), LoraConfig(r=rank, lora_alpha=12, target_modules=targets))
        for (name, targets), rank in zip(TARGETS.items(), (8, 4), strict=True)
    }
    with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator:
        tell_environment(coordinator, directory)
        flags = (*FLAGS, "--max-cpu-loras", "16", *(("--fully-sharded-loras",) if ranks > 1 else ()))
        with serving(directory, ranks, {}, flags) as server:
            asked = Asked(server.http)
            joined(coordinator, ranks)

            def publish(adapters: weightsync.Adapters, name: str) -> list[Any]:
                try:
                    result = adapters.publish(name, timeout=90)
                except RoundFailed as error:
                    return [str(error), asked.raw(name, PROMPTS[0]).status_code]
                replica = result.replicas[0]
                return [replica.verified, replica.delivery_reason]

            def fault(method: str, *arguments: int | str) -> None:
                server.http.post("/collective_rpc", json={"method": method, "args": list(arguments)}).raise_for_status()

            if mutant:
                fault("plant", mutant)
            at: dict[str, Any] = {"coordinator": coordinator.url, "token": coordinator.token}
            for name, model in models.items():
                randomize(model, len(seen))
                with weightsync.Adapters(model, None, **at) as adapters:
                    seen[name] = publish(adapters, f"alice/{name}")
                    seen[f"{name} answers"] = asked.tokens(f"alice/{name}")[0] == answers_of(model)
                    if name == "rows":
                        for what, spoiled in (("spoiled", ("lora_a_stacked", 0)), ("left", ("lora_a_stacked", -1))):
                            fault("spoil_slots", ranks - 1, *spoiled)
                            seen[what] = publish(adapters, f"bob/{what}")
                            fault("heal_slots")
                        seen["after"] = publish(adapters, "bob/after")
                        seen["after answers"] = asked.tokens("bob/after")[0] == answers_of(model)
                        fault("compute_in_slots")
                        adapters.retire("alice/fused", keep=0)
            with weightsync.Adapters(models["fused"], None, **at) as adapters:
                seen["computed"] = publish(adapters, "alice/computed")
                seen["computed answers"] = asked.tokens("alice/computed")[0] == answers_of(models["fused"])
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(play(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])), flush=True)
    os._exit(0)
