"""``publish_stream`` against its floor: the slower of gathering alone and sending alone. Start it on every trainer rank.

::

    torchrun --nproc-per-node 2 -m benchmarks.streams --megabytes 512                              # gloo, host windows
    torchrun --nproc-per-node 2 -m benchmarks.streams --model qwen3-30b-a3b --device cuda          # NCCL gathers, CUDA IPC

Every rank holds half of each tensor, as FSDP2 does, and gathers with ``full_tensor()``. Rank 0 starts a receiver for each rank, on
that rank's device. A receiver takes batches and does nothing with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from weightsync.bench.gpu_job import MODELS
from weightsync.engine.receiver import Receiver
from weightsync.model import TensorSpec
from weightsync.tensors.shards import torch_dtype
from weightsync.trainer.agent import Trainer
from weightsync.trainer.stream import Stream

__all__ = ["main"]

_Items = Iterable[tuple[str, torch.Tensor]]
_HIDDEN = 1024


def _shapes(options: argparse.Namespace) -> list[TensorSpec]:
    if options.model:
        return MODELS[options.model]()
    count = max(options.megabytes * (1 << 20) // (2 * _HIDDEN * _HIDDEN), 1)
    return [TensorSpec(f"layers.{number}.weight", (_HIDDEN, _HIDDEN), "bfloat16") for number in range(count)]


def _receive(name: str, device: str) -> None:
    """Be a receiver until standard input ends: one publication for each line."""
    with Receiver(name, device=device if device != "cpu" else None) as receiver:
        print("joined", flush=True)
        for _ in sys.stdin:
            for batch in receiver.receive():
                del batch


def _start_receivers(trainer: Trainer, devices: list[str], owned: ExitStack) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, **trainer.environment}
    processes = []
    for number, device in enumerate(devices):
        command = [sys.executable, "-m", "benchmarks.streams", "--receive", f"receiver-{number}", "--device", device]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL)
        owned.enter_context(process)
        if process.stdin is not None:
            owned.callback(process.stdin.close)
        processes.append(process)
    return processes


def _timed(act: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print one JSON object on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS))
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window-megabytes", type=int, default=0)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--receive")
    options = parser.parse_args()
    if options.receive:
        _receive(options.receive, options.device)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = options.device.startswith("cuda")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (world_size,))
    specs = _shapes(options)
    shards = {}
    for spec in specs:
        local = torch.full((spec.shape[0] // world_size, *spec.shape[1:]), rank + 1.0, dtype=torch_dtype(spec.dtype), device=device)
        shards[spec.name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in shards.items():
            yield name, value.full_tensor()

    def drained() -> None:
        for _, tensor in gathering():
            del tensor

    with ExitStack() as owned:
        stream = Stream(options.window_megabytes << 20 or None, options.windows, device if cuda else None)
        trainer = owned.enter_context(Trainer(stream))
        receivers = []
        if rank == 0:
            names = [f"cuda:{number}" if cuda else "cpu" for number in range(world_size)]
            receivers = _start_receivers(trainer, names, owned)
        trainer.wait_for_replicas(world_size)

        def publish(items: _Items) -> None:
            for process in receivers:
                assert process.stdin is not None
                process.stdin.write("receive\n")
                process.stdin.flush()
            result = trainer.publish_stream(items)
            assert all(replica.error is None for replica in result.replicas), result

        whole = [(name, value.full_tensor()) for name, value in shards.items()]
        publish(whole)  # connects, and compiles kernels
        gather = [_timed(drained, device) for _ in range(options.repeats)]
        send = [_timed(lambda: publish(whole), device) for _ in range(options.repeats)]
        whole.clear()
        both = [_timed(lambda: publish(gathering()), device) for _ in range(options.repeats)]
        if rank == 0:
            floor = max(min(gather), min(send))
            report = {
                "bytes": sum(spec.nbytes for spec in specs), "tensors": len(specs), "ranks": world_size, "device": device.type,
                "gather_seconds": gather, "send_seconds": send, "stream_seconds": both, "floor_seconds": floor,
                "ratio": min(both) / floor,
            }  # fmt: skip
            print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
