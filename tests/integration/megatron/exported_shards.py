"""Shards of a Megatron-core model on two gloo ranks beside what a framework's own export sends of it."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.megatron.megatron_cases import Case, hf_config
from tests.integration.megatron.megatron_models import initialize

from weightsync.tensors.shards import Shard, ShardedState


def begin(case: Case, rank: int, folder: str) -> None:
    """Let this process be one of the two ranks."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    initialize(case)


def compared(state: object, sent: Mapping[str, torch.Tensor]) -> tuple[list[str], list[Shard]]:
    """Return the names of the shards that hold something else than was ``sent``, and all shards. Ends the process group."""
    assert isinstance(state, ShardedState)
    _, shards = state.declare()
    wrong = [
        shard.name
        for shard in shards
        if not torch.equal(sent[shard.name][tuple(map(slice, shard.box.starts, shard.box.stops))], shard.tensor)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return wrong, list(shards)


def print_of_ranks(case: Case, run: Callable[[int, str], dict[str, Any]]) -> None:
    """Print what ``run`` returns on both ranks, as one line of JSON. It gets the rank, and a folder with the model's checkpoint."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        model: Any = transformers.AutoModelForCausalLM.from_config(hf_config(case.family, case.changes), dtype=torch.bfloat16)
        model.save_pretrained(Path(folder))
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as ranks:
            print(json.dumps(list(ranks.map(run, range(2), [folder] * 2))))
