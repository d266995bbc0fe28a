# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
"""Updates inside verl, beside verl's own backend: ``python -m benchmarks.gpu_verl colocated|separated MODEL [DTYPE [ROUNDS]]``.

``colocated``: actor and rollout share one GPU (``naive``). ``separated``: the actor has the first GPU, the rollout the second.
``MODEL``: ``tiny``, ``dense`` (shapes of Qwen3-8B, 16.4 GB) or ``moe`` (of Qwen3-30B-A3B, 61 GB). ``DTYPE``: of the actor's
parameters, ``fp32`` (verl's default) or ``bf16``. Each backend runs in its own process, and prints one line of JSON: seconds of
verl's whole call and, for weightsync, of the round and of its pause, and how it was verified. The parent prints a table.

verl, Ray, vLLM and weightsync's entry points are on the path. ``measure`` is also what the tests run on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "tiny": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=512),
    "dense": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936),
    "moe": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32, vocab_size=151936,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip
LINE = "actor_rollout_ref.rollout.checkpoint_engine"
OWN = {"colocated": "naive", "separated": "nccl"}
LONGEST = 1500


def measure(update, change, rounds, last_round):
    """Change the weights and update, ``rounds`` times; return the figures of each. The first includes what is done once."""
    found = []
    for step in range(1, rounds + 1):
        change(step)
        began = time.perf_counter()
        update(step)
        row = {"call": time.perf_counter() - began}
        result = last_round()
        if result is not None:
            assert result.ok and result.step == step, result.error
            row |= {
                "round": result.seconds, "pause": result.longest_pause, "bytes": result.nbytes,
                "verified": sorted({replica.verified for replica in result.replicas}),
            }  # fmt: skip
        found.append(row)
    return found


def table(rows):
    """Rows of text, from the figures of each backend: medians of all rounds but the first."""
    lines = ["backend      first call  call      round     pause     GB      verified"]
    for backend, found in rows.items():
        later = found[1:] or found
        cells = [f"{backend:12} {found[0]['call']:8.3f} s"]
        cells += [
            f"{statistics.median(row[name] for row in later):6.3f} s" for name in ("call", "round", "pause") if name in later[0]
        ]
        if "bytes" in later[0]:
            cells += [f"{later[0]['bytes'] / 1e9:6.2f}", ", ".join(later[0]["verified"])]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def write_checkpoint(folder, kind):
    """A checkpoint of zeros, sparse on the disk, with a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from weightsync.tensors.shards import manifest_of

    family = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if kind == "moe" else (Qwen3Config, Qwen3ForCausalLM)
    heads = dict(num_key_value_heads=2, head_dim=64) if kind == "tiny" else dict(num_key_value_heads=8, head_dim=128)
    if kind == "moe":
        heads["num_key_value_heads"] = 4
    config = family[0](
        **SIZES[kind], **heads, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, architectures=[family[1].__name__], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = family[1](config)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for spec in manifest_of(model, dtype=torch.bfloat16):
        begin, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 512)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, chat_template="{{ messages }}").save_pretrained(folder)


def configured(place, backend, folder, dtype):
    """Verl's configuration."""
    from hydra import compose, initialize_config_module

    bf16 = ["+actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"] if dtype == "bf16" else []
    overrides = [
        f"actor_rollout_ref.model.path={folder}", f"{LINE}.backend={backend}", f"+{LINE}.engine_kwargs.weightsync.timeout=120",
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.max_model_len=512", "actor_rollout_ref.rollout.max_num_seqs=8",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={0.45 if place == 'colocated' else 0.8}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.enforce_eager=False",
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.model.use_remove_padding=False", "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        *bf16,
    ]  # fmt: skip
    if backend != "weightsync":
        overrides = [one for one in overrides if "engine_kwargs" not in one]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides).actor_rollout_ref


def play(place, backend, folder, dtype, rounds):
    """Start verl's actor and rollout, and measure one backend."""
    import ray
    import torch
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    class Actor(ActorRolloutRefWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def change(self, seed):
            with torch.no_grad():
                for parameter in self.actor.engine.module.parameters():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.fill_(seed / 64)
            torch.cuda.synchronize()

    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(num_gpus=torch.cuda.device_count(), include_dashboard=False, logging_level="error")
    config = configured(place, backend, folder, dtype)
    rollout, model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
    actors = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[1], max_colocate_count=2),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(Actor), config=config, role="actor_rollout" if place == "colocated" else "actor"
        ),
        device_name="cuda",
    )
    actors.init_model()
    replica = vLLMReplica(replica_rank=0, config=rollout, model_config=model, gpus_per_node=1)
    asyncio.run(replica.init_hybrid(actors) if place == "colocated" else replica.init_standalone())
    manager = CheckpointEngineManager(config=rollout.checkpoint_engine, actor_wg=actors, replicas=[replica])
    if place == "colocated":
        manager.backend = "naive"  # as verl's trainers set it

    def change(step):
        if place == "colocated":
            manager.sleep_replicas()
        actors.change(step)

    def last_round():
        return ray.get(actors.workers[0].__ray_call__.remote(_last_round, place)) if backend == "weightsync" else None

    found = measure(lambda step: manager.update_weights(global_steps=step), change, rounds, last_round)
    print("RESULT " + json.dumps(found), flush=True)
    ray.shutdown()


def _last_round(worker, place):
    """Runs in actor rank 0, which has the coordinator."""
    from weightsync.config import ClientSettings
    from weightsync.server.client import Client

    engine = worker.rollout._colocated._actor if place == "colocated" else worker.checkpoint_engine
    with Client(ClientSettings.load(coordinator=engine.meeting.coordinator)) as client:
        return client.status().rounds[-1]


def main():
    place, kind, *rest = sys.argv[1:]
    if kind == "--play":
        play(place, *rest[:3], int(rest[3]))
        return 0
    dtype, rounds = (rest + ["fp32", "6"][len(rest) :])[:2]
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), kind)
        for backend in ("weightsync", OWN[place]):
            command = [sys.executable, "-m", "benchmarks.gpu_verl", place, "--play", backend, name, dtype, rounds]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LONGEST, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if lines:
                rows[backend] = json.loads(lines[-1].removeprefix("RESULT "))
                print(json.dumps({"backend": backend, "place": place, "model": kind, "dtype": dtype, "rounds": rows[backend]}))
            else:
                print(f"{backend} did not run: exit status {done.returncode}", flush=True)
    print(table(rows), flush=True)
    return 0 if len(rows) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
