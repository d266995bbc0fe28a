"""verl's own Megatron engine class around a real Megatron-core model on two gloo ranks: what it sends, and the shards instead.

The engine is not built by verl, which needs CUDA for that: it gets the attributes that its ``get_per_tensor_param`` reads.
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
from tests.integration.verl import verl_platform  # noqa: F401 - a platform of verl's without accelerators

from weightsync.errors import WeightSyncError
from weightsync.integrations.stream_options import Options
from weightsync.integrations.verl.source import EngineShards
from weightsync.tensors.shards import ShardedState

CASE = Case("qwen3", tp=2, changes={"vocab_size": PADDED})


def engine_of(folder: str, **changes: Any) -> Any:
    from megatron.bridge import AutoBridge
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    engine = object.__new__(MegatronEngine)
    chunks = build(CASE)
    fill(chunks, 1)
    engine.module = wrapped(chunks)
    engine.bridge = AutoBridge.from_hf_pretrained(folder)
    engine.model_config = SimpleNamespace(hf_config=hf_config(CASE.family, CASE.changes), lora={}, local_path=folder)
    engine._is_offload_param = False
    engine.peft_cls, engine.vanilla_bridge, engine._qat_enabled, engine._hf_export_tasks = None, False, False, None
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def run(rank: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    initialize(CASE)
    engine = engine_of(folder)
    sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    source, manifest = EngineShards(SimpleNamespace(actor=SimpleNamespace(engine=engine))).source(
        Options.of({}, "test"), direct=True
    )
    streams = {"quantized": refused(engine_of(folder, _qat_enabled=True)), "adapted": refused(engine_of(folder, peft_cls=object))}
    assert {spec.dtype for spec in manifest} == {"bfloat16"}
    assert isinstance(source.state, ShardedState)
    _, shards = source.state.declare()
    wrong = [
        shard.name
        for shard in shards
        if not torch.equal(sent[shard.name][tuple(map(slice, shard.box.starts, shard.box.stops))], shard.tensor)
    ]
    elements = sum(shard.tensor.numel() for shard in shards)
    dist.barrier()
    dist.destroy_process_group()
    return {"sent": len(sent), "wrong": wrong, "elements": elements, "streams": streams}


def refused(engine: Any) -> bool:
    try:
        EngineShards(SimpleNamespace(actor=SimpleNamespace(engine=engine))).source(Options.of({}, "test"), direct=True)
    except WeightSyncError:
        return True
    return False


def main() -> None:
    stand_in()
    import megatron.bridge  # noqa: F401
    import transformers
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        config = hf_config(CASE.family, CASE.changes)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(Path(folder))
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as ranks:
            print(json.dumps(list(ranks.map(run, range(2), [folder] * 2))))


if __name__ == "__main__":
    main()
