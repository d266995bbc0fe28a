"""A program: rounds of a real trainer into a real vLLM on this CPU; prints what was seen as one line of JSON.

``python vllm_rounds.py KIND RANKS DIRECTORY`` with a KIND of offline, server, offline-env, async-env, server-env; the last three
are told of the coordinator by their environment alone. A process of its own, because vLLM starts processes and threads that it
does not end, and warns while it is imported. vLLM's workers import this file again, and must not find numba loaded (vLLM's CPU
build fails then): what needs it is imported where it is used.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from tests.integration.server.service_support import free_port
from tests.processes import none_outlives
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import weightsync
from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.errors import RoundFailed
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer

VOCABULARY, TOKENS, BLOCK = 256, 12, 32
PROMPTS = [[(7 * row + 5 * column * (row + 1)) % (VOCABULARY - 1) + 1 for column in range(2 * BLOCK + 6)] for row in range(3)]
START_SECONDS = 240


class Served(Protocol):
    """A vLLM under test."""

    def generate(self) -> tuple[list[list[int]], int]:
        """Greedy answers to the prompts, and how many prompt tokens came out of the prefix cache."""
        ...

    def label(self) -> str | None: ...

    def fail_next_load(self) -> None: ...


def change(model: PreTrainedModel, seed: int) -> None:
    """New weights, lively enough that the answer depends on every token of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + noise * 0.1 if parameter.dim() == 1 and "norm" in name else noise * (1.0 if "embed" in name else 0.15)
            )


def expected(model: PreTrainedModel) -> list[list[int]]:
    """Transformers' greedy answers with the published weights, in float32 as vLLM computes here: no ties to break."""
    reference = type(model)(model.config)
    torch.nn.Module.to(reference, dtype=torch.float32)  # in place
    reference.load_state_dict(model.state_dict())
    reference.train(False)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(TOKENS):
                ids = torch.cat([ids, reference(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


class Offline:
    def __init__(self, directory: str, ranks: int) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import WeightTransferConfig

        self.llm = LLM(
            model=directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, tensor_parallel_size=ranks,
            max_model_len=256, block_size=BLOCK, max_num_seqs=8, weight_transfer_config=WeightTransferConfig(backend="weightsync"),
            worker_extension_cls="vllm_faults.Faults",
        )  # fmt: skip
        self.sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        self.attached: Any = None

    def generate(self) -> tuple[list[list[int]], int]:
        with self.attached.in_use(30):
            answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], self.sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers], sum(answer.num_cached_tokens or 0 for answer in answers)

    def label(self) -> str | None:
        with self.attached.in_use(30) as version:
            return str(version)

    def fail_next_load(self) -> None:
        with self.attached.in_use(30):
            self.llm.collective_rpc("fail_next_load")


class OfflineByEnvironment(Offline):
    """As a user has it who only set two variables: nothing is attached, nothing is held."""

    def generate(self) -> tuple[list[list[int]], int]:
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], self.sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers], sum(answer.num_cached_tokens or 0 for answer in answers)

    def label(self) -> str | None:
        return str(self.llm.llm_engine.get_weight_version())

    def fail_next_load(self) -> None:
        self.llm.collective_rpc("fail_next_load")


class Async:
    """An ``AsyncLLM`` on an event loop of its own."""

    def __init__(self, directory: str, ranks: int) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self._there(self._make(directory, ranks))

    def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(START_SECONDS)

    async def _make(self, directory: str, ranks: int) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, tensor_parallel_size=ranks,
                max_model_len=256, block_size=BLOCK, max_num_seqs=8,
                weight_transfer_config=WeightTransferConfig(backend="weightsync"), worker_extension_cls="vllm_faults.Faults",
            )
        )  # fmt: skip

    async def _answer(self, number: int, prompt: list[int]) -> tuple[list[int], int]:
        from vllm import SamplingParams

        wish = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        asked = self.engine.generate({"prompt_token_ids": prompt}, wish, f"{number}-{time.monotonic_ns()}")
        last = [output async for output in asked][-1]
        return list(last.outputs[0].token_ids), last.num_cached_tokens or 0

    def generate(self) -> tuple[list[list[int]], int]:
        found = [self._there(self._answer(number, prompt)) for number, prompt in enumerate(PROMPTS)]
        return [tokens for tokens, _ in found], sum(cached for _, cached in found)

    def label(self) -> str | None:
        return str(self._there(self.engine.get_weight_version()))

    def fail_next_load(self) -> None:
        self._there(self.engine.collective_rpc("fail_next_load"))


