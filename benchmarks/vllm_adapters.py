"""LoRA adapters into a real vLLM server: ``python -m benchmarks.vllm_adapters MODEL|small|tiny [--rank N] [--minutes N]``.

``small``: a dense Llama of 12 layers on this CPU; ``tiny``: of two, for a test. ``moe``: a small mixture of experts on this GPU,
with CUDA graphs, for a test. ``MODEL``: a model of the GPU suite, shapes only, on this GPU; its adapter changes every projection,
those of all experts too. Beside what ``Adapters.publish`` takes, vLLM's own ``/v1/load_lora_adapter`` takes the same adapters from
a directory in memory, and both must answer alike in the last two versions.

``--minutes N``: requests go on for so many minutes, and every other one an adapter is published every two seconds: their latency in
both. At last vLLM replaces an adapter in place, to see what its prefix cache answers then. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}

import httpx
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.processes import none_outlives

import weightsync
from benchmarks.gpu_vllm import shapes_only, share_of_gpu, tiny
from benchmarks.trl_sync import free_port
from weightsync.config import Address, ClientSettings, Secret, ServerSettings
from weightsync.errors import RoundFailed
from weightsync.model import Manifest
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

NAME = "bench/tenant"
PROMPTS = [[(11 * row + 7 * column * (row + 2)) % 509 + 3 for column in range(160)] for row in range(4)]
TOKENS = 12
CLIENTS = 4
ON_CPU = {"small": (512, 12), "tiny": (128, 2)}
"""Hidden size and layers."""
START_SECONDS, EVERY_SECONDS = 240.0, 2.0
State = dict[str, torch.Tensor]


def dense(folder: str, hidden: int, layers: int) -> dict[str, tuple[int, int]]:
    """Write a random checkpoint; return its projections' (outputs, inputs)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_key_value_heads=2,
        num_attention_heads=hidden // 64, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    model = torch.nn.Module.to(LlamaForCausalLM(config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return {
        name.removesuffix(".weight"): (value.shape[0], value.shape[1])
        for name, value in model.state_dict().items()
        if name.endswith("_proj.weight")
    }


def of_experts(folder: str) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """The same of a small mixture of experts, whose checkpoint has each expert's projections."""
    tiny(folder, moe=True)  # type: ignore[no-untyped-call]
    with safe_open(Path(folder) / "model.safetensors", "pt") as checkpoint:
        names = [name for name in checkpoint.keys() if name.endswith("_proj.weight")]  # noqa: SIM118 - it is no mapping
        shapes = {name: checkpoint.get_slice(name).get_shape() for name in names}
    graphs = json.dumps({"cudagraph_capture_sizes": [1, 2, 4]})
    projections = {name.removesuffix(".weight"): (outputs, inputs) for name, (outputs, inputs) in shapes.items()}
    return projections, ["--gpu-memory-utilization", "0.1", "--compilation-config", graphs]


