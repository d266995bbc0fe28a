# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN204
"""Measures whole rounds on GPUs: ``python -m tests.gpu.measure_rounds OUT SECONDS [CASE ...]``.

A coordinator, and a process for each rank with the public Trainer or Engine. Trainer ranks hold DTensors (cut along the first
dimension as FSDP2 does), engine ranks the parts of a tensor-parallel model, every tensor an allocation of its own. Weights are
random and new in every round; rounds verify by digest, and a round that does not end well on every rank fails the case.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from weightsync.bench.shapes import qwen3_8b, qwen3_30b_a3b
from weightsync.bench.sharding import fsdp, tensor_parallel
from weightsync.model import Manifest

_MODELS = {"moe": qwen3_30b_a3b, "dense": qwen3_8b}
_ROUNDS = 8


def _boxes(manifest, layout):
    """Name, global shape, starts and stops of each row of a layout."""
    for row in range(len(layout)):
        spec = manifest[int(layout.tensor[row])]
        box = layout.box(row, manifest)
        yield spec, box


class Rank:
    """What trainer and engine ranks have in common."""

    def __init__(self, device):
        import torch

        torch.cuda.set_device(device)
        self.device = device
        torch.empty(1, device="cuda")

    def memory(self):
        """Bytes in use: of the whole device, as the driver sees it, and by this process's tensors."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return {"device": total - free, "tensors": torch.cuda.memory_allocated()}


class TrainerRank(Rank):
    """Commands of a trainer rank."""

    def __init__(self, job, rank, device):
        super().__init__(device)
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self.rank, self.world = rank, job["sources"]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.world)
        mesh = DeviceMesh("cuda", list(range(self.world)))
        torch.cuda.set_device(device)
        manifest = Manifest(_MODELS[job["model"]]())
        self.state, self.local = {}, []
        for spec, box in _boxes(manifest, fsdp(manifest, self.world)[rank]):
            part = torch.empty(box.shape, dtype=torch.bfloat16, device=f"cuda:{device}")
            stride = torch.empty(spec.shape, device="meta").stride()
            self.local.append(part)
            self.state[spec.name] = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=torch.Size(spec.shape), stride=stride
            )

    def join(self, url, token):
        from weightsync.agents.trainer import Trainer

        started = time.perf_counter()
        self.trainer = Trainer(self.state, url, token=token, rank=self.rank, world_size=self.world)
        return {"seconds": time.perf_counter() - started, "live": self.trainer._role.live}

    def change(self, version):
        import torch

        torch.manual_seed(version * 1000 + self.rank)
        for part in self.local:
            part.view(torch.int16).random_(-32768, 32767)
        torch.cuda.synchronize()
        return {}

    def publish(self, version):
        import msgspec

        started = time.monotonic()
        result = self.trainer.publish(version, timeout=120)
        return {"begun": started, "ended": time.monotonic(), "result": msgspec.to_builtins(result)}


class EngineRank(Rank):
    """Commands of an engine rank."""

    def __init__(self, job, rank, device):
        super().__init__(device)
        import torch

        from weightsync.roles.adapter import EngineAdapter
        from weightsync.tensors.shards import shard

        self.rank, self.world = rank, job["targets"]
        manifest = Manifest(_MODELS[job["model"]]())
        shards, times = [], {}
        for spec, box in _boxes(manifest, tensor_parallel(manifest, self.world)[rank]):
            part = torch.zeros(box.shape, dtype=torch.bfloat16, device=f"cuda:{device}")
            shards.append(shard(spec.name, part, spec.shape, box.starts))

        class Adapter(EngineAdapter):
            def manifest(self):
                return manifest

            def shards(self):
                return shards

            def pause(self, mode, timeout):
                times["paused"] = time.monotonic()

            def resume(self):
                times["resumed"] = time.monotonic()

        self.adapter, self.times = Adapter(), times

    def join(self, url, token):
        from weightsync.agents.engine import Engine

        started = time.perf_counter()
        self.engine = Engine(self.adapter, "replica", url, token=token, rank=self.rank, world_size=self.world)
        return {"seconds": time.perf_counter() - started}

    def last(self):
        route = self.engine._role._route
        tables = route.combined.build().table_bytes + route.digest_of._digest.table_bytes
        return {**self.times, "serving": self.engine.serving.number, "table_bytes": tables, "bytes": route.nbytes}