class Server:
    def __init__(self, url: str, process: int = 0) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def generate(self) -> tuple[list[list[int]], int]:
        tokens, cached = [], 0
        for prompt in PROMPTS:
            wish = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = self.http.post("/v1/completions", json=wish | {"return_token_ids": True}).raise_for_status().json()
            tokens.append(answer["choices"][0]["token_ids"])
            cached += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return tokens, cached

    def label(self) -> str | None:
        return str(self.http.get("/weight_info").json()["weight_version"])

    def named(self, label: str) -> dict[str, Any]:
        """Status codes of requests that name versions, the version that an answer names, and what the readiness route says."""
        run, _, number = label.rpartition("@")
        wish = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        asked = {
            "later": ("Min-Version", int(number) + 1), "least": ("Min-Version", int(number)),
            "exact": ("Version", int(number)), "earlier": ("Version", int(number) - 1),
        }  # fmt: skip
        answers = {
            name: self.http.post("/v1/completions", json=wish, headers={f"X-Weightsync-{header}": f"{run}@{wanted}"})
            for name, (header, wanted) in asked.items()
        }
        ready = self.http.get("/health/weights")
        return {name: answer.status_code for name, answer in answers.items()} | {
            "answered": answers["least"].headers.get("X-Weightsync-Version"), "ready": [ready.status_code, ready.json()["version"]],
        }  # fmt: skip

    def fail_next_load(self) -> None:
        self.http.post("/collective_rpc", json={"method": "fail_next_load"}).raise_for_status()


@contextmanager
def offline(directory: str, ranks: int, coordinator: BackgroundServer) -> Iterator[Served]:
    from weightsync.engines.vllm import attach

    found = Offline(directory, ranks)
    found.attached = attach(found.llm, "vllm-0", coordinator.url, token=coordinator.token, bucket_bytes=200_000)
    try:
        yield found
    finally:
        found.attached.close()
        found.llm.llm_engine.engine_core.shutdown()


def tell_environment(coordinator: BackgroundServer, directory: str) -> None:
    token = Path(directory) / "token"
    token.touch(0o600)
    token.write_text(coordinator.token)
    os.environ.update(WEIGHTSYNC_COORDINATOR=coordinator.url, WEIGHTSYNC_TOKEN_FILE=str(token), WEIGHTSYNC_REPLICA="vllm-0")


@contextmanager
def offline_by_environment(directory: str, ranks: int, coordinator: BackgroundServer) -> Iterator[Served]:
    tell_environment(coordinator, directory)
    found = OfflineByEnvironment(directory, ranks)
    try:
        yield found
    finally:
        found.llm.llm_engine.engine_core.shutdown()


@contextmanager
def async_by_environment(directory: str, ranks: int, coordinator: BackgroundServer) -> Iterator[Served]:
    tell_environment(coordinator, directory)
    found = Async(directory, ranks)
    try:
        yield found
    finally:
        found.engine.shutdown()


@contextmanager
def server_by_environment(directory: str, ranks: int, coordinator: BackgroundServer) -> Iterator[Served]:
    tell_environment(coordinator, directory)
    with server(directory, ranks, coordinator) as found:
        yield found


KINDS = {
    "offline": offline, "offline-env": offline_by_environment, "async-env": async_by_environment,
    "server-env": server_by_environment,
}  # fmt: skip


