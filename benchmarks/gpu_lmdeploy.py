# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
"""Updates of a real LMDeploy over its own routes: ``python -m benchmarks.gpu_lmdeploy tiny|MODEL [--rounds N] [--log FILE]``.

``tiny``: a small random Qwen3 checkpoint, CUDA graphs on, a refused bucket and two updates by ``LMDeployClient``. Prints one line
of JSON that ``test_lmdeploy.py`` looks at: greedy tokens before and after, beside those of Transformers with the same weights.
``MODEL``: a model of the GPU suite, shapes only; the seconds of each update.

LMDeploy's server gets the first GPU, PyTorch backend, Ray executor (its default executor on a single GPU takes no updates). The
group is NCCL with two or more GPUs. NCCL takes no two ranks on a single GPU, so it is Gloo there. LMDeploy and Ray are on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from benchmarks.gpu_vllm import COUNT, PROMPTS, change, decided, shapes_only, tiny

START_SECONDS = 150
STEP_SECONDS = 60
READY = "Uvicorn running on "
MARK = "WEIGHTSYNC_BENCHMARK"


def make_tokenizer(folder, words):
    """A tokenizer of ``words`` words, without which LMDeploy does not start; requests and answers are token IDs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = [*special.values(), *(f"w{number}" for number in range(3, words))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def command(folder, port):
    """The command that serves ``folder``, with a twentieth of the free memory for keys and values."""
    return [
        sys.executable, "-m", "lmdeploy", "serve", "api_server", str(folder), "--backend", "pytorch",
        "--distributed-executor-backend", "ray", "--enable-abort-handling", "--log-level", "INFO",
        "--session-len", "256", "--max-batch-size", "4", "--cache-max-entry-count", "0.05", "--dtype", "bfloat16",
        "--server-name", "127.0.0.1", "--server-port", str(port),
    ]  # fmt: skip


def environment(mark):
    """The server's environment. ``mark`` is in that of all its processes, Ray's included, so that they can be found."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    made = {**os.environ, MARK: mark, "CUDA_VISIBLE_DEVICES": first, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    made |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "1000000000"}
    made |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled", "UVICORN_LOG_LEVEL": "info"}
    made.pop("RAY_ADDRESS", None)  # a Ray cluster that is not the server's
    return made


def marked(mark):
    """The processes with ``mark`` in their environment."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    yield int(process.name)


def end(server, mark):
    """End the server's group, and then what is left of its processes: Ray's are in other groups."""
    with suppress(OSError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(10)
    for left in marked(mark):
        with suppress(OSError):
            os.kill(left, signal.SIGKILL)
    server.wait(10)


@contextmanager
def serving(arguments, log, seconds=START_SECONDS):
    """Run a server until the block ends; entered when it answers. Its output goes to the file ``log``."""
    mark = uuid.uuid4().hex
    server = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env=environment(mark),
    )  # fmt: skip
    ready, began = Future(), time.perf_counter()

    def read():
        with server.stdout, Path(log).open("a") as into:
            for line in server.stdout:
                into.write(line)
                into.flush()
                if READY in line and not ready.done():
                    ready.set_result(True)
        if not ready.done():
            ready.set_result(False)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with suppress(TimeoutError):
            ready.result(seconds)
        if not ready.done() or not ready.result():
            raise RuntimeError(f"the server did not start within {seconds} s, or ended:\n{Path(log).read_text()[-6000:]}")
        yield round(time.perf_counter() - began, 1)
    finally:
        end(server, mark)
        reader.join(10)


def decided_without_end(model):
    """The prompts, greedy answers and gap of ``decided``, without answers that end: LMDeploy never generates a token to ignore."""
    prompts, wanted, gap = decided(model)
    kept = [number for number, answer in enumerate(wanted) if model.config.eos_token_id not in answer]
    return [prompts[number] for number in kept], [wanted[number] for number in kept], gap


def answers(client, prompts):
    """Greedy tokens of each prompt."""
    from weightsync.deadline import Deadline
    from weightsync.external.clients.http import HttpCall

    asked = {"max_tokens": COUNT, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
    calls = [HttpCall("POST", "/generate", {"input_ids": prompt, **asked}) for prompt in prompts]
    return [list(client.call(call, Deadline(STEP_SECONDS))["output_ids"]) for call in calls]


def client_of(port):
    """A client of the server, with a group for the GPUs that are here."""
    from weightsync_disaggregated.clients.lmdeploy import LMDeployClient

    count = torch.cuda.device_count()
    device = torch.device("cuda", count - 1) if count > 1 else None
    return LMDeployClient(f"http://127.0.0.1:{port}", backend="nccl" if device else "gloo", device=device)


def update(client, buckets):
    """One update of everything. Returns its seconds, from the pause to the resumption."""
    from weightsync.deadline import Deadline

    began, limit = time.perf_counter(), Deadline(STEP_SECONDS)
    client.pause("abort", limit)
    client.begin(None, None, limit)
    for number, bucket in enumerate(buckets):
        client.update(bucket, number == len(buckets) - 1, limit)
    client.commit({}, limit)
    client.flush(limit)
    client.resume(limit)
    return round(time.perf_counter() - began, 3)


def buckets_of_model(model, nbytes):
    """The parameters, in buckets in host memory."""
    from weightsync.tensors.shards import manifest_of
    from weightsync_disaggregated.buckets import buckets_of
    from weightsync_disaggregated.clients.base import Bucket

    weights = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
    return [
        Bucket(specs, torch.cat([weights[spec.name].reshape(-1).view(torch.uint8) for spec in specs]))
        for specs in buckets_of(manifest_of(weights), nbytes)
    ]


def refused(client, bucket):
    """What LMDeploy says to a tensor that it does not have. The group can be used afterwards."""
    from weightsync.deadline import Deadline
    from weightsync.errors import LoadError
    from weightsync_disaggregated.clients.base import Bucket

    wrong = [msgspec.structs.replace(bucket.specs[0], name="model.elsewhere.weight"), *bucket.specs[1:]]
    try:
        client.update(Bucket(wrong, bucket.memory), False, Deadline(STEP_SECONDS))
    except LoadError as error:
        return str(error)[:500]
    return ""


def check_tiny(log, port):
    from weightsync.deadline import Deadline

    with tempfile.TemporaryDirectory() as folder:
        model = tiny(folder)
        make_tokenizer(folder, model.config.vocab_size)
        with serving(command(folder, port), log) as started, client_of(port) as client:
            client.join(Deadline(STEP_SECONDS))
            prompts, wanted, gap = decided_without_end(model)
            seen = {
                "lmdeploy": version("lmdeploy"), "backend": client.backend, "start_s": started, "gap": gap, "wanted": wanted,
                "before": answers(client, prompts), "refused": refused(client, buckets_of_model(model, 1 << 20)[0]), "updates": [],
            }  # fmt: skip
            for number in (1, 2):
                change(model, number)
                prompts, wanted, gap = decided_without_end(model)
                buckets = buckets_of_model(model, 1 << 20)
                seconds, generated = update(client, buckets), answers(client, prompts)
                seen["updates"].append({
                    "answers": generated, "wanted": wanted, "gap": gap, "equal": generated == wanted, "seconds": seconds,
                    "buckets": len(buckets), "bytes": sum(len(bucket.memory) for bucket in buckets),
                })  # fmt: skip
            print("RESULT " + json.dumps(seen), flush=True)


def measure(name, rounds, log, port, bucket_bytes):
    from weightsync.deadline import Deadline
    from weightsync_bench.gpu_job import manifest_for
    from weightsync_disaggregated.buckets import buckets_of
    from weightsync_disaggregated.clients.base import Bucket

    manifest = manifest_for(name)
    parts = buckets_of(manifest, bucket_bytes)
    largest = max(sum(spec.nbytes for spec in specs) for specs in parts)
    memory = (torch.randn(largest // 2, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16).view(torch.uint8)
    buckets = [Bucket(specs, memory) for specs in parts]
    with tempfile.TemporaryDirectory() as folder:
        shapes_only(folder, manifest)
        make_tokenizer(folder, json.loads((Path(folder) / "config.json").read_text())["vocab_size"])
        with serving(command(folder, port), log) as started, client_of(port) as client:
            client.join(Deadline(STEP_SECONDS))
            before = answers(client, PROMPTS[:2])
            print("RESULT " + json.dumps({
                "lmdeploy": version("lmdeploy"), "model": name, "backend": client.backend, "start_s": started,
                "bytes": manifest.nbytes, "buckets": len(buckets), "seconds": [update(client, buckets) for _ in range(rounds)],
                "generates": answers(client, PROMPTS[:2]) != before,
            }), flush=True)  # fmt: skip


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=23333)
    parser.add_argument("--bucket", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--log", default=os.path.join(tempfile.gettempdir(), "lmdeploy-server.log"))
    return parser.parse_args(argv)


def main():
    options = arguments()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.model == "tiny":
        check_tiny(options.log, options.port)
    else:
        measure(options.model, options.rounds, options.log, options.port, options.bucket)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
