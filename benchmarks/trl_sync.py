# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
"""TRL's ``GRPOTrainer`` in server mode: how long ``sync_weights()`` takes, through weightsync and TRL's own way.

``python -m benchmarks.trl_sync [--model tiny|8b] [--dtype bfloat16|float32] [--updates N] [--own]``

vLLM's server has the first GPU, the trainer the last one (which may be the same; TRL's own way then cannot run). The trainer
takes no step: its weights are changed, and ``trainer.vllm_generation.sync_weights()`` is timed. In the same run, plain
``weightsync.Trainer`` publishes the same model to the same server. Prints one line of JSON per way; times are milliseconds, of
all updates but the first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

import httpx
import torch

__all__ = ["free_port", "main", "row_of", "save_tokenizer", "serving", "start_server", "timed", "until_healthy"]

_SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
_START_SECONDS = 480


def save_tokenizer(directory) -> None:
    """Save a tokenizer with a token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special)
    plain.train_from_iterator([], trainer)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    tokenizer.save_pretrained(directory)


def _config(model: str):
    from transformers import Qwen3Config

    return Qwen3Config(
        **_SHAPES[model], max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def _model(directory, dtype: torch.dtype, device):
    """The model of the configuration in ``directory``, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)


def free_port() -> int:
    """A port of this host that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def start_server(directory, backend, port, environment, more=(), module=("vllm.entrypoints.openai.api_server",)):
    """Start ``module``, vLLM's server by default, on the first GPU, with ``more`` flags. Its process leads a group."""
    gpu = torch.cuda.is_available()
    command = [
        sys.executable, "-m", *module, "--model", str(directory), "--host", "127.0.0.1", "--port",
        str(port), "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
        "--max-logprobs", "-1", "--weight-transfer-config", json.dumps({"backend": backend}),
        *([] if gpu else ["--block-size", "32"]),
        *more,
    ]  # fmt: skip
    defaults = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        **({"CUDA_VISIBLE_DEVICES": "0"} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}),
    }  # fmt: skip
    return subprocess.Popen(command, env={**os.environ, **defaults, **environment}, stdout=sys.stderr, start_new_session=True)


def until_healthy(url, process=None, seconds=_START_SECONDS):
    """Wait until a server answers. Ends this process if ``process`` ends before, or after ``seconds``."""
    until, tick = time.monotonic() + seconds, threading.Event()
    while True:
        status = None if process is None else process.poll()
        if status is not None or time.monotonic() > until:
            raise SystemExit(f"vLLM's server did not start (exit status {status})")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            tick.wait(0.5)


@contextmanager
def serving(directory: str, backend: str, environment: dict[str, str], more=()):
    """Start vLLM's server on the first GPU, with ``more`` flags; yields its URL when it answers."""
    port = free_port()
    process, url = start_server(directory, backend, port, environment, more), f"http://127.0.0.1:{port}"
    try:
        until_healthy(url, process)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call, model, updates: int):
    """Milliseconds of each call, after another change of all weights, and what each returned."""
    times, results = [], []
    for number in range(updates + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 2.0**-6 * (1 if number % 2 else -1))
        _synchronize()
        began = time.perf_counter()
        results.append(call())
        _synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return times, results


def row_of(way: str, times, results) -> dict[str, object]:
    """A row of figures, of all updates but the first, and what the first took."""
    row = {
        "way": way, "first_ms": round(times[0], 1), "median_ms": round(statistics.median(times[1:]), 1),
        "lowest_ms": round(min(times[1:]), 1), "highest_ms": round(max(times[1:]), 1), "updates": len(times) - 1,
    }  # fmt: skip
    if results[0] is None:
        return row
    replicas = [result.replicas[0] for result in results[1:]]
    paused = [1000 * replica.paused_seconds for replica in replicas]
    return row | {
        "paused_ms": round(statistics.median(paused), 1), "delivery": replicas[-1].delivery, "verified": replicas[-1].verified,
        "transports": list(replicas[-1].transports), "bytes": replicas[-1].nbytes,
        "phases_ms": {name: round(1000 * seconds, 1) for name, seconds in replicas[-1].phases.items()},
    }  # fmt: skip


