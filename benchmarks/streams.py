"""``publish_stream`` against its floor: the slower of gathering alone and sending alone. Start it on every trainer rank.

::

    torchrun --nproc-per-node 2 -m benchmarks.streams --megabytes 512                              # gloo, host windows
    torchrun --nproc-per-node 2 -m benchmarks.streams --model qwen3-30b-a3b --device cuda          # NCCL gathers, CUDA IPC
    torchrun --nproc-per-node 2 -m benchmarks.streams --model qwen3-30b-a3b --shrink 64 --window-megabytes 16 --phases send

Every rank holds half of each tensor, as FSDP2 does, and gathers with ``full_tensor()``. Rank 0 starts a receiver for each rank, on
that rank's device, or on ``--receiver-devices``. A receiver takes batches and does nothing with them. With ``--coordinator
separate`` the coordinator has a process of its own instead of being in rank 0's. With ``--shrink`` tensors have a fraction of
their rows, so that bytes do not dominate.

The phases take turns, because a shared host's speed changes while they run: the ratio of each repetition is to the floor of that
repetition, and the one reported is their median, with the lowest and the highest.

With ``--profile`` each rank says where the time of ``send`` and ``stream`` went, as medians: seconds inside the iterator, in the
calling thread between two tensors (and how many of them it waited for a free window), and after the last one; and microseconds of
processor time for each tensor in the calling thread, in all other threads of the process, and in each of those that Python knows
by name. Gathering and all of these threads share one GIL. Processor time of the calling thread contains the iterator's. Reading
clocks at each tensor takes time itself.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.receiver import Receiver
from weightsync.model import TensorSpec
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import torch_dtype
from weightsync.trainer.stream import Stream, StreamedPublication
from weightsync.trainer.trainer import Trainer
from weightsync_bench.gpu_job import MODELS

__all__ = ["main"]

_Items = Iterable[tuple[str, torch.Tensor]]
_HIDDEN = 1024
_PHASES = ("gather", "send", "stream")


def _shapes(options: argparse.Namespace, world_size: int) -> list[TensorSpec]:
    if options.model:
        least = world_size if options.shrink > 1 else 1
        return [
            TensorSpec(spec.name, (max(spec.shape[0] // options.shrink // least, 1) * least, *spec.shape[1:]), spec.dtype)
            for spec in MODELS[options.model]()
        ]
    count = max(options.megabytes * (1 << 20) // (2 * _HIDDEN * _HIDDEN), 1)
    return [TensorSpec(f"layers.{number}.weight", (_HIDDEN, _HIDDEN), "bfloat16") for number in range(count)]


def _receive(name: str, device: str, transport: str | None) -> None:
    """Be a receiver until standard input ends: one publication for each line."""
    transports = [transport] if transport else None
    with Receiver(name, device=device if device != "cpu" else None, transports=transports) as receiver:
        print("joined", flush=True)
        for _ in sys.stdin:
            for batch in receiver.receive():
                del batch


def _start_coordinator(owned: ExitStack) -> str:
    """Start one in a process of its own. Returns its URL and its token, separated by a space."""
    token = secrets.token_urlsafe(32)
    command = [sys.executable, "-m", "benchmarks.streams", "--serve"]
    process = subprocess.Popen(
        command, env={**os.environ, "WEIGHTSYNC_TOKEN": token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    owned.enter_context(process)
    assert process.stdin is not None
    assert process.stdout is not None
    owned.callback(process.stdin.close)
    return f"{process.stdout.readline().strip()} {token}"


def _serve() -> None:
    """Be the coordinator until standard input ends."""
    with BackgroundServer(ServerSettings.load(port=0)) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def _from_rank_zero(text: str) -> str:
    shared = [text]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _start_receivers(trainer: Trainer, devices: list[str], transport: str | None, owned: ExitStack) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, **trainer.environment}
    processes = []
    for number, device in enumerate(devices):
        command = [sys.executable, "-m", "benchmarks.streams", "--receive", f"receiver-{number}", "--device", device]
        command += ["--transport", transport] if transport else []
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL)
        owned.enter_context(process)
        if process.stdin is not None:
            owned.callback(process.stdin.close)
        processes.append(process)
    return processes


class _Clock:
    """Where the time of one publication goes: wall clock of the calling thread, processor time of every thread."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._inside = self._last = self.waited = 0.0

    def watched(self, items: _Items) -> Iterator[tuple[str, torch.Tensor]]:
        """The items, with a note of the time that the iterator itself takes."""
        resumed = time.perf_counter()
        for item in items:
            self._inside += time.perf_counter() - resumed
            yield item
            resumed = time.perf_counter()
        self._last = time.perf_counter()
        self._inside += self._last - resumed

    def measure(self, act: Callable[[], object]) -> dict[str, float]:
        """Run ``act``, which publishes what :meth:`watched` gives, and say where its time went."""
        threads, process, started = self._threads(), time.process_time(), time.perf_counter()
        act()
        ended, spent = time.perf_counter(), time.process_time() - process
        now = self._threads()
        now.subtract(threads)
        calling = now.pop(threading.current_thread().name)
        each = {f"thread {name}": seconds for name, seconds in now.items() if seconds > 0}
        cpu = {"calling thread": calling, "other threads": spent - calling, **each}
        return {
            "seconds_in_iterator": self._inside,
            "seconds_between": self._last - started - self._inside,
            "seconds_between, waiting for a window": self.waited,
            "seconds_after": ended - self._last,
            **{f"cpu_us_per_tensor, {name}": seconds / self._tensors * 1e6 for name, seconds in cpu.items()},
        }

    @contextmanager
    def watching_waits(self) -> Iterator[None]:
        """Note the time that the iterating thread waits for windows."""
        unwatched = StreamedPublication._open

        def opened(publication: StreamedPublication, number: int, deadline: Deadline) -> None:
            started = time.perf_counter()
            unwatched(publication, number, deadline)
            self.waited += time.perf_counter() - started

        with patch.object(StreamedPublication, "_open", opened):
            yield

    @staticmethod
    def _threads() -> Counter[str]:
        """Processor seconds of the threads that Python knows, by name. One that has ended is only in the process's own."""
        seconds: Counter[str] = Counter()
        for thread in threading.enumerate():
            if thread.ident is not None:
                clock = time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
                seconds[thread.name] += clock / 1e9  # type: ignore[assignment]
        return seconds


