"""Plans DeepSeek-V3 from 1,024 Megatron ranks to 4 vLLM replicas: ``python -m benchmarks.megatron_planning [--json]``.

The trainer has TP 8, PP 8 with 7 layers in the first and 5 in the last stage, EP 32, ETP 1 and DP 16; each replica has TP 32. Only
shapes are real: nothing holds weights. The goals are 20 seconds and 4 GB for a coordinator that has all layouts.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from benchmarks.megatron_layouts import MegatronLayouts, stages
from weightsync.coordinator.negotiation import negotiate, source_coverage
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.model import Layout, Manifest
from weightsync.protocol.messages import PROTOCOL, Hello, Host
from weightsync_bench.sharding import tensor_parallel

__all__ = ["deepseek_v3", "main", "measure"]

_STAGES = stages((7, 8, 8, 8, 8, 9, 8, 5))
_TP, _EP, _RANKS, _REPLICAS, _ENGINE_TP, _EXPERTS = 8, 32, 1024, 4, 32, 256
_HOST_RANKS = 8


def deepseek_v3() -> Any:
    """The configuration of DeepSeek-V3, as far as rules read it."""
    return SimpleNamespace(
        model_type="deepseek_v3", vocab_size=129_280, hidden_size=7168, intermediate_size=18_432, moe_intermediate_size=2048,
        num_hidden_layers=61, num_attention_heads=128, n_routed_experts=_EXPERTS, n_shared_experts=1, first_k_dense_replace=3,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip


def _trainer(model: MegatronLayouts) -> dict[str, TrainerRank]:
    """All ranks in Megatron's order: tensor parallel ranks are neighbors, pipeline stages are far apart."""
    each = _RANKS // len(_STAGES)
    ranks: dict[str, TrainerRank] = {}
    for stage, layers in enumerate(_STAGES):
        layouts: list[Layout] = []
        for place in range(_EP):
            experts = range(place * _EXPERTS // _EP, (place + 1) * _EXPERTS // _EP)
            layouts.append(model.layout(layers, experts, tp=(place % _TP, _TP), first=stage == 0, last=stage == len(_STAGES) - 1))
        for number in range(stage * each, (stage + 1) * each):
            hello = _hello("trainer", number, _RANKS)
            ranks[f"trainer/{number}"] = TrainerRank(hello, model.manifest, layouts[number % _EP])
    return ranks


def _engines(manifest: Manifest, replica: str) -> dict[str, EngineRank]:
    return {
        f"{replica}/{rank}": EngineRank(_hello(replica, rank, _ENGINE_TP), manifest, layout)
        for rank, layout in enumerate(tensor_parallel(manifest, _ENGINE_TP))
    }


def _hello(name: str, rank: int, world_size: int) -> Hello:
    return Hello(
        PROTOCOL, "run", "trainer" if name == "trainer" else "engine", name, rank, world_size, session=f"{name}{rank}",
        host=_host(name, rank), pid=0, manifest=(), bucket_bytes=256 << 20,
    )  # fmt: skip


def _host(name: str, rank: int) -> Host:
    return Host(f"{name}-{rank // _HOST_RANKS}", f"{name}-{rank // _HOST_RANKS}")


def measure() -> dict[str, float]:
    """Check the trainer's coverage and make the plans of all replicas, each with its ranks' slices; what it took."""
    model = MegatronLayouts(deepseek_v3())
    trainers = _trainer(model)
    replicas = {f"vllm-{number}": _engines(model.manifest, f"vllm-{number}") for number in range(_REPLICAS)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    source_coverage(model.manifest, trainers, "the trainer")
    covered = time.perf_counter()
    plans = [negotiate(replica, trainers, engines) for replica, engines in replicas.items()]
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    busiest = Counter[str]()
    for plan in plans:
        for piece in plan.slices.values():
            busiest.update(source.member for source in piece.sources)
    return {
        "tensors": len(model.manifest), "bytes": model.manifest.nbytes,
        "trainer_rows": sum(len(rank.layout) for rank in trainers.values()),
        "engine_rows": sum(len(rank.layout or ()) for engines in replicas.values() for rank in engines.values()),
        "sources_read": len(busiest), "readers_of_the_busiest": max(busiest.values()),
        "coverage_seconds": covered - started, "plans_seconds": ended - covered, "seconds": ended - started,
        "before_bytes": before << 10, "peak_bytes": peak << 10,
    }  # fmt: skip


def main() -> int:
    """Print the figures."""
    found = measure()
    print(json.dumps(found) if "--json" in sys.argv else "\n".join(f"{name}: {value:,.6g}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
