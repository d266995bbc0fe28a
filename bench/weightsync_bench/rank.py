"""A rank of the transfer benchmark: ``python -m weightsync_bench.rank CONFIG`` executes commands, one on each line."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.model import Manifest, PauseMode, TensorSpec
from weightsync.tensors.shards import Shard, shard
from weightsync.trainer.trainer import Trainer
from weightsync.transports.net.encrypted_records import KEY_BYTES
from weightsync_bench.peer import serve, tensor_shapes

_PIECE = 256 << 10  # bytes that the floor encrypts at a time: they fit every second-level cache


def _processor() -> tuple[float, float]:
    """Return the seconds that this process's threads ran, and waited for a CPU (zero if the system does not report it)."""
    waited = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has just ended
            waited += int(task.read_text().split()[1])
    return time.process_time(), waited / 1e9


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().data).cast("B")


class _Floor:
    """Floor measurements on buffers of this rank's sizes: a plain copy of each tensor, and plain socket transfers."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._others = [torch.ones_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._listener: socket.socket | None = None

    def copy(self) -> float:
        started = time.perf_counter()
        for ours, other in zip(self._tensors, self._others, strict=True):
            other.copy_(ours)
        return time.perf_counter() - started

    def seal(self) -> float:
        """Encrypt every tensor in pieces that fit the cache."""
        cipher = AESGCM(bytes(KEY_BYTES))
        started = time.perf_counter()
        for number, piece in enumerate(self._pieces(self._tensors)):
            cipher.encrypt(number.to_bytes(12, "little"), piece, None)
        return time.perf_counter() - started

    def open(self) -> float:
        """Decrypt the same number of bytes into other memory. The input is always the same cached piece, as after a receive."""
        cipher, nonce = AESGCM(bytes(KEY_BYTES)), bytes(12)
        sealed: dict[int, bytes] = {}
        pieces = list(self._pieces(self._others))
        for piece in pieces:
            if len(piece) not in sealed:
                sealed[len(piece)] = cipher.encrypt(nonce, bytes(len(piece)), None)
        into: Callable[..., object] | None = getattr(cipher, "decrypt_into", None)  # in newer releases only
        started = time.perf_counter()
        for piece in pieces:
            if into is not None:
                into(nonce, sealed[len(piece)], None, piece)
            else:
                piece[:] = cipher.decrypt(nonce, sealed[len(piece)], None)
        return time.perf_counter() - started

    @staticmethod
    def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
        for view in map(_bytes, tensors):
            for start in range(0, len(view), _PIECE):
                yield view[start : start + _PIECE]

    def listen(self) -> int:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(30)
        port: int = self._listener.getsockname()[1]
        return port

    def receive(self) -> float:
        if self._listener is None:
            return 0.0
        connection, _ = self._listener.accept()
        self._listener.close()
        with connection:
            connection.settimeout(30)
            started = time.perf_counter()
            for view in map(_bytes, self._others):
                while view:
                    count = connection.recv_into(view)
                    if not count:
                        return time.perf_counter() - started
                    view = view[count:]
            return time.perf_counter() - started

    def send(self, port: int) -> float:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            started = time.perf_counter()
            for tensor in self._tensors:
                connection.sendall(_bytes(tensor))
            return time.perf_counter() - started


class _BenchTrainer:
    def __init__(self, config: dict[str, Any]) -> None:
        dist.init_process_group("gloo", init_method=config["rendezvous"], rank=config["rank"], world_size=config["world"])
        mesh = init_device_mesh("cpu", (config["world"],))
        self._locals: list[torch.Tensor] = []
        state: dict[str, torch.Tensor] = {}
        for name, shape in tensor_shapes(config["size"], config["tensors"]):
            chunks = torch.empty(shape[0], 0).chunk(config["world"])
            rows = len(chunks[config["rank"]]) if config["rank"] < len(chunks) else 0
            local = torch.empty((rows, *shape[1:]), dtype=torch.bfloat16)
            self._locals.append(local)
            stride = (shape[1], 1)
            state[name] = DTensor.from_local(
                local, mesh, [ShardPlacement(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
        self.change(config["rank"])
        self.trainer = Trainer(
            state,
            coordinator=config["coordinator"],
            token=config["token"],
            rank=config["rank"],
            world_size=config["world"],
            transports=[config["transport"]],
        )
        self.floor = _Floor(self._locals)

    def change(self, seed: int) -> None:
        """Fill all weights with new random bits, so that stale bytes cannot pass the check."""
        generator = torch.Generator().manual_seed(seed)
        block = torch.randint(-(2**15), 2**15, (1 << 20,), dtype=torch.int16, generator=generator)
        for index, local in enumerate(self._locals):
            flat = local.view(torch.int16).view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])
            flat += index + seed

    def publish(self, number: int) -> dict[str, Any]:
        started = time.perf_counter()
        result = self.trainer.publish(number, timeout=60)
        return {"seconds": time.perf_counter() - started, "result": msgspec.to_builtins(result)}

    def close(self) -> None:
        self.trainer.close()
        dist.destroy_process_group()


class _TensorParallel(EngineAdapter):
    """Tensor-parallel shards: every second tensor is split along columns, the others along rows."""

    name = "bench"

    def __init__(self, config: dict[str, Any]) -> None:
        self._direct = config["delivery"] == "direct"
        specs, self._shards = [], []
        rank, world = config["rank"], config["world"]
        for index, (name, shape) in enumerate(tensor_shapes(config["size"], config["tensors"])):
            specs.append(TensorSpec(name, shape, "bfloat16"))
            axis = index % 2
            edges = [shape[axis] * part // world for part in (rank, rank + 1)]
            starts = [0, 0]
            starts[axis] = edges[0]
            extent = list(shape)
            extent[axis] = edges[1] - edges[0]
            self._shards.append(shard(name, torch.ones(extent, dtype=torch.bfloat16), shape, tuple(starts)))
        self._manifest = Manifest(specs)
        self._by_name = {part.name: part for part in self._shards}

    def manifest(self) -> Manifest:
        return self._manifest

    def shards(self) -> Sequence[Shard] | None:
        return self._shards if self._direct else None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        pass

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            part = self._by_name[name]
            part.tensor.copy_(tensor[tuple(slice(a, b) for a, b in zip(part.box.starts, part.box.stops, strict=True))])


class _BenchEngine:
    def __init__(self, config: dict[str, Any]) -> None:
        adapter = _TensorParallel(config)
        self.floor = _Floor([part.tensor for part in adapter._shards])
        self.engine = Engine(
            adapter,
            replica="bench",
            coordinator=config["coordinator"],
            token=config["token"],
            rank=config["rank"],
            world_size=config["world"],
            transports=[config["transport"]],
            delivery=config["delivery"],
        )

    def close(self) -> None:
        self.engine.close()


def main() -> None:
    """Execute commands until standard input ends."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank: _BenchTrainer | _BenchEngine = (_BenchTrainer if config["role"] == "trainer" else _BenchEngine)(config)
    floor = rank.floor
    commands: dict[str, Callable[..., Any]] = {
        "copy": floor.copy,
        "listen": floor.listen,
        "receive": floor.receive,
        "send": floor.send,
        "seal": floor.seal,
        "open": floor.open,
        "processor": _processor,
    }
    if isinstance(rank, _BenchTrainer):
        commands |= {"change": rank.change, "publish": rank.publish}
    try:
        serve(commands.__getitem__)
    finally:
        rank.close()


if __name__ == "__main__":
    main()