def _medians(measured: list[dict[str, float]]) -> dict[str, list[float]]:
    """Median, least and most of each figure."""
    names = dict.fromkeys(name for one in measured for name in one)
    values = {name: [one.get(name, 0.0) for one in measured] for name in names}
    return {name: [round(figure, 3) for figure in (median(given), min(given), max(given))] for name, given in values.items()}


def _timed(act: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print one JSON object on each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS))
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide the rows of a model's tensors by this")
    parser.add_argument("--phases", nargs="+", choices=_PHASES, default=_PHASES)
    parser.add_argument("--window-megabytes", type=int, default=0)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transport", help="name of the transport; without one, the first that fits")
    parser.add_argument("--receiver-devices", nargs="+")
    parser.add_argument("--coordinator", choices=("rank0", "separate"), default="rank0")
    parser.add_argument("--profile", action="store_true", help="say where the time went")
    parser.add_argument("--receive")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        _serve()
        return
    if options.receive:
        _receive(options.receive, options.device, options.transport)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = options.device.startswith("cuda")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (world_size,))
    specs = _shapes(options, world_size)
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

    places = options.receiver_devices or [f"cuda:{number}" if cuda else "cpu" for number in range(world_size)]
    with ExitStack() as owned:
        stream = Stream(options.window_megabytes << 20 or None, options.windows, device if cuda else None)
        where = _start_coordinator(owned) if rank == 0 and options.coordinator == "separate" else ""
        if options.coordinator == "separate":
            where = _from_rank_zero(where)
        url, _, token = where.partition(" ")
        transports = [options.transport] if options.transport else None
        trainer = owned.enter_context(Trainer(stream, url or None, token=token or None, transports=transports))
        receivers = []
        if rank == 0:
            receivers = _start_receivers(trainer, places, options.transport, owned)
        trainer.wait_for_replicas(len(places))

        def publish(items: _Items) -> None:
            for process in receivers:
                assert process.stdin is not None
                process.stdin.write("receive\n")
                process.stdin.flush()
            result = trainer.publish_stream(items)
            assert all(replica.error is None for replica in result.replicas), result

        whole = [(name, value.full_tensor()) for name, value in shards.items()]
        publish(whole)  # connects, and compiles kernels
        seconds: dict[str, list[float]] = {}
        clocks: dict[str, list[dict[str, float]]] = {"send": [], "stream": []}

        def published(phase: str) -> None:
            items = whole if phase == "send" else gathering()
            if not options.profile:
                publish(items)
                return
            clock = _Clock(len(specs))
            with clock.watching_waits():
                clocks[phase].append(clock.measure(lambda: publish(clock.watched(items))))

        for _ in range(options.repeats):
            for phase in options.phases:
                seconds.setdefault(phase, []).append(_timed(drained if phase == "gather" else partial(published, phase), device))
        report: dict[str, object] = {"rank": rank}
        if rank == 0:
            report |= {
                "bytes": sum(spec.nbytes for spec in specs), "tensors": len(specs), "ranks": world_size, "device": device.type,
                "seconds": {phase: [round(value, 3) for value in values] for phase, values in seconds.items()},
            }  # fmt: skip
            if len(seconds) == len(_PHASES):
                floors = [max(pair) for pair in zip(seconds["gather"], seconds["send"], strict=True)]
                ratios = sorted(streamed / floor for streamed, floor in zip(seconds["stream"], floors, strict=True))
                report |= {"floor_seconds": round(median(floors), 3)}
                report |= {"ratio": [round(value, 3) for value in (median(ratios), ratios[0], ratios[-1])]}
        report |= {phase: _medians(measured) for phase, measured in clocks.items() if measured}
        print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
