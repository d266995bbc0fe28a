# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202
"""Updates inside verl, beside the library alone and verl's own backend: ``python -m benchmarks.gpu_verl PLACE MODEL [DTYPE] ...``.

``colocated``: actor and rollout share the GPUs (``naive``). ``separated``: the actor has the first ones, the rollout the others.
``MODEL``: ``tiny``, ``dense`` (shapes of Qwen3-8B, 16.4 GB) or ``moe`` (of Qwen3-30B-A3B, 61 GB). ``DTYPE``: of the actor's
parameters, ``fp32`` (verl's default) or ``bf16``. ``--gpus``: ranks of each side, the rollout tensor parallel.

One vLLM of verl's takes three kinds of updates: verl's whole call with weightsync, a :class:`weightsync.Trainer` in the actor ranks
without verl, and verl's whole call with its own backend. Each kind prints a line of JSON as soon as it is done: seconds of the call
and, for weightsync, of the round and of its pause, and how it was verified; then a table.

Weights are not loaded, because each update brings others. ``--strategy megatron``: a Megatron actor of ``--gpus`` tensor-parallel
ranks, by verl's engine and mbridge, which needs TransformerEngine's layers. Here it gets Megatron's own layers instead, whose norms
have names of their own: :func:`local_layers`. That is the only stand-in.

verl, Ray, vLLM and weightsync's entry points are on the path. ``measure`` and ``library`` are also what the tests run on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

SIZES = {
    "tiny": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=512),
    "dense": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, vocab_size=151936),
    "moe": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32, vocab_size=151936,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LINE = f"{ROLLOUT}.checkpoint_engine"
OWN = {"colocated": "naive", "separated": "nccl"}
SERVER = "vllm_server_0_0"  # Ray's name of verl's first
SECONDS = 120


def measure(update, change, rounds, last_round, step_of=lambda result: result.step):
    """Change the weights and update, ``rounds`` times; return the figures of each. The first includes what is done once.

    ``step_of`` says which step, from 1, a result is of.
    """
    found = []
    for step in range(1, rounds + 1):
        change(step)
        began = time.perf_counter()
        update(step)
        row = {"call": time.perf_counter() - began}
        result = last_round()
        if result is not None:
            assert result.ok and step_of(result) == step, result.error
            row |= {
                "round": result.seconds, "pause": result.longest_pause, "bytes": result.nbytes,
                "verified": sorted({replica.verified for replica in result.replicas}),
                "transports": sorted({name for replica in result.replicas for name in replica.transports}),
                "phases": {name: round(1000 * value, 2) for name, value in result.replicas[0].phases.items()},
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


def configured(options, folder):
    """Verl's configuration."""
    from hydra import compose, initialize_config_module

    share = 0.45 if options.place == "colocated" else 0.8
    overrides = [
        f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size={options.gpus}",
        f"{LINE}.backend=weightsync", f"+{LINE}.engine_kwargs.weightsync.timeout={SECONDS}", f"{ROLLOUT}.max_model_len=512",
        f"{ROLLOUT}.max_num_seqs=8", f"{ROLLOUT}.gpu_memory_utilization={share}", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.enforce_eager={options.eager}", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.model.use_remove_padding=False", "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    ]  # fmt: skip
    if options.strategy == "megatron":
        given = f"{ACTOR}.megatron.override_transformer_config"
        overrides += [
            "model_engine=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size={options.gpus}",
            f"{ACTOR}.megatron.vanilla_mbridge=True", f"{ACTOR}.megatron.use_remove_padding=False",
            f"{ACTOR}.optim.total_training_steps=100",  # as verl's trainers set it
            f"{given}.attention_backend=local", f"+{given}.sequence_parallel=False",  # as Megatron's own norms need it
        ]  # fmt: skip
    else:
        overrides += [f"{ACTOR}.strategy=fsdp2", *[f"{ACTOR}.fsdp_config.model_dtype=bf16"] * (options.dtype == "bf16")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides).actor_rollout_ref


def without_loading(strategy, device="cuda"):
    """Let the training engine of this process take its model as it is made, on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    def made(config, torch_dtype, **_):
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch_dtype)

    if strategy == "megatron":
        local_layers()
    else:
        AutoModelForCausalLM.from_pretrained = made


def local_layers():
    """Let mbridge build Qwen3 of Megatron's own layers, export their norms, and load nothing."""
    from mbridge.models.qwen3 import Qwen3Bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def spec(bridge, vp_stage=None):
        bridge.has_vp_stage = True
        return get_gpt_decoder_block_spec(bridge.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)

    Qwen3Bridge._get_transformer_layer_spec = spec
    layer = "model.layers.{layer_number}"
    Qwen3Bridge._OTHER_MAPPING = {"input_layernorm.weight": [f"{layer}.input_layernorm.weight"]}
    after = {"pre_mlp_layernorm.weight": [f"{layer}.post_attention_layernorm.weight"]}
    Qwen3Bridge._MLP_MAPPING = {**Qwen3Bridge._MLP_MAPPING, **after}
    Qwen3Bridge.load_weights = lambda *_, **__: None


def fill(module, seed):
    """Change all weights of a rank: a module, or Megatron's list of them."""
    import torch

    with torch.no_grad():
        for part in module if isinstance(module, list) else [module]:
            for parameter in part.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(seed / 64)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def library(engine, training, server, rounds):
    """Updates by a :class:`weightsync.Trainer` alone, into the workers that have joined already. All actor ranks call it at once.

    Args:
        engine: weightsync's checkpoint engine, which leaves.
        training: verl's training engine.
        server: Ray's handle of verl's server.
        rounds: Their number.
    """
    import torch

    import weightsync
    from weightsync.config import ClientSettings
    from weightsync.integrations.engine_calls import EngineCalls
    from weightsync.integrations.megatron import hf_state
    from weightsync.launch import texts_of_ranks
    from weightsync.server.client import Client

    meeting, state, results = engine.meeting, training.module, []
    engine.leave()
    if isinstance(state, list):
        state = hf_state(state, config=training.model_config.hf_config, bridge=training.bridge)
    with Client(ClientSettings.load(coordinator=meeting.coordinator)) as client:
        last = int(texts_of_ranks(str(client.status().last))[0])
    rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    calls = EngineCalls(lambda method, given: server.collective_rpc.remote(method, kwargs=given).future().result(2 * SECONDS))

    def update(step):
        def publish():
            return trainer.publish(last + step, step=step, timeout=SECONDS)

        results.append(publish() if rank else calls.publish(publish, last + step, timeout=SECONDS))

    with weightsync.Trainer(state, meeting.coordinator, rank=rank, world_size=world_size, dtype=torch.bfloat16) as trainer:
        trainer.wait_for_replicas(0, SECONDS, names=meeting.receivers)
        return measure(update, lambda step: fill(training.module, step + 32), rounds, lambda: results[-1])


def _engine(worker, place):
    return worker.rollout._colocated._actor if place == "colocated" else worker.checkpoint_engine


def _library(worker, place, rounds):
    import ray

    return library(_engine(worker, place), worker.actor.engine, ray.get_actor(SERVER), rounds)


def _last_round(worker, place):
    """Runs in actor rank 0, which has the coordinator."""
    from weightsync.config import ClientSettings
    from weightsync.server.client import Client

    with Client(ClientSettings.load(coordinator=_engine(worker, place).meeting.coordinator)) as client:
        return client.status().rounds[-1]


def _use_own(worker, backend):
    """Let a worker of verl update as it does without weightsync."""
    import torch
    from verl.checkpoint_engine import CheckpointEngineRegistry

    is_actor = hasattr(worker, "actor")
    adapter = getattr(worker, "rollout" if is_actor else "server_adapter", None)
    if adapter is not None:
        adapter._replica.leave()
    if backend == "naive":
        adapter._colocated = None
        return
    config = worker.config.rollout if is_actor else worker.rollout_config
    master = {"is_master": torch.distributed.get_rank() == 0} if is_actor else {}
    worker.checkpoint_engine = CheckpointEngineRegistry.new(
        backend, bucket_size=config.checkpoint_engine.update_weights_bucket_megabytes << 20, **master
    )


def play(options, folder):
    """Start verl's actor and rollout, and measure; yields what was measured as soon as it is there."""
    import ray
    import torch
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    class Actor(ActorRolloutRefWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def without_loading(self, strategy):
            without_loading(strategy)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def change(self, seed):
            fill(self.actor.engine.module, seed)

    began, place, colocated = time.perf_counter(), options.place, options.place == "colocated"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(
        num_cpus=16, num_gpus=torch.cuda.device_count(), include_dashboard=False, logging_level="error", object_store_memory=1 << 30
    )
    config = configured(options, folder)
    rollout, model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
    actors = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[options.gpus], max_colocate_count=2),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(Actor), config=config, role="actor_rollout" if colocated else "actor"
        ),
        device_name="cuda",
    )
    replica = vLLMReplica(replica_rank=0, config=rollout, model_config=model, gpus_per_node=options.gpus)

    def make_actors():
        actors.without_loading(options.strategy)
        actors.init_model()
        print(f"actor ready after {time.perf_counter() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(make_actors)
        if colocated:  # vLLM looks at the memory that the actor leaves
            making.result()
        asyncio.run(replica.init_hybrid(actors) if colocated else replica.init_standalone())
        making.result()
    print(f"vLLM ready after {time.perf_counter() - began:.0f} s", flush=True)
    manager = CheckpointEngineManager(config=rollout.checkpoint_engine, actor_wg=actors, replicas=[replica])
    if colocated:
        manager.backend = "naive"  # as verl's trainers set it

    def change(step):
        if colocated:
            manager.sleep_replicas()
        actors.change(step)

    def update(step):
        manager.update_weights(global_steps=step)

    def everywhere(workers, function, *given):
        return ray.get([worker.__ray_call__.remote(function, *given) for worker in workers])

    rounds, own = options.rounds, OWN[place]
    yield "weightsync", measure(update, change, rounds, lambda: everywhere(actors.workers[:1], _last_round, place)[0])
    yield "library", everywhere(actors.workers, _library, place, rounds)[0]
    everywhere(actors.workers if colocated else [*actors.workers, *replica.workers], _use_own, own)
    manager.backend, manager.backend_cls = own, CheckpointEngineRegistry.get(own)
    yield own, measure(update, change, rounds, lambda: None)
    ray.shutdown()


def arguments(given=None):
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=tuple(OWN))
    parser.add_argument("model", choices=tuple(SIZES))
    parser.add_argument("dtype", nargs="?", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--strategy", choices=("fsdp2", "megatron"), default="fsdp2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--eager", action="store_true", help="no graphs in vLLM, which starts faster")
    return parser.parse_args(given)


def run(options, ways):
    """Print each of ``ways`` as soon as it is measured. They get the options and a checkpoint."""
    rows = {}
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(folder, options.model)
        for way, found in ways(options, folder):
            rows[way] = found
            print(json.dumps({"way": way, **vars(options), "found": found}), flush=True)
            print(table(rows), flush=True)


if __name__ == "__main__":
    run(arguments(), play)
