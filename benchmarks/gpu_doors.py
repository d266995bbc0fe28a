# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202
"""Updates through AReaL and SkyRL, beside ``weightsync.Trainer`` and the framework's own way into the same vLLM.

``python -m benchmarks.gpu_doors areal|skyrl [--model tiny|dense] [--dtype float32|bfloat16] [--rounds N] [--no-own]``

vLLM's server has the first GPU, the trainer the last one. With a single GPU they share it, and a framework's own way, which is
NCCL, cannot run. Prints one line of JSON per way; times are milliseconds, of all updates but the first. ``dense`` has the shapes of
Qwen3-8B (16.4 GB in bfloat16).

AReaL: its ``FSDPEngine`` on one rank (the base of ``FSDPPPOActor``, which holds all of an update), its ``RemotevLLMEngine``, and
its own server with its worker extension, under two names of modules that vLLM 0.25 moved. All three ways go into one server.

SkyRL: its trainer engines, ``FsdpWeightSource`` and HTTP client. Stand-ins: FSDP2 of torch for its Ray worker, vLLM's server for
its server actor. Its own way goes into a second vLLM, of backend ``nccl``; on a vLLM older than 0.27, whose receiver learns the
options of packing with each update instead of once, its client moves them there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import ExitStack
from pathlib import Path

from benchmarks.trl_sync import free_port

__all__ = ["main"]

_HERE = "benchmarks.gpu_doors"
_NAMES = {"experiment_name": "weightsync", "trial_name": "door"}
_MOVED = ("vllm.entrypoints.openai.utils", "vllm.entrypoints.utils")
_LOCAL = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def _show(options, way, times, results):
    from benchmarks.trl_sync import row_of

    shown = {"door": options.door, "model": options.model, "dtype": options.dtype, **row_of(way, times, results)}
    print(json.dumps(shown), flush=True)


def _library(options, model, pause_mode):
    """The library's own row: the same model into the same engine."""
    import torch

    import weightsync
    from benchmarks.trl_sync import timed

    with weightsync.Trainer(model, dtype=torch.bfloat16, pause_mode=pause_mode, new_epoch=True, start_coordinator=False) as trainer:
        trainer.wait_for_replicas()
        _show(options, "weightsync.Trainer", *timed(trainer.publish, model, options.rounds))


def _areal(options):
    """AReaL's trainer, as one rank of torchrun. ``--url`` is its server; without one nothing is asked of a server."""
    import areal.engine.fsdp_engine as engines
    from areal.api import FinetuneSpec, ModelAllocation, WeightUpdateMeta
    from areal.api.cli_args import InferenceEngineConfig, TrainEngineConfig
    from areal.engine import FSDPEngine, RemotevLLMEngine

    from benchmarks.trl_sync import timed
    from weightsync.integrations.areal.actor import PublishesShards

    class DoorEngine(PublishesShards, FSDPEngine):
        """``PublishingFSDPActor`` without AReaL's PPO, which takes no part in an update."""

    engines.gethostip = lambda: "127.0.0.1"  # it asks for a route to the internet
    actor = DoorEngine(
        TrainEngineConfig(
            path=options.directory, backend="fsdp:d1", attn_impl="sdpa", optimizer=None, init_from_scratch=True,
            dtype="bfloat16", optimizer_dtype=options.dtype, **_NAMES,
        )
    )  # fmt: skip
    actor.create_process_group()
    actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=2))
    rollout = RemotevLLMEngine(InferenceEngineConfig(backend="vllm:d1", setup_timeout=options.seconds, **_NAMES))
    if options.url:
        rollout.initialize(addr=options.url.removeprefix("http://"))
    meta = WeightUpdateMeta.from_fsdp_xccl(gen_allocation=ModelAllocation.from_str("vllm:d1"))
    version = 0

    def updated(kind):
        """What AReaL's trainer does for an update."""
        nonlocal version
        version += 1
        if options.url:
            rollout.pause()
        kind.update_weights(actor, meta.with_version(version))
        actor.set_version(version)
        rollout.set_version(version)
        if options.url:
            rollout.resume()
        return actor.result if kind is DoorEngine else None

    actor.connect_engine(rollout, meta)
    _show(options, "AReaL through weightsync", *timed(lambda: updated(DoorEngine), actor.model, options.rounds))
    actor._trainer.close()
    _library(options, actor.model, "abort")
    if options.own:
        actor.weight_update_group_initialized = False
        FSDPEngine.connect_engine(actor, rollout, meta)
        _show(options, "AReaL's own", *timed(lambda: updated(FSDPEngine), actor.model, options.rounds))


