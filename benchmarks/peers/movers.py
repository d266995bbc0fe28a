"""How a rank moves the tensors in each way: :data:`MOVERS`. Rank 0 sends, rank 1 receives.

Other systems are imported here, in the process that needs them. An import that fails is reported as "not installed".
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist

from benchmarks.peers.ways import Paths
from weightsync.errors import RoundFailed
from weightsync_bench.peer import Peer
from weightsync_bench.shapes import read_configuration, tensors_of

__all__ = ["MOVERS", "CheckpointWorker", "RankCommands", "RankJob", "Tensors"]

_PIECE = 1 << 30
_LARGEST = 0x7F80  # of a bfloat16's bits: what is below is a finite number, which every copy keeps as it is
_c10d: Any = dist  # its stub leaves out the stores


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of one case."""

    model: str
    rank: int
    device: str
    """``cuda`` or ``cpu``."""
    rendezvous: str
    """A file that both ranks can write."""
    port: int
    mover: str
    gpu: int = 0
    settings: dict[str, Any] = {}
    paths: Paths = Paths()
    seconds: float = 60.0

    def on(self) -> torch.device:
        """Return this rank's device."""
        return torch.device("cuda", self.gpu) if self.device == "cuda" else torch.device(self.device)

    def store(self) -> Any:
        """Return the store in which both ranks meet."""
        store = _c10d.FileStore(self.rendezvous, 2)
        store.set_timeout(timedelta(seconds=self.seconds))
        return store


class Tensors:
    """A model's tensors in bfloat16, each an allocation of its own."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.named = {
            spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16, device=device)
            for spec in tensors_of(read_configuration(model))
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.named.values())
        self._device = device

    def fill(self, seed: int) -> None:
        """Fill all tensors with finite random numbers."""
        torch.manual_seed(seed)
        for tensor in self.named.values():
            tensor.view(torch.int16).random_(0, _LARGEST)
        synchronize(self._device)

    def clear(self) -> None:
        """Set all tensors to zero."""
        for tensor in self.named.values():
            tensor.zero_()
        synchronize(self._device)

    def wrong(self, seed: int) -> int:
        """Return the number of tensors that differ from what :meth:`fill` made of ``seed``."""
        torch.manual_seed(seed)
        differ = []
        for tensor in self.named.values():
            expected = torch.empty_like(tensor).view(torch.int16).random_(0, _LARGEST)
            differ.append((expected != tensor.view(torch.int16)).any())
        return int(torch.stack(differ).sum())

    def load(self, received: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket's tensors to where they belong, in one call."""
        torch._foreach_copy_([self.named[name] for name, _ in received], [tensor for _, tensor in received])


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Mover:
    """Moves the tensors from rank 0 to rank 1. ``detail`` says which version of what did it."""

    detail = ""
    verifiable = True

    def __init__(self, job: RankJob) -> None:
        self.job, self.device = job, job.on()

    def join(self, backend: str = "") -> None:
        """Join the default process group, through which broadcasts go."""
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        dist.init_process_group(
            backend, store=self.job.store(), rank=self.job.rank, world_size=2, timeout=timedelta(seconds=self.job.seconds),
            device_id=self.device if backend == "nccl" else None,
        )  # fmt: skip

    def hold(self) -> None:
        """Allocate the model."""
        self.tensors = Tensors(self.job.model, self.device)

    def fill(self, seed: int) -> None:
        """Rank 0: new weights. Rank 1: none."""
        if self.job.rank == 0:
            self.tensors.fill(seed)
        else:
            self.tensors.clear()

    def move(self) -> None:
        """Move all tensors; returns when they are there."""
        raise NotImplementedError

    def wrong(self, seed: int) -> int:
        """Return the number of tensors that did not arrive."""
        return self.tensors.wrong(seed) if self.job.rank else 0


class _ByTensor(_Mover):
    """``torch.distributed.broadcast`` for each tensor."""

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        self.join()
        self.hold()
        self._all = [tensor.view(-1).view(torch.uint8) for tensor in self.tensors.named.values()]

    def move(self) -> None:
        for tensor in self._all:
            dist.broadcast(tensor, 0)


class _Flat(_Mover):
    """As many bytes, in pieces of one buffer: what a broadcast can reach."""

    verifiable = False

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        self.join()
        self._nbytes = sum(spec.nbytes for spec in tensors_of(read_configuration(job.model)))
        self._buffer = torch.zeros(min(_PIECE, self._nbytes), dtype=torch.uint8, device=self.device)

    def fill(self, seed: int) -> None:
        """Nothing depends on the contents."""

    def move(self) -> None:
        for first in range(0, self._nbytes, len(self._buffer)):
            dist.broadcast(self._buffer[: min(len(self._buffer), self._nbytes - first)], 0)


