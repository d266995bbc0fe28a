# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN202
"""Whole runs of TRL's ``GRPOTrainer`` in server mode, through weightsync and TRL's own way: rewards, time per step, cut answers.

``python -m benchmarks.trl_training [--steps N] [--seeds N] [--ways weightsync own] [--out FILE]``

A small Qwen3 with random weights learns to answer with letters of the first half of its alphabet. All runs go at the same
time, each with a separate vLLM server on the first GPU and a separate trainer on the last one, so that the ways share the
machine's noise. TRL's own way needs two GPUs. On a CPU the runs go one after the other. Prints one line of JSON per run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import torch

from benchmarks.trl_sync import save_tokenizer, serving

__all__ = ["main"]

_LENGTH = 16


def _save_model(directory) -> None:
    """Save the checkpoint from which both sides start, in bfloat16, as models are distributed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        vocab_size=320, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    ))  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)


def reward(completion_ids, **_):
    """The share of tokens whose number is even."""
    return [sum(token % 2 == 0 for token in ids) / _LENGTH for ids in completion_ids]


def _train(options) -> None:
    """The trainer's process."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    if options.way == "weightsync":
        from weightsync.integrations.trl import enable

        enable(timeout=300)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    gpu = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=f"{options.directory}/{options.way}-{options.seed}", use_vllm=True, vllm_mode="server",
        vllm_server_base_url=options.url, vllm_group_port=options.group_port, num_generations=8, per_device_train_batch_size=32,
        max_completion_length=_LENGTH, max_steps=options.steps, learning_rate=5e-4, lr_scheduler_type="constant", beta=0.0,
        temperature=1.0, seed=options.seed, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=False,
        use_cpu=not gpu, gradient_checkpointing=False, generation_kwargs={"ignore_eos": True, "min_tokens": _LENGTH},
    )  # fmt: skip
    prompts = [f"{number} {number + 1} {number + 2}" for number in range(10, 74)]
    trainer = GRPOTrainer(
        model=options.directory, args=args, reward_funcs=reward, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(options.directory, padding_side="left"),
    )  # fmt: skip
    own, syncs = trainer.vllm_generation.sync_weights, []

    def timed() -> None:
        began = time.perf_counter()
        own()
        syncs.append(time.perf_counter() - began)

    trainer.vllm_generation.sync_weights = timed
    times = []
    step = trainer.training_step

    def stepped(*args, **kwargs):
        began = time.perf_counter()
        result = step(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return result

    trainer.training_step = stepped
    trainer.train()
    rewards = [round(row["reward"], 4) for row in trainer.state.log_history if "reward" in row]
    metrics = httpx.get(f"{options.url}/metrics", trust_env=False).text
    reasons = {}
    for reason, count in re.findall(r'vllm:request_success_total\{[^}]*finished_reason="(\w+)"[^}]*\} ([0-9.e+]+)', metrics):
        reasons[reason] = reasons.get(reason, 0) + int(float(count))
    row = {
        "way": options.way, "seed": options.seed, "steps": len(rewards), "rewards": rewards,
        "step_ms": round(1000 * statistics.median(times[2:] or times), 1), "updates": len(syncs),
        "sync_ms": round(1000 * statistics.median(syncs[2:] or syncs), 1),
        "finished": {name: count for name, count in reasons.items() if count},
    }  # fmt: skip
    if options.way == "weightsync":
        (replica,) = trainer.vllm_generation._weightsync.result.replicas
        row |= {"delivery": replica.delivery, "verified": replica.verified, "transports": list(replica.transports)}
    print("ROW " + json.dumps(row), flush=True)


def main(arguments=None) -> int:
    """Run it; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=["weightsync", "own"], default=["weightsync"])
    parser.add_argument("--out", help="file for all rows, as JSON")
    for hidden in ("way", "directory", "url"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--group-port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way:
        _train(options)
        sys.stdout.flush()
        os._exit(0)  # vLLM's and NCCL's threads may not end

    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    gpus = torch.cuda.device_count()
    runs = [(way, seed) for seed in range(options.seeds) for way in options.ways]
    rows = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as owned:
        _save_model(directory)

        def one(number: int):
            way, seed = runs[number]
            with ExitStack() as stack:
                joining = {}
                if way == "weightsync":
                    coordinator = stack.enter_context(BackgroundServer(ServerSettings.load({}, port=0, heartbeat=60.0)))
                    joining = {
                        "WEIGHTSYNC_COORDINATOR": coordinator.url,
                        "WEIGHTSYNC_TOKEN": coordinator.token,
                        "WEIGHTSYNC_REPLICA": "vllm-0",
                    }
                port = 20_000 + 16 * (os.getpid() % 2_000) + number
                backend = "nccl" if way == "own" else "weightsync"
                memory = ["--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.1"] if gpus else []
                url = stack.enter_context(serving(directory, backend, port, joining, memory))
                command = [
                    sys.executable, "-m", "benchmarks.trl_training", "--way", way, "--seed", str(seed), "--directory", directory,
                    "--url", url, "--steps", str(options.steps), "--group-port", str(port + 10_000),
                ]  # fmt: skip
                devices = {"CUDA_VISIBLE_DEVICES": str(gpus - 1)} if gpus else {}
                done = subprocess.run(
                    command, check=False, env={**os.environ, **joining, **devices}, stdout=subprocess.PIPE, text=True, timeout=900
                )
                found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
                for row in found:
                    rows.append(row)
                    print(json.dumps(row | {"rewards": row["rewards"][:: max(1, options.steps // 10)]}), flush=True)
                return done.returncode or (not found)

        pool = owned.enter_context(ThreadPoolExecutor(len(runs) if gpus else 1))
        failed = sum(map(bool, pool.map(one, range(len(runs)))))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
