"""verl's own Megatron engine class around a real Megatron-core model on two gloo ranks: what it sends, and the shards instead.

The engine is not built by verl, which needs CUDA for that: it gets the attributes that its ``get_per_tensor_param`` reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.integration.megatron.exported_shards import begin, compared, print_of_ranks
from tests.integration.megatron.megatron_cases import PADDED, Case, hf_config
from tests.integration.megatron.megatron_models import build, fill, wrapped
from tests.integration.megatron.optional_packages import stand_in
from tests.integration.verl import verl_platform  # noqa: F401 - a platform of verl's without accelerators

from weightsync.errors import WeightSyncError
from weightsync.integrations.stream_options import Options
from weightsync.integrations.verl.source import EngineShards

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
    begin(CASE, rank, folder)
    engine = engine_of(folder)
    sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    source, manifest = EngineShards(SimpleNamespace(actor=SimpleNamespace(engine=engine))).source(
        Options.of({}, "test"), direct=True
    )
    streams = {"quantized": refused(engine_of(folder, _qat_enabled=True)), "adapted": refused(engine_of(folder, peft_cls=object))}
    assert {spec.dtype for spec in manifest} == {"bfloat16"}
    wrong, shards = compared(source.state, sent)
    elements = sum(shard.tensor.numel() for shard in shards)
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
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    print_of_ranks(CASE, run)


if __name__ == "__main__":
    main()