class _Group:
    """What packed engines need of vLLM's communicator."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, src)


class _Packed(_Mover):
    """An engine that concatenates tensors to buckets and broadcasts these; the receiver copies each bucket in one call."""

    def __init__(self, job: RankJob, module: ModuleType, names: tuple[str, str], **settings: object) -> None:
        super().__init__(job)
        self._function = getattr(module, names[job.rank])
        self._settings = settings
        self.join()
        self.hold()

    def move(self) -> None:
        named = self.tensors.named
        if self.job.rank == 0:
            self._function(iter(named.items()), _Group(), src=0, post_iter_func=lambda item: item[1], **self._settings)
        else:
            described = iter([(name, (list(tensor.shape), tensor.dtype)) for name, tensor in named.items()])
            self._function(described, _Group(), src=0, post_unpack_func=self.tensors.load, **self._settings)


class _Vllm(_Packed):
    def __init__(self, job: RankJob) -> None:
        module, self.detail = _module("vllm", "vllm.distributed.weight_transfer.packed_tensor", job.paths.vllm)
        settings: dict[str, object] = {"num_buffers": job.settings["buffers"]}
        if job.rank:
            settings["device"] = job.on()
        super().__init__(job, module, ("packed_nccl_broadcast_producer", "packed_nccl_broadcast_consumer"), **settings)


class _VllmIpc(_Mover):
    """One buffer that the sender fills and the receiver maps, chunk by chunk; the next chunk begins when the last one is loaded."""

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        self._module, self.detail = _module("vllm", "vllm.distributed.weight_transfer.packed_tensor", job.paths.vllm)
        self.join("gloo")
        self.hold()

    def move(self) -> None:
        if self.job.rank == 0:
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
            chunks = self._module.packed_ipc_producer(
                iter(self.tensors.named.items()), gpu, lambda item: item[1], buffer_size_bytes=self.job.settings["buffer_bytes"]
            )
            for chunk in chunks:
                (arguments,) = chunk.ipc_handle.values()
                plain = [tuple(value) if isinstance(value, torch.Size) else value for value in arguments]
                for place in self._CLASSES:
                    plain[place] = None
                self._say(vars(chunk) | {"ipc_handle": {gpu: plain}})
                dist.barrier()
            self._say(None)
        else:
            while (chunk := self._hear()) is not None:
                for arguments in chunk["ipc_handle"].values():
                    for place, value in self._CLASSES.items():
                        arguments[place] = value
                self.tensors.load(self._module.packed_ipc_consumer(**chunk, device_index=self.device.index))
                synchronize(self.device)
                dist.barrier()

    _CLASSES: ClassVar[dict[int, Any]] = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}
    """What ``rebuild_cuda_tensor`` takes beside numbers and bytes, by place: always the same for a buffer of bytes."""

    @staticmethod
    def _say(chunk: dict[str, Any] | None) -> None:
        """Give the receiver the description of a chunk, or None after the last one. vLLM sends it by Ray or HTTP, pickled."""
        described = torch.frombuffer(bytearray(msgspec.msgpack.encode(chunk)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(described)]), 0)
        dist.broadcast(described, 0)

    @staticmethod
    def _hear() -> Any:
        length = torch.zeros(1, dtype=torch.long)
        dist.broadcast(length, 0)
        described = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(described, 0)
        return msgspec.msgpack.decode(described.numpy().tobytes())


class _NemoRl(_Packed):
    def __init__(self, job: RankJob) -> None:
        os.environ["NRL_REFIT_NUM_BUFFERS"] = str(job.settings["buffers"])  # read when the engine is first used
        module, self.detail = _module("nemo_rl", "nemo_rl.utils.packed_tensor", job.paths.nemo_rl)
        super().__init__(job, module, ("packed_broadcast_producer", "packed_broadcast_consumer"))


class _M2n(_Mover):
    """NCCL's resharding between two meshes of ranks, here of one rank each."""

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        import nccl.core as core
        import nccl.m2n as m2n

        library = core.get_version().libnccl
        self.detail = f"nccl-extensions {_version('nccl-extensions')}, NCCL {library.version if library else 'unknown'}"
        self._m2n: Any = m2n
        self.hold()
        store = job.store()
        if job.rank == 0:
            store.set("id", bytes(core.get_unique_id()).hex())
        unique = core.UniqueId.from_bytes(bytes.fromhex(store.get("id").decode()))
        self._communicator = core.Communicator.init(2, job.rank, unique)
        self._handle = m2n.Handle.create(m2n.Config())
        self._at_once = int(job.settings.get("group", 0))

    def move(self) -> None:
        tensors = list(self.tensors.named.values())
        if not self._at_once:
            self._reshard(tensors)
        else:
            for first in range(0, len(tensors), self._at_once):
                with self._m2n.group():
                    self._reshard(tensors[first : first + self._at_once])

    def _reshard(self, tensors: Sequence[torch.Tensor]) -> None:
        m2n, stream, sends = self._m2n, torch.cuda.current_stream(self.device), self.job.rank == 0
        for tensor in tensors:
            m2n.reshard(
                tensor if sends else None, None if sends else tensor, self._communicator.ptr, stream,
                src_mesh=m2n.Mesh((1, 1), start_rank=0), src_placements=[m2n.Replicate(), m2n.Shard(0)],
                dst_mesh=m2n.Mesh((1, 1), start_rank=1), dst_placements=[m2n.Replicate(), m2n.Shard(0)],
                handle=self._handle,
            )  # fmt: skip


