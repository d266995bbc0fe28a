"""A rank of the GPU suite: ``python -m weightsync_bench.gpu_rank CONFIG`` executes commands, one on each line.

Trainer ranks hold DTensors, cut along the first dimension as in FSDP2. Engine ranks hold the shards of a tensor-parallel model.
Every tensor is a separate allocation, as in training frameworks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engine.fill.filler import PlanFiller
from weightsync.errors import WeightSyncError
from weightsync.model import Box, Layout, Manifest, PauseMode, TensorSpec
from weightsync.tensors.shard_loader import ShardLoader
from weightsync.tensors.shards import Shard, shard
from weightsync.trainer.trainer import Trainer
from weightsync_bench.gpu_job import Job, manifest_for
from weightsync_bench.peer import serve
from weightsync_bench.sharding import fsdp, tensor_parallel


def _boxes(manifest: Manifest, layout: Layout) -> Iterator[tuple[TensorSpec, Box]]:
    """Yield the tensor and the box of each row of a layout."""
    for row in range(len(layout)):
        yield manifest[int(layout.tensor[row])], layout.box(row, manifest)


def _memory(device: int) -> dict[str, int]:
    """Return the bytes in use: on the whole device, as the driver reports it, and by this process's tensors."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"device": total - free, "tensors": torch.cuda.memory_allocated(device)}


class _GpuTrainerRank:
    """Executes the commands of one trainer rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._rank, self._world, self._device = rank, len(job.on), job.on[rank]
        self._transport, self._dtype, self._changed = job.transport, torch.bfloat16 if job.masters else None, job.changed
        self._quantize = job.quantize
        torch.cuda.set_device(self._device)
        # The mesh is never used for communication, so a fake process group is sufficient.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self._world)
        mesh = DeviceMesh("cuda", list(range(self._world)))
        torch.cuda.set_device(self._device)
        manifest = manifest_for(job.model)
        self._state: dict[str, torch.Tensor] = {}
        self._local: list[torch.Tensor] = []
        for spec, box in _boxes(manifest, fsdp(manifest, self._world)[rank]):
            part = torch.empty(box.shape, dtype=torch.float32 if job.masters else torch.bfloat16, device=f"cuda:{self._device}")
            stride = torch.empty(spec.shape, device="meta").stride()
            self._local.append(part)
            self._state[spec.name] = DTensor.from_local(
                part, mesh, [ShardPlacement(0)], run_check=False, shape=torch.Size(spec.shape), stride=stride
            )
        self._trainer: Trainer

    def memory(self) -> dict[str, int]:
        return _memory(self._device)

    def join(self, url: str, token: str) -> dict[str, Any]:
        started = time.perf_counter()
        self._trainer = Trainer(
            self._state, url, token=token, rank=self._rank, world_size=self._world, transports=[self._transport], dtype=self._dtype,
            deltas=self._changed < 1, quantize=self._quantize,
        )  # fmt: skip
        return {"seconds": time.perf_counter() - started, "live": self._trainer._role.live}

    def change(self, version: int) -> None:
        """Fill all weights with random numbers that a model can compute with, or change some of the published words."""
        torch.manual_seed(version * 1000 + self._rank)
        for part in self._local:
            if version == 0 or self._changed == 1:
                part.view(torch.int16).random_(-32768, 32767).bitwise_and_(0xBFFF - 0x10000)  # the numbers between -2 and 2
                continue
            words = part.view(torch.int32 if part.itemsize == 4 else torch.int16)
            some = torch.rand(words.shape, device=words.device) < self._changed
            words ^= some.to(words.dtype) << (8 * (part.itemsize - 2))
        torch.cuda.synchronize()

    def train(self, seconds: float) -> None:
        """Keep the device busy with these weights for ``seconds``, as the first training steps do."""
        ended = time.monotonic() + seconds
        while time.monotonic() < ended:
            for part in self._local:
                part.view(torch.int16).random_(-32768, 32767)
            torch.cuda.synchronize()

    def publish(self, version: int) -> dict[str, Any]:
        started = time.monotonic()
        result = self._trainer.publish(version, timeout=120)
        return {"begun": started, "ended": time.monotonic(), "result": msgspec.to_builtins(result)}


class _Adapter(EngineAdapter):
    """Adapter with parameters, and a loader that copies this rank's parts of whole tensors into them."""

    name = "bench"
    follows = True  # the same list each time: they never move

    def __init__(self, manifest: Manifest, layout: Layout, device: int) -> None:
        self.times: dict[str, float] = {}
        self._manifest = manifest
        self._shards: list[Shard] = []
        for spec, box in _boxes(manifest, layout):
            part = torch.zeros(box.shape, dtype=torch.bfloat16, device=f"cuda:{device}")
            self._shards.append(shard(spec.name, part, spec.shape, box.starts))
        self._loader = ShardLoader(self._shards)

    def manifest(self) -> Manifest:
        return self._manifest

    def shards(self) -> Sequence[Shard]:
        return self._shards

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.times["paused"] = time.monotonic()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._loader.load(tensors)

    def resume(self) -> None:
        self.times["resumed"] = time.monotonic()


class _GpuEngineRank:
    """Executes the commands of one engine rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self._device = job, rank, job.to[rank]
        torch.cuda.set_device(self._device)
        manifest = manifest_for(job.model)
        self._adapter = _Adapter(manifest, tensor_parallel(manifest, len(job.to))[rank], self._device)
        self._engine: Engine

    def memory(self) -> dict[str, int]:
        return _memory(self._device)

    def join(self, url: str, token: str) -> dict[str, Any]:
        started = time.perf_counter()
        self._engine = Engine(
            self._adapter, "replica", url, token=token, rank=self._rank, world_size=len(self._job.to), delivery=self._job.delivery,
            bucket_bytes=self._job.bucket_bytes or None, staging_buckets=self._job.buffers, transports=[self._job.transport],
        )  # fmt: skip
        return {"seconds": time.perf_counter() - started}

    def last(self) -> dict[str, Any]:
        """Return times, version and memory of the last round."""
        filler, serving = self._engine._role._filler, self._engine.serving
        if not isinstance(filler, PlanFiller) or serving is None:
            raise WeightSyncError("no round has installed a version yet")
        return {
            **self._adapter.times, "serving": serving.number, "bytes": filler.nbytes, "staging_bytes": filler.staging_bytes,
            "table_bytes": filler.table_bytes, "times": filler.prepare_seconds,
        }  # fmt: skip


def main() -> None:
    """Execute commands until standard input ends."""
    config = json.loads(sys.argv[1])
    job = msgspec.convert(config["job"], Job)
    kind: Callable[[Job, int], Any] = _GpuTrainerRank if config["role"] == "trainer" else _GpuEngineRank
    rank = kind(job, config["rank"])
    serve(lambda name: getattr(rank, name))
    os._exit(0)  # without waiting for the device, because peers may have exited


if __name__ == "__main__":
    main()
