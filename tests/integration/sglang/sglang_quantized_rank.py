# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""One of two tensor-parallel ranks of SGLang with a quantized model: ``python sglang_quantized_rank.py RANK FOLDER CASE SOCKETS``.

Rank 0 publishes. Each prints the updates as it saw them, and which of its tensors are not those of SGLang's own loading at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.integration.quantized_checkpoints import quantized
from tests.integration.sglang.sglang_quantized import UPDATES, arguments, different, fill, loaded, stand_in
from tests.integration.sglang.sglang_scheduler import RunningScheduler, install_stubs, use_environment


def main(rank, folder, case, sockets):
    from weightsync.trainer.trainer import Trainer

    torch.set_num_threads(1)
    install_stubs()
    use_environment()
    stand_in(case)
    state, updates = load_file(folder / "plain" / "model.safetensors"), []
    served = str(folder / "served")
    with RunningScheduler(served, rank=rank, sockets=json.loads(sockets), tp_size=2, **arguments(case)) as running:
        if rank:
            running.wait_until_ended()
        else:
            coordinator, token = os.environ["WEIGHTSYNC_COORDINATOR"], os.environ["WEIGHTSYNC_TOKEN"]
            own = {"dtype": torch.bfloat16, "quantize": "as-served", "rank": 0, "world_size": 1}
            with Trainer(state, coordinator, token=token, **own) as trainer:
                for seed in range(UPDATES):
                    fill(state, seed)
                    replica = trainer.publish(timeout=60.0).replicas[0]
                    updates.append([replica.state, replica.delivery, replica.verified])
        fill(state, UPDATES - 1)
        runner = running.scheduler.tp_worker.model_runner
        return [updates, different(runner.model, loaded(runner, folder / str(rank), quantized(state)))]


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])), flush=True)