def _train(options) -> None:
    """The trainer's process."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    dtype = getattr(torch, options.dtype)
    if not options.own:
        from weightsync.integrations.trl import enable

        enable(timeout=300)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    gpu = torch.cuda.is_available()
    model = _model(options.directory, dtype, "cuda" if gpu else "cpu")
    args = GRPOConfig(
        output_dir=options.directory, use_vllm=True, vllm_mode="server", vllm_server_base_url=options.url, num_generations=2,
        per_device_train_batch_size=2, beta=0.0, report_to="none", bf16=False, use_cpu=not gpu, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["1 2 3", "4 5 6"]}),
        processing_class=AutoTokenizer.from_pretrained(options.directory, padding_side="left"),
    )  # fmt: skip
    generation = trainer.vllm_generation

    def sync():
        generation.sync_weights()
        return None if options.own else generation._weightsync.result

    way = "TRL's own" if options.own else "TRL through weightsync"
    print("ROW " + json.dumps(row_of(way, *timed(sync, generation.model, options.updates))), flush=True)
    if options.own:
        return
    generation._weightsync.close()
    import weightsync

    with weightsync.Trainer(model, dtype=torch.bfloat16, pause_mode="keep", start_coordinator=False) as plain:
        plain.wait_for_replicas(timeout=60)
        print("ROW " + json.dumps(row_of("weightsync.Trainer", *timed(plain.publish, model, options.updates))), flush=True)


def main(arguments=None) -> int:
    """Run it; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(_SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--own", action="store_true", help="measure TRL's own way too (needs two GPUs)")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        _train(options)
        sys.stdout.flush()
        os._exit(0)  # vLLM's and NCCL's threads may not end

    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    dummy = ["--load-format", "dummy", "--gpu-memory-utilization", "0.35"] if torch.cuda.is_available() else []
    failed = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)) as coordinator,
    ):
        save_tokenizer(directory)
        _config(options.model).save_pretrained(directory)
        if torch.cuda.is_available():
            _shapes_only(directory)
        else:  # vLLM's CPU build has no weights of its own
            _model(directory, torch.bfloat16, "cpu").save_pretrained(directory)
        joining = {"WEIGHTSYNC_COORDINATOR": coordinator.url, "WEIGHTSYNC_TOKEN": coordinator.token, "WEIGHTSYNC_REPLICA": "vllm-0"}
        for own in (False, True) if options.own else (False,):
            with serving(directory, "nccl" if own else "weightsync", {} if own else joining, dummy) as url:
                child = [
                    sys.executable, "-m", "benchmarks.trl_sync", "--train", "--model", options.model, "--dtype", options.dtype,
                    "--updates", str(options.updates), "--directory", directory, "--url", url, *(["--own"] if own else []),
                ]  # fmt: skip
                gpus = torch.cuda.device_count()
                devices = {"CUDA_VISIBLE_DEVICES": str(gpus - 1)} if gpus else {}
                done = subprocess.run(
                    child, check=False, env={**os.environ, **joining, **devices}, stdout=subprocess.PIPE, text=True, timeout=600
                )
                for line in done.stdout.splitlines():
                    if line.startswith("ROW "):
                        print(json.dumps({"model": options.model, "dtype": options.dtype, **json.loads(line[4:])}), flush=True)
                failed = failed or done.returncode
    return failed


def _shapes_only(directory) -> None:
    """A checkpoint with headers and holes: vLLM makes its own weights, and weightsync reads names and shapes."""
    from benchmarks.gpu_vllm import write_shapes

    shapes = {name: list(tensor.shape) for name, tensor in _model(directory, torch.bfloat16, "meta").state_dict().items()}
    write_shapes(directory, {name: ("BF16", shape, 2) for name, shape in shapes.items()})


if __name__ == "__main__":
    sys.exit(main())