class _CheckpointEngine(_Mover):
    """A parameter server on each GPU, and beside it a worker, which stands for the serving engine.

    The first server registers the whole model from its GPU, which copies it to pinned host memory. An update brings it to all
    workers. The first worker, which has the trainer's place, drops what it gets.
    """

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        import checkpoint_engine

        self.detail = _version("checkpoint-engine")
        config = {"role": "worker", "rank": job.rank, "model": job.model if job.rank else ""}
        self._worker = Peer("benchmarks.peers.rank", config)
        self._worker.hear(job.seconds)
        os.environ.update(RANK=str(job.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
        self._server: Any = checkpoint_engine.ParameterServer(auto_pg=True, master_port=job.port)
        if job.rank == 0:
            self.hold()

    def fill(self, seed: int) -> None:
        name = f"version-{seed}"
        if self.job.rank == 0:
            self.tensors.fill(seed)
            if seed:
                self._server.unregister_checkpoint(f"version-{seed - 1}")
            self._server.register_checkpoint(name, named_tensors=self.tensors.named, use_shared_memory_pool=True)
        else:
            self._worker.ask(self.job.seconds, do="clear")
        self._server.gather_metas(name)
        self._name = name

    def move(self) -> None:
        def request(sockets: list[tuple[str, str]]) -> None:
            self._worker.ask(self.job.seconds, do="update", socket=sockets[self.job.rank][1])

        self._server.update(self._name, request, timeout=timedelta(seconds=self.job.seconds))

    def wrong(self, seed: int) -> int:
        return int(self._worker.ask(self.job.seconds, do="wrong", seed=seed)) if self.job.rank else 0


class CheckpointWorker:
    """Commands of checkpoint-engine's worker process."""

    def __init__(self, rank: int, model: str) -> None:
        self._rank = rank
        torch.cuda.set_device(rank)
        self._tensors = Tensors(model, torch.device("cuda", rank)) if model else None

    def clear(self) -> None:
        if self._tensors is not None:
            self._tensors.clear()

    def update(self, socket: str) -> None:
        """Take one update."""
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        load = self._tensors.load if self._tensors is not None else lambda received: None
        update_weights_from_ipc(zmq.Context.instance(), socket, self._rank, run=load)

    def wrong(self, seed: int) -> int:
        return self._tensors.wrong(seed) if self._tensors is not None else 0


def _module(package: str, module: str, folder: str) -> tuple[ModuleType, str]:
    """Import another system's module, or load it from ``folder``; returns it and its version."""
    if not folder:
        return importlib.import_module(module), _version(package)
    wanted = module.rpartition(".")[2] + ".py"
    files = sorted(Path(folder).rglob(wanted))
    if len(files) != 1:
        raise ImportError(f"{len(files)} files {wanted} under {folder}, and not one")
    spec = importlib.util.spec_from_file_location(wanted[:-3], files[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"{files[0]} is no module")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # where dataclasses look their module up
    spec.loader.exec_module(loaded)
    named = Path(folder) / "VERSION"
    version = named.read_text().strip() if named.is_file() else "from files"
    return loaded, f"{version}, {wanted} sha256 {hashlib.sha256(files[0].read_bytes()).hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


MOVERS: dict[str, type[_Mover]] = {
    "flat": _Flat,
    "by_tensor": _ByTensor,
    "vllm": _Vllm,
    "vllm_ipc": _VllmIpc,
    "nemo_rl": _NemoRl,
    "m2n": _M2n,
    "checkpoint_engine": _CheckpointEngine,
}
"""Class of each way's rank."""


class RankCommands:
    """Commands of a rank."""

    def __init__(self, job: RankJob) -> None:
        self._job = job

    def open(self) -> dict[str, Any]:
        """Import, connect, allocate. A system that is not installed is an answer, not an error."""
        started = time.perf_counter()
        try:
            self._mover: Any = MOVERS[self._job.mover](self._job)
        except ImportError as error:
            return {"absent": f"{error}"}
        return {"detail": self._mover.detail, "seconds": time.perf_counter() - started}

    def fill(self, seed: int) -> None:
        self._mover.fill(seed)

    def move(self, at: float) -> float:
        """Move at ``at`` on the clock that all processes of a host share; returns seconds from then until all is there."""
        while time.monotonic() < at:
            pass
        self._mover.move()
        synchronize(self._mover.device)
        return time.monotonic() - at

    def check(self, seed: int) -> None:
        """Compare what arrived."""
        if self._mover.verifiable and (wrong := self._mover.wrong(seed)):
            raise RoundFailed(f"{wrong} tensors did not arrive")
