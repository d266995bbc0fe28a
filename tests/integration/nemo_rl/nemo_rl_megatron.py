"""A program: a Megatron-core model on two gloo ranks, with the attributes of NeMo-RL's policy worker: its export, and its shards.

The worker's export is ``AutoBridge.export_hf_weights``, as in NeMo-RL. Prints what each rank saw.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.integration.megatron.exported_shards import begin, compared, print_of_ranks
from tests.integration.megatron.megatron_cases import PADDED, Case
from tests.integration.megatron.megatron_models import build, fill, wrapped
from tests.integration.megatron.optional_packages import stand_in

from weightsync.integrations.nemo_rl.workers import policy_shards
from weightsync.integrations.stream_options import Options

CASE = Case("qwen3", tp=2, changes={"vocab_size": PADDED})


def run(rank: int, folder: str) -> dict[str, Any]:
    from megatron.bridge import AutoBridge

    begin(CASE, rank, folder)
    chunks = build(CASE)
    fill(chunks, 1)
    (model,) = wrapped(chunks)
    worker = SimpleNamespace(
        cfg={"model_name": folder, "generation": {"vllm_cfg": {"precision": "bfloat16", "kv_cache_dtype": "auto"}}}, model=model,
        megatron_bridge=AutoBridge.from_hf_pretrained(folder), fp8_cfg=None, draft_model=None,
    )  # fmt: skip
    sent = {name: tensor.clone() for name, tensor in worker.megatron_bridge.export_hf_weights([model], show_progress=False)}
    source, manifest = policy_shards(worker, Options())
    wrong, _ = compared(source.state, sent)
    return {"sent": len(sent), "wrong": wrong, "names": sorted(sent) == sorted(spec.name for spec in manifest)}


def main() -> None:
    stand_in()
    import megatron.bridge  # noqa: F401

    print_of_ranks(CASE, run)


if __name__ == "__main__":
    main()
