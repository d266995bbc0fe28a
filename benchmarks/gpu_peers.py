# mypy: ignore-errors
# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ANN204
"""Measures direct transfers between processes on several GPUs: ``python -m benchmarks.gpu_peers OUT SECONDS [CASE ...]``.

A process a rank, all regions through CudaRegion, CudaIpcPublisher and CudaIpcReader; every rank's clock is the machine's monotonic
one, so a round lasts from the common start to the last rank's end. Weights are random and new in every round; per-tensor digests of
what was installed must add up to the published ones, or the case fails.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.model import Layout, Manifest
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.planning.split import split_rows
from weightsync.protocol.messages import Host, Offer
from weightsync_bench.peer import Peer, serve, together
from weightsync_bench.shapes import qwen3_8b, qwen3_30b_a3b
from weightsync_bench.sharding import fsdp, tensor_parallel

_HOST = Host("here", "here")
_KEY = b"the key of this measurement"
_MODELS = {"moe": qwen3_30b_a3b, "dense": qwen3_8b}
_SETTINGS = tuple(tuple(one) for one in json.loads(os.environ.get("SETTINGS", "[[1024, 16]]")))


def _layouts(job, manifest):
    """Layouts of all source ranks and of all target ranks (replicas of a tensor-parallel group each)."""
    sources = _expert_parallel(manifest, job["sources"]) if job.get("megatron") else fsdp(manifest, job["sources"])
    if job.get("scattered"):
        sources = [_scattered(manifest, layout) for layout in sources]
    targets = [split_rows(manifest, layout, 1 << 20) for layout in tensor_parallel(manifest, job["targets"])] * job.get(
        "replicas", 1
    )
    return sources, targets


def _expert_parallel(manifest, ranks):
    """Megatron-core's expert parallelism over data-parallel attention: experts apart, all else on every rank."""
    from benchmarks.megatron_layouts import MegatronLayouts, qwen3_30b_a3b_config

    config = qwen3_30b_a3b_config()
    model = MegatronLayouts(config)
    if model.manifest != manifest:
        raise RuntimeError("the rules give other tensors than the model has")
    experts, layers = config.num_experts // ranks, range(config.num_hidden_layers)
    return [model.layout(layers, range(rank * experts, (rank + 1) * experts), first=True, last=True) for rank in range(ranks)]


def _scattered(manifest, layout):
    """The same shards with a region, so an allocation, for each."""
    sizes = tuple((layout.sizes() * manifest.itemsizes[layout.tensor]).tolist())
    each = np.arange(len(layout), dtype=np.int32)
    return Layout(
        manifest, layout.tensor, layout.starts, layout.stops, each, np.zeros(len(layout), np.int64), layout.strides, sizes
    )


def _by_tensor(manifest, layout, digests, counted):
    total = np.zeros(len(manifest), np.uint64)
    np.add.at(total, layout.tensor[counted], digests[counted])
    return total


def _events_ms(work):
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _wait_until(at):
    while time.monotonic() < at:
        pass


