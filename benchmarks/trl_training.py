# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN202
"""Whole runs of TRL's trainers with a vLLM server, through weightsync and TRL's own way: rewards, time per step, cut answers.

``python -m benchmarks.trl_training [--trainer grpo|async] [--steps N] [--seeds N] [--ways weightsync own] [--out FILE]``

``grpo``: ``GRPOTrainer`` in server mode. ``async``: ``AsyncGRPOTrainer``, whose attention kernel, from a model hub, is replaced
by PyTorch's.

A small Qwen3 with random weights learns to answer with letters of the first half of its alphabet. All runs go at the same
time, each with a separate vLLM server on the first GPU and a separate trainer on the last one, so that the ways share the
machine's noise. TRL's own way needs two GPUs. On a CPU the runs go one after the other. Prints one line of JSON per run, and to
standard error how far each is.
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
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import torch

from benchmarks.trl_sync import free_port, save_tokenizer, serving

__all__ = ["main"]

_LENGTH = 16
_PROMPTS = [f"{number} {number + 1} {number + 2}" for number in range(10, 74)]


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


def without_flash_attention() -> None:
    """Replace what ``AsyncGRPOTrainer`` needs of a model hub: the kernel of its attention, and the template that parses answers.

    The kernel's floating-point operations are not counted either.
    """
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    def attention(q, k, v, q_ends, k_ends, *_, softmax_scale=None, **__):
        out, groups = torch.empty_like(q), q.shape[1] // k.shape[1]
        q_ends, k_ends = q_ends.tolist(), k_ends.tolist()
        for number in range(len(q_ends) - 1):
            rows, columns = slice(*q_ends[number : number + 2]), slice(*k_ends[number : number + 2])
            parts = q[rows], k[columns].repeat_interleave(groups, 1), v[columns].repeat_interleave(groups, 1)
            query, key, value = (part.transpose(0, 1) for part in parts)
            mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=q.device)
            out[rows] = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask.tril(key.shape[1] - query.shape[1]), scale=softmax_scale
            ).transpose(0, 1)
        return out

    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_rollout_worker.parse_response = lambda tokens, ids, **_: {"role": "assistant", "content": tokens.decode(ids)}


def _options_of_both(options) -> dict[str, object]:
    """What ``GRPOConfig`` and ``AsyncGRPOConfig`` are given alike."""
    return dict(
        output_dir=f"{options.directory}/{options.way}-{options.seed}", vllm_server_base_url=options.url, num_generations=8,
        max_completion_length=_LENGTH, max_steps=options.steps, learning_rate=5e-4, lr_scheduler_type="constant", temperature=1.0,
        seed=options.seed, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=False,
        use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False,
    )  # fmt: skip


def _train_async(options) -> None:
    """The process of an asynchronous trainer, whose samples come from a third process while it trains."""
    without_flash_attention()
    import trl.chat_template_utils as templates
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    words = AutoTokenizer.from_pretrained(options.directory, padding_side="left")
    words.response_template, words.response_schema = templates.qwen3_template, templates.qwen3_schema
    args = AsyncGRPOConfig(
        **_options_of_both(options), token_budget=1024, max_staleness=4, max_inflight_tasks=8, gradient_accumulation_steps=1
    )
    transfer = None
    if options.way == "weightsync":
        from weightsync.integrations.trl import WeightTransfer

        transfer = WeightTransfer(timeout=300)
    questions = [[{"role": "user", "content": prompt}] for prompt in _PROMPTS]
    trainer = AsyncGRPOTrainer(
        model=options.directory, args=args, reward_funcs=reward, train_dataset=Dataset.from_dict({"prompt": questions}),
        processing_class=words, weight_transfer=transfer, callbacks=[_telling(options)],
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history

    def times(name):
        return [1000 * row[name] for row in logged if row.get(name)]

    _show(options, logged, times("perf/step_s"), times("perf/weight_sync_s"), transfer and transfer.result)


def _train(options) -> None:
    """The trainer's process."""
    if options.way == "weightsync":
        from weightsync.integrations.trl import enable

        enable(timeout=300)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **_options_of_both(options), use_vllm=True, vllm_mode="server", vllm_group_port=options.group_port,
        per_device_train_batch_size=32, beta=0.0, generation_kwargs={"ignore_eos": True, "min_tokens": _LENGTH},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=options.directory, args=args, reward_funcs=reward, train_dataset=Dataset.from_dict({"prompt": _PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(options.directory, padding_side="left"), callbacks=[_telling(options)],
    )  # fmt: skip
    own, syncs = trainer.vllm_generation.sync_weights, []

    def timed() -> None:
        began = time.perf_counter()
        own()
        syncs.append(1000 * (time.perf_counter() - began))

    trainer.vllm_generation.sync_weights = timed
    times = []
    step = trainer.training_step

    def stepped(*args, **kwargs):
        began = time.perf_counter()
        result = step(*args, **kwargs)
        times.append(1000 * (time.perf_counter() - began))
        return result

    trainer.training_step = stepped
    trainer.train()
    ours = trainer.vllm_generation._weightsync.result if options.way == "weightsync" else None
    _show(options, trainer.state.log_history, times, syncs, ours)


def _telling(options):
    """A callback that says how far a run is, ten times."""
    from transformers import TrainerCallback

    class Telling(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "reward" in logs and state.global_step % max(1, options.steps // 10) == 0:
                at = f"step {state.global_step} of {options.steps}, reward {logs['reward']:.3f}"
                apart = f", policies {logs['kl']:.4f} apart" if "kl" in logs else ""
                print(f"{options.way}, seed {options.seed}: {at}{apart}", file=sys.stderr, flush=True)

    return Telling()


def _show(options, logged, steps, syncs, result) -> None:
    """Print a run's row: ``steps`` and ``syncs`` in milliseconds."""
    rewards = [round(row["reward"], 4) for row in logged if "reward" in row]
    metrics = httpx.get(f"{options.url}/metrics", trust_env=False).text
    reasons = {}
    for reason, count in re.findall(r'vllm:request_success_total\{[^}]*finished_reason="(\w+)"[^}]*\} ([0-9.e+]+)', metrics):
        reasons[reason] = reasons.get(reason, 0) + int(float(count))
    row = {
        "way": options.way, "seed": options.seed, "steps": len(rewards), "rewards": rewards,
        "step_ms": round(statistics.median(steps[2:] or steps), 1), "updates": len(syncs),
        "sync_ms": round(statistics.median(syncs[2:] or syncs), 1),
        "finished": {name: count for name, count in reasons.items() if count},
    }  # fmt: skip
    if apart := [logs["kl"] for logs in logged if "kl" in logs]:  # of the trainer's policy and the one that was sampled from
        row["kl"] = round(statistics.median(apart), 5)
    if result is not None:
        (replica,) = result.replicas
        row |= {"delivery": replica.delivery, "verified": replica.verified, "transports": list(replica.transports)}
    print("ROW " + json.dumps(row), flush=True)


def main(arguments=None) -> int:
    """Run it; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=["grpo", "async"], default="grpo")
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
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        (_train_async if options.trainer == "async" else _train)(options)
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
                backend = "nccl" if way == "own" else "weightsync"
                memory = ["--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.1"] if gpus else []
                url = stack.enter_context(serving(directory, backend, joining, memory))
                command = [
                    sys.executable, "-m", "benchmarks.trl_training", "--way", way, "--seed", str(seed), "--directory", directory,
                    "--url", url, "--steps", str(options.steps), "--group-port", str(free_port()),
                    "--trainer", options.trainer,
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


if __name__ == "__mp_main__":  # TRL's process for samples, which imports this file again
    without_flash_attention()

if __name__ == "__main__":
    sys.exit(main())
