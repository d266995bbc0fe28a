"""Two ranks of SGLang's own scheduler on a CPU: they stop at the same pass, and each takes its shards.

Needs the environment of ``make sglang-test``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integration.sglang.sglang_rank import UPDATES
from tests.integration.sglang.sglang_scheduler import (
    WITHOUT_SGLANG,
    install_stubs,
    make_checkpoint,
    make_experts_checkpoint,
    random_weights,
    use_environment,
)
from tests.processes import ranks

from weightsync.config import ServerSettings
from weightsync.server.server import BackgroundServer

pytestmark = [
    pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(WITHOUT_SGLANG, reason="SGLang is not installed here: make sglang-test"),
]  # fmt: skip

Settings = dict[str, Any]


OVERLAPPED: Settings = {"disable_overlap_schedule": False}
NORMAL: Settings = {"disable_overlap_schedule": True}
GROUPS = NORMAL | {"enable_dp_attention": True, "dp_size": 2}


@pytest.mark.parametrize(
    ("delivery", "settings", "vocabulary", "inner", "padding"),
    [
        ("direct", OVERLAPPED, 129, 96, [0, 126]),
        ("streamed", NORMAL, 129, 128, [0, 126]),
        ("streamed", OVERLAPPED, 100, 128, [0, 56]),
        ("direct", GROUPS, 129, None, [63, 126]),
    ],
)
def test_two_ranks_update_and_keep_a_request_that_runs(
    tmp_path: Path, delivery: str, settings: Settings, vocabulary: int, inner: int | None, padding: list[int]
) -> None:
    """SGLang pads 129 tokens to 192, and 100 to 128. On a CPU it also pads an inner size of 96.

    ``padding`` counts the rows at each rank, of the embedding and of the output layer. Groups of data-parallel attention share the
    second one only. They serve a mixture of experts, and a grammar of the second group is compiled all the time.
    """
    install_stubs()
    use_environment()
    from sglang.srt.server_args import PortArgs, ServerArgs
    from transformers import AutoModelForCausalLM

    directory = str(tmp_path / "checkpoint")
    if inner is None:
        make_experts_checkpoint(directory, vocab_size=vocabulary)
    else:
        make_checkpoint(directory, vocab_size=vocabulary, intermediate_size=inner)
    arguments = ServerArgs(model_path=directory, device="cpu", tp_size=2)
    arguments.resolve_once()
    sockets = json.dumps(dataclasses.asdict(PortArgs.init_new(arguments)))
    with BackgroundServer(ServerSettings.load({}, port=0, pause_mode="keep")) as server:
        environment = {
            "WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token, "WEIGHTSYNC_DELIVERY": delivery,
            "SGLANG_CPU_OMP_THREADS_BIND": f"0|{min(1, (os.cpu_count() or 1) - 1)}",
        }  # fmt: skip
        program = ("tests.integration.sglang.sglang_rank", directory, sockets, json.dumps(settings))
        with ranks(2, *program, environment=environment) as processes:
            outputs = [process.output(300).splitlines() for process in processes]
    assert [json.loads(lines[-1]) for lines in outputs] == [[rows, 0] for rows in padding]
    results = json.loads(outputs[0][-2])
    state = load_file(f"{directory}/model.safetensors")
    assert len(results) == (UPDATES if inner is None else UPDATES + 1)
    for seed, (used, verified, tokens, kept, versions) in enumerate(results, 1):
        random_weights(state, seed)
        save_file(state, f"{directory}/model.safetensors", {"format": "pt"})
        reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        reference.generation_config.eos_token_id = None  # SGLang was asked not to stop at it
        made = reference.generate(torch.tensor([[3, 1, 2]]), max_new_tokens=8, do_sample=False)
        assert (used, verified) == (delivery, "installed" if delivery == "direct" else "received")
        assert tokens == made[0, 3:].tolist()
        assert (kept, len(versions)) == ((600, 2) if seed <= UPDATES else (0, 0))
