# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN204
"""Updates inside NeMo-RL, beside the library alone and NeMo-RL's own way: ``python -m benchmarks.gpu_nemo_rl PLACE MODEL ...``.

``separated``: the policy has the first GPUs, vLLM the others; NeMo-RL's own way is its packed broadcast over NCCL. ``colocated``:
they share the GPUs; its own way is CUDA IPC. ``MODEL``: ``tiny`` or ``dense`` (shapes of Qwen3-8B, 16.4 GB). ``--gpus``: ranks of
each side, the policy sharded by FSDP2 with float32 masters, vLLM tensor parallel.

NeMo-RL's ``Policy`` (DTensor workers) and ``VllmGeneration`` run in Ray as in its training, with its configuration
``grpo_math_1B.yaml`` in ``--nemo-rl``, its checkout; only data, losses and optimizer are left out. One vLLM takes three kinds of
updates: NeMo-RL's whole call with weightsync, a :class:`weightsync.Trainer` in the policy workers without NeMo-RL's call, and
NeMo-RL's whole call with its own synchronizer. Each prints a line of JSON as soon as it is done, then a table. After the last
update of both calls, sums over one matrix are compared in policy and vLLM.

NeMo-RL and what it imports, vLLM and weightsync's entry points are on the path; its own environments per worker are not used.
NeMo-RL refuses Transformers 5.12 and newer (``nemo_rl.models.policy``).
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu_verl import SECONDS, library, measure, run

MATRIX = "model.layers.1.mlp.down_proj.weight"  # vLLM keeps its name, and cuts its columns only
OWN = {"colocated": "its CUDA IPC", "separated": "its packed broadcast"}


def configured(options, folder):
    """NeMo-RL's configuration of a policy, from that of its GRPO example."""
    from nemo_rl.utils.config import load_config_with_inheritance, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    from weightsync.integrations.nemo_rl.engine import NAME

    register_omegaconf_resolvers()
    configs = Path(options.nemo_rl) / "examples/configs"
    config = load_config_with_inheritance(configs / "grpo_math_1B.yaml", configs)
    colocated = options.place == "colocated"
    given = {
        "model_name": str(folder),
        "dtensor_cfg": {"_v2": False},
        "sequence_packing": {"enabled": False},  # which needs flash_attn
        "generation": {
            "colocated": {"enabled": colocated},
            "vllm_cfg": {
                "tensor_parallel_size": options.gpus, "enforce_eager": True,
                "gpu_memory_utilization": 0.4 if colocated else 0.7,
            },
            "vllm_kwargs": {"max_num_seqs": 8},
        },
    }  # fmt: skip
    if not colocated:
        given["generation"] |= {"refit_transport": NAME, "refit_cfg": {NAME: {"timeout": SECONDS}}}
    config.policy = OmegaConf.merge(config.policy, given)
    config = OmegaConf.to_container(config, resolve=True)["policy"]
    config["generation"]["model_name"] = config["model_name"]
    return config


def change(worker, seed):
    """Change all weights of a policy worker, each to another value. Returns :func:`sums` of the whole matrix."""
    import torch

    made = torch.Generator("cuda").manual_seed(1000 * seed + worker.rank)
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.to_local().normal_(0, 0.02, generator=made)
    torch.cuda.synchronize()
    return sums(worker.model.get_parameter(MATRIX).full_tensor().to(torch.bfloat16))


def sums(matrix):
    """The sum of its values and of their squares."""
    wide = matrix.detach().double()
    return [float(wide.sum()), float((wide * wide).sum())]


def _held(worker):
    """What vLLM's ranks hold of the matrix."""
    each = worker.llm.collective_rpc(_held_by_rank)
    return [sum(column) for column in zip(*each, strict=True)]


def _held_by_rank(worker):
    return sums(worker.model_runner.model.get_parameter(MATRIX))


def _last_round(worker):
    """Runs in policy rank 0, which reaches the coordinator."""
    from weightsync.config import ClientSettings
    from weightsync.server.client import Client

    with Client(ClientSettings.load(coordinator=worker.checkpoint_engine._meeting.coordinator)) as client:
        return client.status().rounds[-1]


class _Server:
    """A generation worker of NeMo-RL, as :func:`benchmarks.gpu_verl.library` calls verl's."""

    def __init__(self, worker):
        self._worker, self.collective_rpc = worker, self

    def remote(self, method, kwargs):
        return self._worker.__ray_call__.remote(_asked, method, kwargs)


