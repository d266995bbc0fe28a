"""A rank of the broadcast cases: ``python -m benchmarks.gpu_broadcast_rank CONFIG`` answers commands line by line.

Rank 0 holds a model, every tensor an allocation of its own; the others receive it into theirs. ``flat`` is the floor: one buffer,
broadcast in pieces of 1 GiB until as many bytes have moved. ``by_tensor`` and ``concatenated`` are what others do, in a few lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.tensors.copy_table import TILE_BYTES, CopyTable
from weightsync.tensors.device_memory import DeviceDigest, layout_by_shard
from weightsync.tensors.shards import shard
from weightsync.transports.broadcast.nccl import PROGRAMS, PackedBroadcast, broadcast_frames
from weightsync.transports.broadcast.process_groups import Enqueue, ProcessGroup, StoreRendezvous, init_custom_process_group
from weightsync.transports.net.frames import cut_tiles
from weightsync_bench.gpu_job import manifest_for
from weightsync_bench.peer import serve

__all__ = ["main"]

_PIECE = 1 << 30
_SECONDS = 90.0


class _Rank:
    """Answers commands as one rank, on the GPU of its number."""

    def __init__(self, model: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        manifest = manifest_for(model)
        shards = [
            shard(spec.name, torch.zeros(spec.shape, dtype=torch.bfloat16, device=self._device), spec.shape, [0] * len(spec.shape))
            for spec in manifest
        ]
        self._tensors = [one.tensor.view(torch.uint8).view(-1) for one in shards]
        self._nbytes = sum(map(len, self._tensors))
        layout = layout_by_shard(manifest, shards)
        self._digest = DeviceDigest(manifest, layout, self._device)
        self._addresses = [one.data_ptr() for one in self._tensors]
        self._rendezvous: dict[str, StoreRendezvous] = {}
        self._groups: dict[str, ProcessGroup] = {}
        self._packed: PackedBroadcast | None = None

    def open(self, name: str) -> int:
        """Rank 0 listens; the port."""
        self._rendezvous[name] = StoreRendezvous("127.0.0.1", self._size, Deadline(_SECONDS))
        return self._rendezvous[name].port

    def join(self, name: str, port: int, priority: bool) -> float:
        """Join a group, and connect it; seconds."""
        started = time.perf_counter()
        group = init_custom_process_group(
            "nccl", self._rank, self._size, name, Deadline(_SECONDS), address="127.0.0.1", port=port,
            rendezvous=self._rendezvous.get(name), device=self._device, priority=priority,
        )  # fmt: skip
        group.broadcast([torch.zeros(1 << 20, dtype=torch.uint8, device=self._device)], Deadline(_SECONDS))
        self._groups[name] = group
        return time.perf_counter() - started

    def change(self, seed: int) -> None:
        """Rank 0: all bits of all weights, at random; the others: zero."""
        torch.manual_seed(seed)
        for tensor in self._tensors:
            if self._rank:
                tensor.zero_()
            elif len(tensor) % 8:
                tensor.random_(0, 256)
            else:
                tensor.view(torch.int64).random_()
        torch.cuda.synchronize()

    def digest(self) -> str:
        """Of all bytes of the model here."""
        return hashlib.sha256(self._digest.take(self._addresses, Deadline(60)).tobytes()).hexdigest()

    def prepare(self, group: str, buffer_bytes: int, num_buffers: int, programs: int | None = None) -> dict[str, float]:
        """Make the packed broadcast's buffers and tables: seconds, bytes."""
        self._packed = None
        torch.cuda.empty_cache()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        sizes = np.array([len(tensor) for tensor in self._tensors], np.int64)
        where, one = np.array(self._addresses, np.int64), np.ones(len(sizes), np.int64)
        tiles = cut_tiles(CopyTable(one.astype(np.int32) - 1, where, sizes, where, sizes, one, sizes), TILE_BYTES)
        self._packed = PackedBroadcast(
            tiles, broadcast_frames(np.array([len(tiles)]), tiles.row_bytes, buffer_bytes), self._device, buffer_bytes, num_buffers,
            [0] if self._rank == 0 else None, PROGRAMS if programs is None else programs,
        )  # fmt: skip
        self._packed_group = self._groups[group]
        return {"seconds": time.perf_counter() - started, "bytes": torch.cuda.memory_allocated() - before}

    def measure(self, kind: str, group: str, rounds: int) -> list[tuple[float, float]]:
        """Begin and end of each round, on a clock that all processes of this machine share; the first one warms up."""
        joined = self._groups[group]
        if kind == "packed" and self._packed is not None:
            run: Callable[[], None] = lambda: self._packed.run(self._packed_group, 0, Deadline(_SECONDS)) if self._packed else None  # noqa: E731
        elif kind in ("flat", "by_tensor", "concatenated"):
            work: Callable[[Enqueue], None] = getattr(self, f"_{kind}")
            run = lambda: joined.on_device(self._device, work, Deadline(_SECONDS))  # noqa: E731
        else:
            raise ConfigurationError(f"no such case: {kind}")
        self._flat_buffer = torch.empty(_PIECE if kind == "flat" else 0, dtype=torch.uint8, device=self._device)
        tick = torch.zeros(1, dtype=torch.uint8, device=self._device)
        found = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            joined.broadcast([tick], Deadline(_SECONDS))
            started = time.monotonic()
            run()
            found.append((started, time.monotonic()))
        del self._flat_buffer
        return found[1:]

    def _flat(self, enqueue: Enqueue) -> None:
        for first in range(0, self._nbytes, _PIECE):
            enqueue(self._flat_buffer[: min(_PIECE, self._nbytes - first)])

    def _by_tensor(self, enqueue: Enqueue) -> None:
        for tensor in self._tensors:
            enqueue(tensor)

    def _concatenated(self, enqueue: Enqueue) -> None:
        """Buckets of 1 GiB, concatenated and taken apart by torch, on two streams in turn."""
        buckets: list[list[torch.Tensor]] = [[]]
        filled = 0
        for tensor in self._tensors:
            if filled and filled + len(tensor) > _PIECE:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += len(tensor)
        streams: Sequence[Any] = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        for number, bucket in enumerate(buckets):
            with torch.cuda.stream(streams[number % 2]):
                if self._rank == 0:
                    enqueue(torch.cat(bucket))
                else:
                    packed = torch.empty(sum(map(len, bucket)), dtype=torch.uint8, device=self._device)
                    enqueue(packed)
                    for target, part in zip(bucket, torch.split(packed, [len(one) for one in bucket]), strict=True):
                        target.copy_(part)
        for stream in streams:
            stream.synchronize()


def main() -> None:
    """Answer until standard input ends."""
    config = json.loads(sys.argv[1])
    rank = _Rank(config["model"], config["rank"], config["size"])
    serve(lambda name: getattr(rank, name))
    os._exit(0)  # without waiting for the device, of which peers may be gone


if __name__ == "__main__":
    main()
