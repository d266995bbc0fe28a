"""How much longer a streamed update of a real vLLM takes than vLLM's own loading from memory, in one run.

``python -m benchmarks.vllm_load [ROUNDS [HIDDEN LAYERS]]``, with vLLM installed; the model is the demo's, or a
Llama of that size. Prints one line of JSON. The floor is vLLM's own ``reload_weights`` of a checkpoint in the
worker's memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # vLLM's workers import this folder, too


def milliseconds(values: list[float]) -> float:
    """The median."""
    return round(1000 * statistics.median(values), 2)


def main(rounds: int, sizes: tuple[int, ...]) -> None:
    """See the module."""
    import torch
    from examples.demo.models import build_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    import weightsync
    from weightsync.engines.vllm import attach

    torch.set_num_threads(1)
    model: Any
    if sizes:
        hidden, layers = sizes
        config = LlamaConfig(
            vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=512,
        )  # fmt: skip
        model = torch.nn.Module.to(LlamaForCausalLM(config), dtype=torch.bfloat16)
    else:
        model = build_model("llama", tied=False, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            weight_transfer_config=WeightTransferConfig(backend="weightsync"),
            worker_extension_cls="benchmarks.vllm_loading.Loading",
        )  # fmt: skip
        results, floors = [], []
        with weightsync.Trainer(model) as trainer:
            where, token = trainer.environment["WEIGHTSYNC_COORDINATOR"], trainer.environment["WEIGHTSYNC_TOKEN"]
            llm.collective_rpc("watch_installs")
            with attach(llm, "vllm", where, token=token) as attached:
                for number in range(1, rounds + 2):
                    with attached.in_use(60):
                        (own,) = llm.collective_rpc("time_own_loading", args=(folder, 3))
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(0.01)
                    (replica,) = trainer.publish(number, timeout=120).replicas
                    if number > 1:  # the first makes connections and staging
                        floors += own
                        results.append(replica)
                with attached.in_use(60):
                    (installs,) = llm.collective_rpc("installs")
    taken = [one.phases["move"] + one.phases["commit"] for one in results]
    print("RESULT " + json.dumps({
        "tensors": len(model.state_dict()), "bytes": results[0].nbytes, "rounds": rounds, "own_loading_ms": milliseconds(floors),
        "move_and_commit_ms": milliseconds(taken), "ratio": round(statistics.median(taken) / statistics.median(floors), 3),
        "loading_in_worker_ms": milliseconds(installs[1:]),
        "ratio_in_worker": round(statistics.median(installs[1:]) / statistics.median(floors), 3),
        "phases_ms": {name: milliseconds([one.phases[name] for one in results]) for name in results[0].phases},
        "parts_ms": {name: milliseconds([one.parts[name] for one in results]) for name in results[0].parts},
        "paused_ms": milliseconds([one.paused_seconds for one in results]),
    }))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7, tuple(int(one) for one in sys.argv[2:4]))