def _asked(worker, method, kwargs):
    return worker.llm.collective_rpc(method, kwargs=kwargs)


def _library(worker, server, rounds):
    engine = worker.checkpoint_engine
    found = types.SimpleNamespace(meeting=engine._meeting, leave=engine._sender.leave)
    return library(found, types.SimpleNamespace(module=worker.model), server, rounds)


def play(options, folder):
    """Start NeMo-RL's policy and generation, and measure; yields what was measured as soon as it is there."""
    import ray
    import torch
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY, PY_EXECUTABLES
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.weight_sync.collective_weight_synchronizer import CollectiveWeightSynchronizer
    from nemo_rl.weight_sync.factory import create_weight_synchronizer
    from nemo_rl.weight_sync.ipc_weight_synchronizer import IPCWeightSynchronizer
    from transformers import AutoTokenizer

    from weightsync.integrations.nemo_rl.colocated import ColocatedSynchronizer

    began, colocated = time.perf_counter(), options.place == "colocated"
    for name in ACTOR_ENVIRONMENT_REGISTRY:
        ACTOR_ENVIRONMENT_REGISTRY[name] = PY_EXECUTABLES.SYSTEM
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(num_gpus=torch.cuda.device_count(), include_dashboard=False, logging_level="error", object_store_memory=1 << 30)
    config, tokenizer = configured(options, folder), AutoTokenizer.from_pretrained(folder)
    config["generation"] = configure_generation_config(config["generation"], tokenizer)

    def cluster(name, groups):
        return RayVirtualCluster([options.gpus], num_gpus_per_node=options.gpus, max_colocated_worker_groups=groups, name=name)

    train = cluster("train", 1 + colocated)
    inference = train if colocated else cluster("inference", 1)

    def make_policy():
        made = Policy(train, config, tokenizer, init_optimizer=False, init_reference_model=False)
        print(f"policy ready after {time.perf_counter() - began:.0f} s", flush=True)
        return made

    with ThreadPoolExecutor(1) as thread:
        if colocated:  # as NeMo-RL's setup orders them
            generation, policy = VllmGeneration(inference, config["generation"]), make_policy()
        else:
            making = thread.submit(make_policy)
            generation, policy = VllmGeneration(inference, config["generation"]), making.result()
    print(f"vLLM ready after {time.perf_counter() - began:.0f} s", flush=True)
    policies, server = policy.worker_group.workers, generation.worker_group.workers[0]

    def everywhere(workers, function, *given):
        return ray.get([worker.__ray_call__.remote(function, *given) for worker in workers])

    def prepare():
        if colocated:
            generation.finish_generation()
            policy.prepare_for_training()  # the last update left its weights on the CPU

    def changed(step):
        nonlocal wanted
        prepare()
        wanted = everywhere(policies, change, step)[0]

    def through(synchronizer, last_round):
        synchronizer.init_communicator()
        made = measure(
            lambda step: synchronizer.sync_weights(), changed, options.rounds, last_round,
            lambda result: result.version.number + 1,  # NeMo-RL gives no step; a run's first version is 0
        )  # fmt: skip
        there = everywhere([server], _held)[0]
        assert all(abs(a - b) <= 1e-6 * max(1.0, abs(b)) for a, b in zip(there, wanted, strict=True)), (there, wanted)
        return made

    wanted = None
    if colocated:
        ways = ColocatedSynchronizer(policy, generation), IPCWeightSynchronizer(policy, generation)
    else:
        ways = (
            create_weight_synchronizer(policy, generation, "vllm", False, train, inference),
            CollectiveWeightSynchronizer(policy, generation, train, inference),
        )
    yield "weightsync", through(ways[0], lambda: everywhere(policies[:1], _last_round)[0])
    prepare()
    generation.prepare_for_generation()
    yield "library", everywhere(policies, _library, _Server(server), options.rounds)[0]
    yield OWN[options.place], through(ways[1], lambda: None)
    ray.shutdown()


def arguments(given=None):
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=tuple(OWN))
    parser.add_argument("model", choices=("tiny", "dense"))
    parser.add_argument("--nemo-rl", default=".", help="NeMo-RL's checkout (default: this folder)")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args(given)


if __name__ == "__main__":
    run(arguments(), play)