def _serve_areal(arguments):
    """AReaL's server. vLLM starts its processes by importing this module, so it stays the main one."""
    moved = importlib.import_module("vllm.entrypoints.serve.utils.api_utils")
    for name in _MOVED:
        sys.modules.setdefault(name, moved)
    sys.argv[1:] = arguments
    runpy.run_module("areal.engine.vllm_ext.areal_vllm_server", run_name="__main__")


def _skyrl(options):
    """SkyRL's trainer engine on one rank. ``--own-url`` is the server of its own way."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from weightsync.integrations.skyrl import enable

    enable()
    from skyrl.backends.skyrl_train.weight_sync import control_plane, weight_senders
    from skyrl.backends.skyrl_train.weight_sync.register import register_trainer_engines
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

    from benchmarks.trl_sync import timed, until_healthy

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.directory), dtype=getattr(torch, options.dtype))
    mesh = init_device_mesh(device, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_trainer_engines()

    class DoorClient(control_plane.SkyrlWeightSyncClient):
        """Says how tensors are packed where vLLM 0.25 to 0.26 read it."""

        def init_weight_transfer_engine(self, init_info):
            if options.packs_late:
                self._packing = {name: init_info.pop(name) for name in list(init_info) if name.startswith("packed")}
            super().init_weight_transfer_engine(init_info)

        def update_weights(self, update_info):
            super().update_weights(update_info | getattr(self, "_packing", {}))

    def connected(url, factory):
        info = weight_senders.get_skyrl_nccl_trainer()[0](
            master_address="127.0.0.1", master_port=free_port(), world_size=2, packed=True, rank=0,
            packed_buffer_size_bytes=weight_senders._packed_buffer_size_bytes(options.directory, 1.0, torch.bfloat16),
        )  # fmt: skip
        client = DoorClient([url], 1, init_payload_fn=control_plane.nccl_init_payloads)
        return factory(info, client=client, source=FsdpWeightSource(model, torch.bfloat16))

    def updated(engine):
        """SkyRL's order of calls, where trainer and inference do not share GPUs, for training that is not overlapped."""
        engine.client.pause_generation()
        try:
            if gpu:
                torch.cuda.empty_cache()
            engine.send_weights()
            if gpu and engine.skyrl_empty_cache_after_send:
                torch.cuda.empty_cache()
            dist.barrier()
        finally:
            engine.client.resume_generation()
        return getattr(engine, "result", None)

    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    until_healthy(options.url, seconds=options.seconds)
    ours = connected(options.url, WeightTransferTrainerFactory.trainer_init)
    if ours._trainer is not None:
        ours._trainer.wait_for_replicas()
    _show(options, "SkyRL through weightsync", *timed(lambda: updated(ours), model, options.rounds))
    weight_senders.teardown_engine(ours)
    _library(options, model, "keep")
    if options.own_url:
        until_healthy(options.own_url, seconds=options.seconds)
        own = connected(options.own_url, weight_senders.get_skyrl_nccl_trainer()[1].trainer_init)
        _show(options, "SkyRL's own", *timed(lambda: updated(own), model, options.rounds))


