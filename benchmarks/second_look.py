"""Time of the look for the engine's parameters in a round's pause, by number of tensors: ``python -m benchmarks.second_look``.

Each tensor is in a separate layer (the worst case) or, in the row ``transformers``, the experts of a layer share a parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightsync.engine.engine_role import EngineRole
from weightsync.engines.module import ModuleAdapter
from weightsync.gc_pause import gc_paused
from weightsync.transports.hostinfo import this_host

SIZES = (300, 3_000, 18_867)  # the last: the tensors of Qwen3-30B-A3B's checkpoint
LAYERS, EXPERTS = 48, 128  # of Qwen3-30B-A3B
REPETITIONS = 41


def experts(tensors: int) -> nn.Module:
    """``tensors`` matrices, each in a separate layer, three layers in a block."""
    blocks = [
        nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("gate", "up", "down")[: tensors - first]})
        for first in range(0, tensors, 3)
    ]
    return nn.ModuleList(blocks)


def transformers_model() -> nn.Module:
    """A small Qwen3 with experts: Transformers keeps all experts of a layer in two parameters, its checkpoint in 384 tensors."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes: dict[str, Any] = {"hidden_size": 16, "moe_intermediate_size": 4, "intermediate_size": 8, "head_dim": 4, "vocab_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(num_hidden_layers=LAYERS, num_experts=EXPERTS, **sizes, **heads)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def milliseconds(work: Callable[[], object]) -> list[float]:
    """Of each repetition, sorted."""
    taken = []
    with gc_paused():
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            work()
            taken.append(1e3 * (time.perf_counter() - started))
    return sorted(taken)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'tensors':>8} {'ms':>26}: median  least  9 of 10")
    for tensors in (*SIZES, 0):
        adapter = ModuleAdapter(experts(tensors) if tensors else transformers_model())
        role = EngineRole(adapter, ["inproc"], this_host())
        adapter.begin()
        held = role.session.shards()
        model = "" if tensors else "transformers, "

        def look(role: EngineRole = role, held: object = held) -> None:
            shards = role.session.shards()
            if shards is None or not role._unmoved(shards, held):  # type: ignore[arg-type]
                raise SystemExit("nothing has moved")

        looks: dict[str, Callable[[], object]] = {"second look": look, "first look": adapter._followed.now}
        for what, work in looks.items():
            taken = milliseconds(work)
            row = f"{len(held or ()):>8} {model + what:>26}:"
            print(f"{row} {statistics.median(taken):6.2f} {taken[0]:6.2f} {taken[int(0.9 * len(taken))]:6.2f}")
        role.close()


if __name__ == "__main__":
    main()
