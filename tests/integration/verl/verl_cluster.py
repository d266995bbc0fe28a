"""A local Ray cluster with verl on CPUs: actor ranks, rollout ranks, and verl's manager between them, as a configuration says."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from tests.integration.verl import verl_actors
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass

from weightsync.config import ClientSettings
from weightsync.model import RoundResult
from weightsync.server.client import Client

ROOT = Path(__file__).resolve().parents[3]
_RAY_TOKEN = secrets.token_hex(32)  # Ray reads it once in a process, so its second cluster needs the same
OPTION = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weightsync"
LINE = "actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync"
ON_A_CPU = [
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
]
"""What a CPU needs, and a test's small buckets; nothing of it is for weightsync."""


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 512)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, chat_template="{{ messages }}")
    fast.save_pretrained(folder)
    return folder


@contextmanager
def cluster(folder: str) -> Iterator[None]:
    """Ray on this machine, which is told of GPUs that it does not have, because verl asks for one for each rank."""
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "tests.integration.verl.verl_platform",
        "RAY_AUTH_TOKEN": _RAY_TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",  # Ray's default starves them on a machine that does other things too
        "HF_HUB_OFFLINE": "1",
    }
    try:
        ray.init(
            num_cpus=16, num_gpus=12, include_dashboard=False, log_to_driver="VERL_TEST_LOG" in os.environ, logging_level="error",
            object_store_memory=80 << 20, _temp_dir=folder,
        )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ |= before


class Run:
    """What verl's trainer has: its configuration, a group of actor ranks, replicas and the manager."""

    def __init__(
        self,
        folder: Path,
        *,
        actors: int,
        rollouts: int,
        options: Sequence[str] = (),
        actor: type[verl_actors.Actor] = verl_actors.Actor,
        rollout: type[CheckpointEngineWorker] = verl_actors.RolloutRank,
    ) -> None:
        self.rollout = rollout
        model = make_model(folder / "model")
        with initialize_config_module("verl.trainer.config", version_base=None):
            whole = compose("ppo_trainer", overrides=[LINE, *ON_A_CPU, f"actor_rollout_ref.model.path={model}", *options])
        self.config = whole.actor_rollout_ref
        self.rollout_config = omega_conf_to_dataclass(self.config.rollout)
        self.model_config = omega_conf_to_dataclass(self.config.model)
        self.actors = RayWorkerGroup(
            resource_pool=RayResourcePool(process_on_nodes=[actors], max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(actor), config=self.config, role="actor"),
            device_name="cuda",
        )
        self.groups: list[Any] = []
        replicas = self.new_replicas(rollouts) if rollouts else []
        self.actors.init_model()
        self.manager = CheckpointEngineManager(
            config=self.rollout_config.checkpoint_engine, actor_wg=self.actors, replicas=replicas
        )

    def new_replicas(self, count: int) -> list[Any]:
        group = RayWorkerGroup(
            resource_pool=RayResourcePool(process_on_nodes=[count], max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(self.rollout), rollout_config=self.rollout_config, model_config=self.model_config
            ),
            device_name="cuda",
        )
        self.groups.append(group)
        replicas = [
            verl_actors.Replica(replica_rank=rank, config=self.rollout_config, model_config=self.model_config)
            for rank in range(count)
        ]
        for replica in replicas:
            asyncio.run(replica.init_hybrid(group))
        return replicas

    def change(self, seed: int, dtype: str = "float32") -> dict[str, str]:
        expected: dict[str, str] = self.actors.change(seed, dtype)[0]
        return expected

    def update(self, step: int | None) -> dict[str, float]:
        metrics: dict[str, float] = self.manager.update_weights(global_steps=step)
        return metrics

    def rounds(self) -> tuple[RoundResult, ...]:
        """The results that the coordinator keeps."""
        (about, *_) = ray.get(self.actors.execute_checkpoint_engine(["prepare"] * self.actors.world_size))
        with Client(ClientSettings.load(coordinator=about["coordinator"])) as client:
            return client.status().rounds

    def rollout_group(self) -> Any:
        """The rollout ranks of the manager's replicas, as the manager groups them for an update."""
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        return RayWorkerGroup(
            worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(verl_actors.RolloutRank))
        )

    def taken(self) -> list[tuple[dict[str, str], list[int | None]]]:
        """What each rollout rank of the manager's replicas has."""
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        return ray.get([worker.taken.remote() for worker in workers])  # type: ignore[no-any-return]