def _start(options, owned, directory, environment):
    """Start the door's servers; return the one of weightsync, and what the trainer is told. The trainer waits for them."""
    from benchmarks.trl_sync import start_server
    from weightsync.releases import release_of

    first, told, flags = None, [], [
        "--load-format", "dummy", "--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2 << 30)
    ] if _gpus() else []  # fmt: skip
    module = "vllm.entrypoints.openai.api_server"
    if options.door == "areal":
        module = f"{_HERE} --serve-areal"
        flags += ["--worker-extension-cls", "areal.engine.vllm_ext.vllm_worker_extension.VLLMWorkerExtension"]
    backends = ["weightsync", "nccl"] if options.door == "skyrl" and options.own else ["weightsync"]
    for backend, name in zip(backends, ("--url", "--own-url"), strict=False):
        url = f"http://127.0.0.1:{free_port()}"
        own = environment if backend == "weightsync" else {}
        process = start_server(directory, backend, url.rpartition(":")[2], _LOCAL | own, flags, module.split())
        owned.callback(_end, process)
        told += [name, url]
        first = first or process
    late = backends[1:] and release_of("vllm").startswith(("0.25", "0.26"))
    return first, told + (["--packs-late"] if late else []) + (["--own"] if options.own else ["--no-own"])


def _end_with(server, trainer):
    """The trainer does not wait for a server that has ended."""
    status = server.wait()
    if trainer.poll() is None:
        print(f"the server ended with exit status {status}", file=sys.stderr, flush=True)
        trainer.kill()


def _gpus():
    import torch

    return torch.cuda.device_count()


def _end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # nothing that it holds outlives it
        process.wait(30)


def main(arguments=None) -> int:
    """Run it; see the module's docstring."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--serve-areal"]:
        _serve_areal(arguments[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("door", choices=["areal", "skyrl"])
    parser.add_argument("--model", choices=["tiny", "dense"], default="tiny")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32", help="of the trainer's parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of all of it")
    parser.add_argument("--own", action=argparse.BooleanOptionalAction, default=True, help="measure the framework's own way too")
    for hidden in ("--directory", "--url", "--own-url"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--trainer-path", help="a folder before the others on the trainer's path: for its own release of vLLM")
    parser.add_argument("--packs-late", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        try:
            {"areal": _areal, "skyrl": _skyrl}[options.door](options)
            status = 0
        except BaseException:  # noqa: BLE001 - it is shown, and the process ends
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)  # threads of NCCL and AReaL may not end
    return _run(options)


def _run(options):
    from benchmarks.gpu_verl import write_checkpoint
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    if _gpus() < 2 and options.own:
        print(json.dumps({"door": options.door, "way": "its own", "not run": "NCCL needs two GPUs"}), flush=True)
        options.own = False
    with ExitStack() as owned:
        directory = owned.enter_context(tempfile.TemporaryDirectory())
        coordinator = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)))
        write_checkpoint(Path(directory), options.model)
        joining = {"WEIGHTSYNC_COORDINATOR": coordinator.url, "WEIGHTSYNC_TOKEN": coordinator.token, "WEIGHTSYNC_REPLICA": "vllm-0"}
        server, told = _start(options, owned, directory, joining)
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()), "HF_HUB_OFFLINE": "1", "WEIGHTSYNC_REPLICAS_TIMEOUT": str(options.seconds / 3),
                **({"CUDA_VISIBLE_DEVICES": str(_gpus() - 1)} if _gpus() else {})}  # fmt: skip
        path = os.pathsep.join(filter(None, [options.trainer_path, os.environ.get("PYTHONPATH")]))
        child = [
            sys.executable, "-m", _HERE, options.door, "--train", "--model", options.model, "--dtype", options.dtype,
            "--rounds", str(options.rounds), "--seconds", str(options.seconds), "--directory", directory, *told,
        ]  # fmt: skip
        trainer = subprocess.Popen(child, env={**os.environ, **_LOCAL, **joining, **rank, "PYTHONPATH": path})
        owned.callback(trainer.kill)
        threading.Thread(target=_end_with, args=(server, trainer), daemon=True).start()
        return trainer.wait(options.seconds)


if __name__ == "__main__":
    sys.exit(main())