@contextmanager
def serving(
    directory: str, ranks: int, more: dict[str, str], flags: Sequence[str] = ("--skip-tokenizer-init",)
) -> Iterator[Server]:
    """vLLM's HTTP server, with ``more`` in its environment, and ``flags`` besides those that every test has.

    Where a test kills it, its engine core stays; so it is killed here.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", directory, "--served-model-name", "tiny",
        *flags, "--dtype", "float32", "--enforce-eager", "--tensor-parallel-size", str(ranks),
        "--max-model-len", "256", "--block-size", str(BLOCK), "--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(port),
        "--weight-transfer-config", '{"backend": "weightsync"}', "--worker-extension-cls", "vllm_faults.Faults",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"} | more  # for the fault, the label, and attach_server
    with none_outlives(), subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            until, tick = time.monotonic() + START_SECONDS, threading.Event()
            while time.monotonic() < until and process.poll() is None:
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                        break
                except httpx.HTTPError:
                    tick.wait(0.5)
            yield Server(url, process.pid)
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def server(directory: str, ranks: int, coordinator: BackgroundServer) -> Iterator[Served]:
    from weightsync.engines.vllm import attach_server

    alone = "WEIGHTSYNC_COORDINATOR" in os.environ
    with serving(directory, ranks, {}) as found:
        if not alone:
            attach_server(str(found.http.base_url), "vllm-0", coordinator.url, token=coordinator.token, bucket_bytes=200_000)
        yield found


def joined(coordinator: BackgroundServer, ranks: int) -> None:
    """Wait until every rank of the replica has come, which nobody tells the one who started it."""
    settings = ClientSettings.load({}, coordinator=coordinator.url, token=Secret(coordinator.token))
    tick = threading.Event()
    with Client(settings) as client:
        for _ in range(300):
            if any(replica.world_size == ranks and not replica.missing for replica in client.status().replicas):
                return
            tick.wait(0.2)
    raise TimeoutError("the replica never joined")


def build(ranks: int, directory: str) -> PreTrainedModel:
    """A small model, saved as the checkpoint that vLLM starts with: for one rank tied, and with biases; for two untied, without."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    model: PreTrainedModel
    if ranks == 1:
        model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **shape))
    torch.nn.Module.to(model, dtype=torch.bfloat16)  # in place
    change(model, 100)
    model.save_pretrained(directory)
    return model


def play(kind: str, ranks: int, directory: str) -> dict[str, Any]:
    model = build(ranks, directory)
    seen: dict[str, Any] = {"versions": [], "engine_start": time.time()}
    coordinator = BackgroundServer(ServerSettings.load({}, port=0))
    with coordinator, (KINDS | {"server": server})[kind](directory, ranks, coordinator) as vllm:
        seen["engine_start"] = time.time() - seen["engine_start"]
        with weightsync.Trainer(model, coordinator.url, token=coordinator.token) as trainer:
            joined(coordinator, ranks)
            seen["before"] = vllm.generate()[0] == expected(model)
            for number in (1, 2, 3, 40):
                warm = vllm.generate()[1]  # the prompts are now cached, under the version before
                change(model, number)
                entry: dict[str, Any] = {"number": number, "cached_before": warm}
                if number == 3:
                    vllm.fail_next_load()
                    try:
                        trainer.publish(number, timeout=60)
                    except RoundFailed as error:
                        entry["failed"] = str(error)
                        entry["label"] = None if kind == "offline" else vllm.label()
                        if isinstance(vllm, Server):
                            entry["ready"] = vllm.http.get("/health/weights").status_code
                    number = 33
                    change(model, number)
                result = trainer.publish(number, timeout=60)
                (replica,) = result.replicas
                answers, cached = vllm.generate()
                entry |= {
                    "state": replica.state, "delivery": replica.delivery, "digest": replica.digest == result.version.digest,
                    "verified": replica.verified, "label_after": vllm.label(), "version": str(result.version), "answers": answers,
                    "equal": answers == expected(model), "cached_after": cached, "phases": replica.phases, "parts": replica.parts,
                    "nbytes": replica.nbytes, "why": replica.delivery_reason, "model": trainer._role.manifest.nbytes,
                }  # fmt: skip
                if isinstance(vllm, Server):
                    entry["named"] = vllm.named(str(result.version))
                seen["versions"].append(entry)
    return seen


def main() -> int:
    kind, ranks, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    print("RESULT " + json.dumps(play(kind, ranks, directory)), flush=True)
    return 0


if __name__ == "__main__":
    before = os.environ.get("PYTHONPATH", "")  # a clone's own code, if it is not what is installed
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before]).rstrip(os.pathsep)  # for what vLLM starts
    sys.exit(main())