def serve():
    """One rank: commands from standard input, answers to standard output."""
    me = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            if name in ("trainer", "engine"):
                me = {"trainer": TrainerRank, "engine": EngineRank}[name](*arguments)
                answer = {}
            else:
                answer = getattr(me, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - reported to whoever asked
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), flush=True)
    os._exit(0)


class Ranks:
    """Processes that are told the same thing at once."""

    def __init__(self, count):
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.measure_rounds"]
        self.processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]

    def ask(self, *messages):
        for process, message in zip(self.processes, messages, strict=True):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def answers(self):
        found = [json.loads(process.stdout.readline() or '{"error": "died"}') for process in self.processes]
        errors = [one["error"] for one in found if "error" in one]
        if errors:
            raise RuntimeError("; ".join(errors[:2]))
        return found

    def tell(self, *messages):
        self.ask(*messages)
        return self.answers()

    def all(self, *message):
        return self.tell(*(message for _ in self.processes))

    def end(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _rate(source, target):
    """GB/s of the driver's copy of 2 GiB between these devices, bytes counted once."""
    import torch

    one = torch.empty(2 << 30, dtype=torch.uint8, device=f"cuda:{source}")
    other = torch.empty(2 << 30, dtype=torch.uint8, device=f"cuda:{target}")
    one.random_()
    best = 0.0
    for _ in range(6):
        torch.cuda.synchronize(source), torch.cuda.synchronize(target)
        with torch.cuda.device(source):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            other.copy_(one)
            end.record()
            end.synchronize()
        best = max(best, (2 << 30) / begin.elapsed_time(end) / 1e6)
    del one, other
    torch.cuda.empty_cache()
    return best


def _floor(job, rates):
    """Milliseconds of moving the bytes alone, for the slowest rank: those from peers over its link, its own by a local copy."""
    manifest = Manifest(_MODELS[job["model"]]())
    sources, worst, most = fsdp(manifest, job["sources"]), 0.0, (0, 0)
    for rank, layout in enumerate(tensor_parallel(manifest, job["targets"])):
        total = layout.nbytes(manifest)
        own = 0
        for number, source in enumerate(sources):
            if job["on"][number] == job["to"][rank]:
                own += _common(manifest, layout, source)
        seconds = max((total - own) / rates["peer"] if total > own else 0, own / rates["local"]) / 1e9
        if seconds > worst:
            worst, most = seconds, (total, total - own)
    return {"floor_ms": 1000 * worst, "bytes": most[0], "bytes_from_peers": most[1]}


def _common(manifest, one, other):
    """Bytes in both layouts (a row a tensor each)."""
    mine, theirs = {int(t): r for r, t in enumerate(one.tensor)}, {int(t): r for r, t in enumerate(other.tensor)}
    both = [(mine[t], theirs[t]) for t in mine.keys() & theirs.keys()]
    a, b = np.array([x for x, _ in both]), np.array([y for _, y in both])
    extents = np.minimum(one.stops[a], other.stops[b]) - np.maximum(one.starts[a], other.starts[b])
    return int((np.prod(np.maximum(extents, 0), axis=1) * manifest.itemsizes[one.tensor[a]]).sum())


def run(name, job, rates):
    from weightsync.service.server import BackgroundServer
    from weightsync.service.settings import ServerSettings

    result = {"job": job, **_floor(job, rates)}
    trainers, engines = Ranks(len(job["on"])), Ranks(len(job["to"]))
    with BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)) as server:
        try:
            started = time.perf_counter()
            trainers.ask(*(["trainer", job, rank, device] for rank, device in enumerate(job["on"])))
            engines.ask(*(["engine", job, rank, device] for rank, device in enumerate(job["to"])))
            trainers.answers(), engines.answers()
            result["load_seconds"] = time.perf_counter() - started
            trainers.all("memory"), engines.all("memory")
            before = trainers.all("memory"), engines.all("memory")
            held = trainers.all("join", server.url, server.token)
            if not all(one["live"] for one in held):
                raise RuntimeError("a trainer rank does not publish in place")
            result["join_seconds"] = {
                "trainer": max(one["seconds"] for one in held),
                "engine": max(one["seconds"] for one in engines.all("join", server.url, server.token)),
            }
            result["rounds"] = [_round(trainers, engines, version) for version in range(job.get("rounds", _ROUNDS))]
            after = trainers.all("memory"), engines.all("memory")
            result["extra_bytes"] = {
                f"{side}_{what}": max(b[what] - a[what] for a, b in zip(before[index], after[index], strict=True))
                for index, side in enumerate(("trainer", "engine"))
                for what in ("device", "tensors")
            }
        except (RuntimeError, OSError, json.JSONDecodeError) as error:
            result["error"] = str(error)
        finally:
            engines.end()
            trainers.end()
    rounds = result.get("rounds", [])
    if rounds:
        result["first"], steady = rounds[0], rounds[1:] or rounds
        result["steady_median"] = {key: statistics.median(one[key] for one in steady) for key in steady[0]}
    print(name, json.dumps({key: value for key, value in result.items() if key not in ("job", "rounds")}, indent=1), flush=True)
    return result