def of_suite(folder: str, name: str, layers: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """The same of a model of the GPU suite, of which only shapes are written; and vLLM's flags for it."""
    from weightsync_bench.gpu_job import manifest_for

    number = re.compile(r"model\.layers\.(\d+)\.")
    manifest = Manifest(
        spec for spec in manifest_for(name) if (match := number.match(spec.name)) is None or not layers or int(match[1]) < layers
    )
    shapes_only(folder, manifest)  # type: ignore[no-untyped-call]
    projections = {
        spec.name.removesuffix(".weight"): (spec.shape[0], spec.shape[1]) for spec in manifest if spec.name.endswith("_proj.weight")
    }
    room = 12e9 / torch.cuda.get_device_properties(0).total_memory  # for slots of adapters
    share = share_of_gpu(manifest, 1) + room  # type: ignore[no-untyped-call]
    return projections, ["--load-format", "dummy", "--gpu-memory-utilization", f"{share:.3f}", "--enforce-eager"]


def adapter(projections: dict[str, tuple[int, int]], rank: int, device: str) -> State:
    """Matrices of an adapter for all projections, of no values yet."""
    state = {}
    for name, (outputs, inputs) in projections.items():
        state[f"{name}.lora_A.weight"] = torch.empty(rank, inputs, dtype=torch.bfloat16, device=device)
        state[f"{name}.lora_B.weight"] = torch.empty(outputs, rank, dtype=torch.bfloat16, device=device)
    return state


def randomize(state: State, seed: int) -> None:
    generator = torch.Generator(device=next(iter(state.values())).device).manual_seed(seed)
    for tensor in state.values():
        tensor.normal_(0.0, 0.05, generator=generator)


def save(folder: Path, state: State, rank: int) -> str:
    """Write an adapter as PEFT does, to memory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file({f"base_model.model.{name}": tensor.cpu() for name, tensor in state.items()}, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in state})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "base_model_name_or_path": "x"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM", "bias": "none"}))
    return str(folder)


class Served:
    """vLLM's server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def answers(self, model: str, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
        return [self._ask(model, prompt) for prompt in prompts]

    def _ask(self, model: str, prompt: Sequence[int]) -> list[int]:
        wish = {
            "model": model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body = self._http.post("/v1/completions", json=wish).raise_for_status().json()
        return list(body["choices"][0]["token_ids"])

    def load(self, name: str, folder: str, *, in_place: bool = False) -> None:
        wish = {"lora_name": name, "lora_path": folder, "load_inplace": in_place}
        self._http.post("/v1/load_lora_adapter", json=wish).raise_for_status()

    def unload(self, name: str) -> None:
        self._http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


@contextmanager
def serving(folder: str, flags: Sequence[str], rank: int, coordinator: BackgroundServer) -> Iterator[Served]:
    """A vLLM server that has joined."""
    token = Path(folder) / "token"
    token.touch(0o600)
    token.write_text(coordinator.token)
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "base", *flags,
        "--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "8",
        "--host", "127.0.0.1", "--port", str(port), "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "6",
        "--max-lora-rank", str(max(8, 1 << (rank - 1).bit_length())), "--weight-transfer-config", '{"backend": "weightsync"}',
    ]  # fmt: skip
    environment = {"WEIGHTSYNC_COORDINATOR": coordinator.url, "WEIGHTSYNC_TOKEN_FILE": str(token), "WEIGHTSYNC_REPLICA": "vllm"}
    with none_outlives(), subprocess.Popen(command, env=os.environ | environment, stdout=sys.stderr) as process:
        try:
            settings = ClientSettings(coordinator=Address.parse(coordinator.url), token=Secret(coordinator.token))
            with Client(settings) as client:
                until, tick = time.monotonic() + START_SECONDS, threading.Event()
                while not any(not replica.missing for replica in client.status().replicas):
                    if process.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(f"vLLM did not join ({process.poll()})")
                    tick.wait(0.2)
            url = f"http://127.0.0.1:{port}"
            while time.monotonic() < until:
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                        break
                tick.wait(0.2)
            yield Served(url)
        finally:
            process.terminate()
            process.wait(60)


class Traffic:
    """Requests of several clients, for ``model()``, with the seconds that each took, by what was going on when it began."""

    def __init__(self, served: Served, model: Callable[[], str]) -> None:
        self._served, self._model = served, model
        self.what, self.taken, self.failed = "", dict[str, list[float]](), list[str]()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(CLIENTS)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        prompt = [(5 * seed + 3 * column) % 499 + 3 for column in range(32)]
        while not self._end.is_set():
            began, what = time.perf_counter(), self.what
            try:
                self._served.answers(self._model(), [prompt])
            except httpx.HTTPError as error:
                self.failed.append(str(error))
            self.taken.setdefault(what, []).append(time.perf_counter() - began)


def milliseconds(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(1000 * value, 1) for value in (statistics.median(values), min(values), max(values))]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    of = {share: ranked[min(len(ranked) - 1, math.ceil(len(ranked) * share / 100) - 1)] for share in (50, 99)}
    return {"requests": len(ranked)} | {f"p{share}_ms": round(1000 * value, 1) for share, value in of.items()}


def measured(model: str, rank: int, versions: int, minutes: int, layers: int = 0) -> dict[str, Any]:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if model in ON_CPU:
            torch.set_num_threads(1)
            os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
            projections, flags, device = dense(folder, *ON_CPU[model]), ["--enforce-eager"], "cpu"
        else:
            projections, flags = of_experts(folder) if model == "moe" else of_suite(folder, model, layers)
            device = f"cuda:{torch.cuda.device_count() - 1}"
        state = adapter(projections, rank, device)
        seen: dict[str, Any] = {"tensors": len(state), "bytes": sum(tensor.nbytes for tensor in state.values())}
        with BackgroundServer(ServerSettings.load({}, port=0)) as coordinator, serving(folder, flags, rank, coordinator) as served:
            at: dict[str, Any] = {"coordinator": coordinator.url, "token": coordinator.token}
            with weightsync.Adapters(state, None, alpha=rank, **at) as adapters:
                number, taken, retired, own = 0, list[float](), list[float](), list[float]()
                alike, twice, differ = list[bool](), list[bool](), list[bool]()

                def publish() -> weightsync.RoundResult:
                    nonlocal number
                    number += 1
                    began = time.perf_counter()
                    made = adapters.publish(NAME, number, timeout=60)
                    published = time.perf_counter()
                    adapters.retire(NAME, keep=1)
                    taken.append(published - began)
                    retired.append(time.perf_counter() - published)
                    return made

                for seed in range(versions + 1):
                    randomize(state, seed)
                    result = publish()
                    saved = save(Path(memory) / "adapter", state, rank)
                    began = time.perf_counter()
                    served.load(f"own{seed}", saved)
                    own.append(time.perf_counter() - began)
                    if seed >= versions - 1:  # answers of a large model take most of the time
                        published, loaded = served.answers(NAME), served.answers(f"own{seed}")
                        served.load(f"twice{seed}", saved)
                        twice.append(served.answers(f"twice{seed}") == loaded)  # sums on a GPU may be taken in another order
                        alike.append(published == loaded)
                        differ.append(published != served.answers("base"))
                        served.unload(f"twice{seed}")
                    served.unload(f"own{seed}")
                    phases = result.phases | result.replicas[0].phases
                    parts = ", ".join(f"{name} {1000 * value:.0f}" for name, value in phases.items())
                    print(f"version {number}: published in {taken[-1]:.3f} s ({parts} ms), by vLLM in {own[-1]:.3f} s", flush=True)
                (replica,) = result.replicas
                seen |= {
                    "first_ms": milliseconds(taken[:1])[0], "publish_ms": milliseconds(taken[1:]),
                    "retire_ms": milliseconds(retired[1:]), "own_load_ms": milliseconds(own[1:]),
                    "answers_as_loaded": alike, "loaded_twice_answers_alike": twice, "answers_differ_from_base": differ,
                    "verified": replica.verified, "paused_seconds": replica.paused_seconds,
                    "phases_ms": {name: round(1000 * value, 1) for name, value in result.phases.items() | replica.phases.items()},
                    "transports": list(replica.transports),
                }  # fmt: skip
                if minutes:
                    seen |= under_load(served, minutes, publish, lambda seed: randomize(state, seed))
            if minutes or model in ON_CPU:
                seen |= in_place(served, state, rank, Path(memory) / "place")
    return seen


def under_load(
    served: Served, minutes: int, publish: Callable[[], object], change: Callable[[int], None], minute: float = 60.0
) -> dict[str, Any]:
    """Latency of requests in alternating minutes, without and while an adapter is published."""
    published, tick, errors = 0, threading.Event(), list[str]()
    with Traffic(served, lambda: NAME) as traffic:
        tick.wait(5.0)  # warm
        for turn in range(minutes):
            until = time.monotonic() + minute
            traffic.what = "publishing" if turn % 2 else "alone"
            while (left := until - time.monotonic()) > 0:
                if turn % 2:
                    change(1000 + published)
                    try:
                        publish()
                    except RoundFailed as error:
                        errors.append(str(error))
                    published += 1
                tick.wait(min(EVERY_SECONDS, left))
    return {
        "alone": percentiles(traffic.taken["alone"]), "publishing": percentiles(traffic.taken["publishing"]),
        "published": published, "failed": traffic.failed + errors,
    }  # fmt: skip


def in_place(served: Served, state: State, rank: int, folder: Path) -> dict[str, Any]:
    """What vLLM answers after it has replaced an adapter in place, to prompts that its prefix cache knows, and to others."""
    randomize(state, 2001)
    served.load("place", save(folder, state, rank))
    served.answers("place")
    randomize(state, 2002)
    served.load("place", save(folder, state, rank), in_place=True)
    after = served.answers("place")
    served.load("fresh", str(folder))
    return {"own_in_place_answers_as_fresh": [one == other for one, other in zip(after, served.answers("fresh"), strict=True)]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="keep so many layers of a MODEL")
    parser.add_argument("--minutes", type=int, default=0)
    options = parser.parse_args(arguments)
    seen = measured(options.model, options.rank, options.versions, options.minutes, options.layers)
    print("RESULT " + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
