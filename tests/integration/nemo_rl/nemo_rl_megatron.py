"""A program: a Megatron-core model on two gloo ranks, with the attributes of NeMo-RL's policy worker: its export, and its shards.

The worker's export is ``AutoBridge.export_hf_weights``, as in NeMo-RL. Prints what each rank saw.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.megatron.megatron_cases import PADDED, Case, hf_config
from tests.integration.megatron.megatron_models import build, fill, initialize, wrapped
from tests.integration.megatron.optional_packages import stand_in

from weightsync.integrations.nemo_rl.workers import policy_shards
from weightsync.integrations.stream_options import Options
from weightsync.tensors.shards import ShardedState

CASE = Case("qwen3", tp=2, changes={"vocab_size": PADDED})


def run(rank: int, folder: str) -> dict[str, Any]:
    from megatron.bridge import AutoBridge

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    initialize(CASE)
    chunks = build(CASE)
    fill(chunks, 1)
    (model,) = wrapped(chunks)
    worker = SimpleNamespace(
        cfg={"model_name": folder, "generation": {"vllm_cfg": {"precision": "bfloat16", "kv_cache_dtype": "auto"}}}, model=model,
        megatron_bridge=AutoBridge.from_hf_pretrained(folder), fp8_cfg=None, draft_model=None,
    )  # fmt: skip
    sent = {name: tensor.clone() for name, tensor in worker.megatron_bridge.export_hf_weights([model], show_progress=False)}
    source, manifest = policy_shards(worker, Options())
    assert isinstance(source.state, ShardedState)
    _, shards = source.state.declare()
    wrong = [
        shard.name
        for shard in shards
        if not torch.equal(sent[shard.name][tuple(map(slice, shard.box.starts, shard.box.stops))], shard.tensor)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return {"sent": len(sent), "wrong": wrong, "names": sorted(sent) == sorted(spec.name for spec in manifest)}


def main() -> None:
    stand_in()
    import megatron.bridge  # noqa: F401
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        config = hf_config(CASE.family, CASE.changes)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(Path(folder))
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as ranks:
            print(json.dumps(list(ranks.map(run, range(2), [folder] * 2))))


if __name__ == "__main__":
    main()
