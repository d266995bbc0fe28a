"""Processes of the stream tests: trainer ranks that gather an FSDP2 model over gloo, and receivers, of which one ends early.

``python -m tests.integration.streams.stream_ranks FOLDER [SIGNAL SECONDS [TRANSPORT ...]]``: the second receiver gets the signal in
the middle of the second publication, and publications take at most so many seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightsync.engine.receiver import Receiver
from weightsync.trainer.stream import Stream
from weightsync.trainer.trainer import Trainer

ROUNDS = 3
RECEIVERS = 2
_SECONDS = 60.0


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(33, 33) for _ in range(6)]
    whole = nn.Sequential(nn.Embedding(101, 33), *layers)
    whole[3].to(torch.bfloat16)
    return whole


def gathered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As frameworks do: each is gathered when it is asked for, by all ranks, and is gone with the next."""
    for name, value in module.state_dict().items():
        assert isinstance(value, DTensor)
        yield name, value.full_tensor()


def train(rank: int, world_size: int, folder: str, seconds: float, transports: list[str] | None) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    limit = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit)
    mesh = init_device_mesh("cpu", (world_size,))
    with Trainer(Stream(window_bytes=8192), transports=transports) as trainer:
        trainer.wait_for_replicas(RECEIVERS, _SECONDS)
        for number in range(ROUNDS):
            module = model(number)
            for layer in module:
                fully_shard(layer, mesh=mesh)
            result = trainer.publish_stream(gathered(module), step=10 * number, timeout=seconds)
            good = sorted(replica.name for replica in result.replicas if replica.error is None)
            Path(folder, f"result-{number}-{rank}").write_text(f"{result.version} {result.step} {' '.join(good)}")
            dist.barrier()
    dist.destroy_process_group()


def receive(name: str, folder: str, ends_in: int, ends_by: int, transports: list[str] | None) -> None:
    torch.set_num_threads(1)
    with Receiver(name, transports=transports) as receiver:
        for number in range(ROUNDS):
            tensors = {}
            for batch in receiver.receive(_SECONDS):
                if number == ends_in:
                    os.kill(os.getpid(), ends_by)
                tensors.update({key: tensor.float().numpy().copy() for key, tensor in batch})
            np.savez(Path(folder, f"{name}-{number}.npz"), **tensors)  # type: ignore[arg-type]


def main() -> None:
    folder, *rest = sys.argv[1:]
    how, seconds, *transports = rest or ("SIGKILL", str(_SECONDS))
    ends_by, allowed = int(signal.Signals[how]), transports or None
    context = multiprocessing.get_context("fork")
    trainers = [context.Process(target=train, args=(rank, 2, folder, float(seconds), allowed)) for rank in range(2)]
    receivers = [
        context.Process(target=receive, args=(f"r{index}", folder, 1 if index else -1, ends_by, allowed))
        for index in range(RECEIVERS)
    ]
    for process in (*trainers, *receivers):
        process.start()
    for process in (*trainers, receivers[0]):
        process.join(2 * _SECONDS)
    receivers[1].kill()
    receivers[1].join(_SECONDS)
    codes = [process.exitcode for process in (*trainers, *receivers)]
    for process in (*trainers, *receivers):
        process.kill()
    if codes != [0, 0, 0, -signal.SIGKILL]:
        raise SystemExit(f"the processes ended with {codes}")


if __name__ == "__main__":
    main()