def _round(trainers, engines, version):
    """One publication, in milliseconds."""
    trainers.all("change", version)
    told = trainers.all("publish", version)
    ended = engines.all("last")
    if any(one["serving"] != version for one in ended):
        raise RuntimeError(f"a rank serves {[one['serving'] for one in ended]}, not {version}")
    result = told[0]["result"]
    (replica,) = result["replicas"]
    if replica["verified"] != "installed" or replica["transports"] != ["cuda_ipc"]:
        raise RuntimeError(f"the round was not what is measured: {replica}")
    publish = max(one["ended"] for one in told) - min(one["begun"] for one in told)
    parts = replica["parts"]
    milliseconds = {
        "publish": publish,
        "round": result["seconds"],
        "place": result["phases"]["place"],
        "agree": replica["phases"]["agree"],
        "pause_to_resume": max(one["resumed"] for one in ended) - min(one["paused"] for one in ended),
        "pause_to_resume_at_coordinator": replica["paused_seconds"],
        **{phase: replica["phases"][phase] for phase in ("pause", "move", "verify", "commit")},
        "receive": parts["receive"],
        "digest": parts["digest"],
        "overhead_while_paused": replica["paused_seconds"] - parts["receive"] - parts["digest"],
        "overhead_of_round": publish - result["phases"]["place"] - parts["receive"] - parts["digest"],
    }
    return {key: round(1000 * value, 3) for key, value in milliseconds.items()} | {
        "table_bytes": max(one["table_bytes"] for one in ended)
    }


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
    if count == 2:
        found["dense fsdp2->tp2 colocated"] = {"model": "dense", "sources": 2, "targets": 2, "on": [0, 1], "to": [0, 1]}
    if count == 1:
        found["dense fsdp2->tp2 one GPU"] = {"model": "dense", "sources": 2, "targets": 2, "on": [0, 0], "to": [0, 0]}
        found["moe fsdp2->tp2 one GPU"] = {"model": "moe", "sources": 2, "targets": 2, "on": [0, 0], "to": [0, 0]}
    return found


def main():
    import torch

    out, limit, count = Path(sys.argv[1]), float(sys.argv[2]), torch.cuda.device_count()
    started = time.monotonic()
    rates = {"local": _rate(0, 0), "peer": _rate(0, count - 1)}
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "device": torch.cuda.get_device_name(0),
        "count": count,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rates_GBps": rates,
        "cases": {},
    }
    print(json.dumps(rates), flush=True)
    for name, job in cases(count).items():
        if sys.argv[3:] and name not in sys.argv[3:]:
            continue
        if time.monotonic() - started > limit:
            print(name, "left out: no time", flush=True)
            continue
        report["cases"][name] = run(name, job, rates)
        print("  at", round(time.monotonic() - started), "s", flush=True)
        out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        serve()
