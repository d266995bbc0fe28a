"""QLoRA: an adapter over a base that bitsandbytes really holds in 4 bits gives the trainer's answers in an engine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import ranks

from weightsync import Engine
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.server.server import BackgroundServer

pytestmark = [
    pytest.mark.vllm,  # whose environment has PEFT
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # Transformers', while it is imported
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("peft", "bitsandbytes")), reason="needs PEFT and bitsandbytes"
    ),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_adapter_over_a_base_in_4_bits_gives_the_trainers_answers(world_size: int, tmp_path: Path) -> None:
    from tests.integration.trl.qlora_ranks import IDS, quantized
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    made = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=16))
    torch.nn.Module.to(made, dtype=torch.bfloat16)  # in place
    made.save_pretrained(tmp_path)
    served = quantized(str(tmp_path)).dequantize()  # in bfloat16, what the trainer computes with
    engine = ModuleAdapter(served, adapter_slots=4)
    with (
        BackgroundServer(ServerSettings.load({}, port=0)) as server,
        Engine(engine, "replica-0", server.url, token=server.token),
        ranks(
            world_size, "tests.integration.trl.qlora_ranks", world_size, tmp_path, server.url,
            environment={"WEIGHTSYNC_TOKEN": server.token},
        ) as processes,
    ):  # fmt: skip
        reports = [json.loads(process.line(150)) for process in processes]
        assert [process.exit_code(30) for process in processes] == [0] * world_size
        plain = served(input_ids=IDS).logits[0, -1].detach()
        for report in reports:
            assert report["verified"] == ["installed", None]
            assert "quantized (QLoRA)" in report["refused"] and "Adapters(model, base=None)" in report["refused"]
            for number, logits in enumerate(report["logits"]):
                with torch.no_grad(), engine.in_use(adapter=f"alice/math@{number}"):
                    answer = served(input_ids=IDS).logits[0, -1]
                assert torch.allclose(answer.float(), torch.tensor(logits), atol=0.03), "PEFT's own"
                assert float((answer - plain).abs().max()) > 0.3