class Trainer:
    """Commands of a trainer rank."""

    def __init__(self, job, rank, device):
        import torch

        from weightsync.tensors.cuda.digest import LayoutDigest
        from weightsync.transports.cuda.ipc import CudaIpcPublisher
        from weightsync.transports.cuda.region import CudaRegion

        torch.cuda.set_device(device)
        self.rank = rank
        self.shared = job.get("megatron", False)  # the first region has what every rank has
        self.manifest = Manifest(_MODELS[job["model"]]())
        self.layout = _layouts(job, self.manifest)[0][rank]
        self.memory = [torch.empty(-(-size // 8), dtype=torch.int64, device="cuda") for size in self.layout.regions]
        bases = [one.data_ptr() for one in self.memory]
        started = time.perf_counter()
        self.region = CudaRegion(self.layout.regions, self.layout.digest, lambda: bases, device)
        self.export_seconds = time.perf_counter() - started
        self.owner = CudaIpcPublisher(self.region, _KEY, _HOST)
        self.digest = LayoutDigest(self.manifest, self.layout, bases, torch.device("cuda", device))

    def hello(self):
        handles = len(self.region.exported.handles)
        return {"address": self.owner.offer.address, "export_seconds": self.export_seconds, "handles": handles}

    def place(self, version, path):
        import torch

        with self.region.placing(version):
            for region, one in enumerate(self.memory):
                torch.manual_seed(version * 1000 + (999 if self.shared and region == 0 else self.rank))
                one.random_()
            torch.cuda.synchronize()
            started = time.perf_counter()
            digests = self.digest.digests()
            seconds = time.perf_counter() - started
        counted = (self.layout.region > 0) | (self.rank == 0) | (not self.shared)
        np.save(path, _by_tensor(self.manifest, self.layout, digests, counted))
        return {"digest_seconds": seconds}


class Engine:
    """Commands of an engine rank."""

    def __init__(self, job, rank, device, addresses):
        import torch

        from weightsync.tensors.copy_table import tiles_of
        from weightsync.tensors.cuda.digest import LayoutDigest
        from weightsync.transports.cuda.ipc import CombinedReader, CudaIpc

        torch.cuda.set_device(device)
        self.rank, self.ranks = rank, len(job["to"])
        self.device = torch.device("cuda", device)
        self.manifest = manifest = Manifest(_MODELS[job["model"]]())
        started = time.perf_counter()
        sources, targets = _layouts(job, manifest)
        ranks = [SourceRank(f"t{number}", _HOST, layout) for number, layout in enumerate(sources)]
        plan = plan_transfer(manifest, ranks, [TargetRank(f"e{number}", _HOST, layout) for number, layout in enumerate(targets)])
        pieces = plan.pieces(f"e{rank}")
        plan_seconds = time.perf_counter() - started
        self.layout = targets[rank]
        self.target = torch.zeros(self.layout.regions[0], dtype=torch.uint8, device="cuda")
        first = rank < job["targets"]  # replicas hold the same boxes: the first one's are counted
        whole = np.prod(manifest.shapes, axis=1) * manifest.itemsizes
        mine = np.bincount(self.layout.tensor, self.layout.sizes() * manifest.itemsizes[self.layout.tensor], len(manifest))
        self.counted = ((mine < whole)[self.layout.tensor] | (rank % job["targets"] == 0)) & first
        started = time.perf_counter()
        tiles = tiles_of(manifest, pieces, self.layout, [self.target.data_ptr()], [(0, len(self.layout))])
        tile_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.sources = []
        for member, groups in zip(pieces.sources, tiles, strict=True):
            number = int(member[1:])
            source = CudaIpc(device).open(Offer("cuda_ipc", addresses[number], _HOST), _KEY, Deadline(60))
            source.prepare(groups, sources[number].digest, Deadline(60))
            self.sources.append(source)
        connect_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.copies = {}
        self.copy = self._copy(_SETTINGS[0])
        self.together = CombinedReader(self.sources)
        self.digest = LayoutDigest(manifest, self.layout, [self.target.data_ptr()], self.device)
        torch.cuda.synchronize()
        self.setup = {
            "plan_and_pieces_seconds": plan_seconds,
            "tiles_seconds": tile_seconds,
            "connect_seconds": connect_seconds,
            "tables_seconds": time.perf_counter() - started,
            "table_bytes": self.copy.table_bytes + self.digest.table_bytes,
            "bytes": self.copy.nbytes,
            "bytes_by_source": {member: groups[0].nbytes for member, groups in zip(pieces.sources, tiles, strict=True)},
        }

    def _copy(self, setting):
        from weightsync.tensors.cuda.copies import TileCopy

        if setting not in self.copies:
            groups = [[(source.groups[0], source.addresses) for source in self.sources]]
            self.copies[setting] = TileCopy(groups, self.device, lanes=setting[0], warps=setting[1])
        return self.copies[setting]

    def hello(self):
        return self.setup

    def floor(self):
        """GB/s of reading 2 GiB of each owner's largest region: by the driver's copy, and by one launch of the tile kernel."""
        from weightsync.tensors.copy_table import CopyTable
        from weightsync.tensors.cuda.copies import TileCopy

        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemcpyDtoD_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)
        found = {}
        for source in self.sources:
            region = int(np.argmax(source._sizes))
            size = min(2 << 30, source._sizes[region], self.target.numel()) >> 16 << 16
            base, one = (
                source.addresses[region],
                [np.array([value], np.int64) for value in (0, 0, self.target.data_ptr(), 0, 1, size)],
            )
            copy = TileCopy([[(CopyTable(np.zeros(1, np.int32), *one), [base])]], self.device)
            kernel = min(_events_ms(copy.launch) for _ in range(7))
            engine = min(
                _events_ms(lambda base=base, size=size: driver.cuMemcpyDtoD_v2(self.target.data_ptr(), base, size))
                for _ in range(7)
            )
            found[source._channel.peer + str(len(found))] = {
                "bytes": size,
                "kernel_GBps": size / kernel / 1e6,
                "driver_GBps": size / engine / 1e6,
            }
        return found

    def round(self, version, at, path):
        import torch

        self.target.fill_(255)
        torch.cuda.synchronize()
        _wait_until(at)
        for source in self.sources:
            source.begin(version, Deadline(30))
        begun = time.monotonic() - at
        self.together.read(0, Deadline(30))
        for source in self.sources:
            source.end(Deadline(30))
        moved = time.monotonic() - at
        digests = self.digest.digests()
        verified = time.monotonic() - at
        np.save(path, _by_tensor(self.manifest, self.layout, digests, self.counted))
        return {"begun": begun, "moved": moved, "verified": verified}

    def kernel(self, setting, at):
        copy = self._copy(tuple(setting))
        copy.launch()
        _wait_until(at)
        return {"ms": _events_ms(copy.launch)}

    def digest_ms(self, at):
        _wait_until(at)
        return {"ms": _events_ms(self.digest.launch)}


def serve_rank(role):
    """One rank: made by its first command, which answers the others from then on."""
    made = []

    def make(**settings):
        made.append({"trainer": Trainer, "engine": Engine}[role](**settings))
        return made[0].hello()

    serve(lambda name: make if name == "make" else getattr(made[0], name))


def ranks_of(role, job, isolated, owned):
    """A process a rank, with all GPUs in sight or its own alone, and the command that makes it."""
    devices = job["on" if role == "trainer" else "to"]
    peers = []
    for rank, device in enumerate(devices):
        environment = {"PYTHONWARNINGS": "ignore"} | ({"CUDA_VISIBLE_DEVICES": str(device)} if isolated else {})
        peers.append(owned.enter_context(Peer("benchmarks.gpu_peers", {"role": role, "rank": rank}, environment)))
    for peer in peers:
        peer.hear()
    return peers, [{"do": "make", "job": job, "rank": rank, "device": 0 if isolated else one} for rank, one in enumerate(devices)]


def each(peers, commands):
    """Give each peer a command of its own, all at once; their answers."""
    for peer, command in zip(peers, commands, strict=True):
        peer.tell(**command)
    return [peer.hear() for peer in peers]


def run(name, job, folder):
    isolated = job.get("isolated", False)
    result: dict[str, Any] = {"job": job}
    try:
        with ExitStack() as owned:
            started = time.perf_counter()
            trainers, commands = ranks_of("trainer", job, isolated, owned)
            held = each(trainers, commands)
            engines, commands = ranks_of("engine", job, isolated, owned)
            addresses = [one["address"] for one in held]
            result["setup"] = each(engines, [one | {"addresses": addresses} for one in commands])
            result["start_seconds"] = time.perf_counter() - started
            result["export"] = [{key: value for key, value in one.items() if key != "address"} for one in held]
            result["floor"] = engines[0].ask(do="floor")  # while the others rest
            result["rounds"] = []
            for version in range(job.get("rounds", 5)):
                paths = [[str(folder / f"{side}{rank}.npy") for rank in range(len(job[side]))] for side in ("on", "to")]
                placed = each(trainers, [{"do": "place", "version": version, "path": path} for path in paths[0]])
                at = time.monotonic() + 0.25
                ended = each(engines, [{"do": "round", "version": version, "at": at, "path": path} for path in paths[1]])
                published, installed = (sum(np.load(path) for path in side) for side in paths)
                if not np.array_equal(published, installed):
                    raise RuntimeError(f"{int((published != installed).sum())} tensors arrived wrong in version {version}")
                worst = {key: max(one[key] for one in ended) for key in ended[0]}
                result["rounds"].append(worst | {"publish_digest": max(one["digest_seconds"] for one in placed)})

            def slowest(ahead, **command):
                return min(
                    max(one["ms"] for one in together(engines, at=time.monotonic() + ahead, **command)) for _ in range(3)
                )  # fmt: skip

            result["kernel_ms"] = {str(setting): slowest(0.3, do="kernel", setting=setting) for setting in _SETTINGS}
            result["digest_ms"] = slowest(0.1, do="digest_ms")
    except (WeightSyncError, RuntimeError, OSError, json.JSONDecodeError) as error:
        result["error"] = str(error)
    rounds = result.get("rounds", [])
    summary = {
        key: round(1000 * statistics.median(one[key] for one in rounds[1:] or rounds), 2) for key in (rounds[0] if rounds else ())
    }
    setup = {
        key: max(one[key] for one in result.get("setup", [{}]))
        for key in ("connect_seconds", "tiles_seconds", "tables_seconds")
        if result.get("setup")
    }
    print(
        name,
        {"median_ms": summary, "first_ms": {key: round(1000 * value, 1) for key, value in (rounds[0].items() if rounds else ())}},
        flush=True,
    )
    print(
        "  kernel ms",
        {key: round(value, 2) for key, value in result.get("kernel_ms", {}).items()},
        "digest",
        result.get("digest_ms"),
        flush=True,
    )
    print(
        "  setup",
        {key: round(value, 3) for key, value in setup.items()},
        "handles",
        result.get("export", [{}])[0],
        "start",
        result.get("start_seconds"),
    )
    print("  floor", [[round(one["kernel_GBps"]), round(one["driver_GBps"])] for one in list(result.get("floor", {}).values())[:8]])
    print("  error", result.get("error"), flush=True)
    return result


def cases(count):
    """What fits on ``count`` GPUs, most wanted first."""
    first, all_of = list(range(min(count, 4))), list(range(count))
    found = {}
    if count >= 8:
        found["moe fsdp4->tp4 separate"] = {"model": "moe", "sources": 4, "targets": 4, "on": first, "to": [4, 5, 6, 7]}
    if count >= 4:
        found["moe fsdp4->tp4 colocated"] = {"model": "moe", "sources": 4, "targets": 4, "on": first, "to": first}
    if count >= 8:
        found["moe fsdp8->tp8 colocated"] = {"model": "moe", "sources": 8, "targets": 8, "on": all_of, "to": all_of}
        found["dense fsdp4->tp4 separate"] = {"model": "dense", "sources": 4, "targets": 4, "on": first, "to": [4, 5, 6, 7]}
    if count == 4:
        found["moe fsdp2->tp2 separate"] = {"model": "moe", "sources": 2, "targets": 2, "on": [0, 1], "to": [2, 3]}
        found["dense fsdp2->tp2 separate"] = {"model": "dense", "sources": 2, "targets": 2, "on": [0, 1], "to": [2, 3]}
    if count >= 4:
        found["dense fsdp4->tp4 colocated"] = {"model": "dense", "sources": 4, "targets": 4, "on": first, "to": first}
    if count >= 2:
        both = {"model": "moe", "sources": 2, "targets": 2, "on": [0, 1], "to": [0, 1]}
        found["moe fsdp2->tp2 colocated"] = both
        found["moe megatron ep2->tp2 colocated"] = {**both, "megatron": True}
        found["dense 1->1"] = {"model": "dense", "sources": 1, "targets": 1, "on": [0], "to": [1]}
        found["moe 1->1"] = {"model": "moe", "sources": 1, "targets": 1, "on": [0], "to": [1]}
        found["dense 1->1 isolated devices"] = {**found["dense 1->1"], "isolated": True, "rounds": 2}
        found["dense 1->1 a region a tensor"] = {**found["dense 1->1"], "scattered": True, "rounds": 3}
    if count >= 4:
        found["moe 1->3"] = {"model": "moe", "sources": 1, "targets": 1, "replicas": 3, "on": [0], "to": [1, 2, 3], "rounds": 3}
    if count == 1:
        found["dense 1->1 colocated"] = {"model": "dense", "sources": 1, "targets": 1, "on": [0], "to": [0]}
        found["dense 1->1 a region a tensor"] = {**found["dense 1->1 colocated"], "scattered": True}
    return found


def main():
    import torch

    out, limit = Path(sys.argv[1]), float(sys.argv[2])
    report = {"device": torch.cuda.get_device_name(0), "count": torch.cuda.device_count(), "torch": torch.__version__, "cases": {}}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, job in cases(torch.cuda.device_count()).items():
            if sys.argv[3:] and name not in sys.argv[3:]:
                continue
            if time.monotonic() - started > limit:
                print(name, "left out: no time", flush=True)
                continue
            report["cases"][name] = run(name, job, Path(folder))
            print("  at", round(time.monotonic() - started), "s", flush=True)
            out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        serve_rank(json.loads(sys.argv[1])["role"])
    else:
        main()
