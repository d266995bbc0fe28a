"""A program: verl's worker that is actor and rollout, and its rollout worker, in one process, through verl's own updates.

Prints for each update whether the server held the values, its label, whether tensors were gathered, and what the server was asked.
With ``lora`` the actor trains an adapter of PEFT, which is not merged: whether the server's adapter and base are right.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "tests.integration.verl.verl_platform",
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

import ray
import torch
from hydra import compose, initialize_config_module
from tests.integration.server.service_support import free_port
from tests.integration.verl.test_verl_in_process import Handle
from tests.integration.verl.verl_actors import PlainActor, digests
from tests.integration.verl.verl_cluster import LINE, ON_A_CPU, OPTION, make_model
from tests.integration.verl.verl_vllm import DirectServer, part_of_vllm_rollout
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.utils.config import omega_conf_to_dataclass

from weightsync.errors import ConfigurationError


def agreed(ranks: list[Any]) -> str:
    """What verl's manager does before an update; how weights travel."""
    kind = CheckpointEngineRegistry.get("weightsync")
    said = [rank.execute_checkpoint_engine("prepare") for rank in ranks]
    with ThreadPoolExecutor(2) as threads:
        joining = [
            threads.submit(
                rank.execute_checkpoint_engine, "init_process_group", **{name: values[0] for name, values in own.items()}
            )
            for rank, own in zip(ranks, kind.build_topology(1, 1, said), strict=True)
        ]
        for joined in joining:
            joined.result(60)
    return str(ranks[0].checkpoint_engine._way)


async def together(ranks: list[Any], step: int) -> dict[str, float]:
    sent, _ = await asyncio.gather(ranks[0].update_weights(global_steps=step, mode="weightsync"), ranks[1].update_weights(step))
    return dict(sent)


async def adapters(worker: Any, rollout: Any, served: DirectServer) -> list[list[Any]]:
    """Updates of the adapter alone: way, tensors and configuration that the server has, whether its base is as it was loaded."""
    from peft import get_peft_model_state_dict

    base, found = digests(served.model.inner.state_dict().items()), []
    for step in (1, 2):
        worker.change(step, "bfloat16")
        way = await asyncio.to_thread(agreed, [worker, rollout])
        try:
            await together([worker, rollout], step)
        except ConfigurationError as error:
            print(way, error, file=sys.stderr, flush=True)
            os._exit(1)  # the rollout rank waits for its deadline
        rollout.execute_checkpoint_engine("finalize")
        expected = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in get_peft_model_state_dict(worker.actor.engine.module).items()
        }
        same = expected.keys() == served.adapter.keys() and all(
            torch.equal(served.adapter[name], value.to(served.adapter[name].dtype)) for name, value in expected.items()
        )
        config = {name: served.peft_config[name] for name in ("peft_type", "r", "lora_alpha", "target_modules")}
        kept = base == digests(served.model.inner.state_dict().items())
        found.append([way, same, len(expected) > 0, config, kept, served.step, await served.calls()])
    return found


def main() -> None:
    os.environ["MASTER_PORT"] = str(free_port())
    servers: dict[str, Any] = {}
    given: Any = ray
    given.get_runtime_context = lambda: SimpleNamespace(
        get_job_id=lambda: "01000000", get_actor_name=lambda: "", worker=SimpleNamespace(mode=0)
    )
    given.get_actor = servers.__getitem__
    part_of_vllm_rollout("vllm_rollout")
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_model(Path(folder) / "model"))
        with initialize_config_module("verl.trainer.config", version_base=None):
            changes = [LINE, *ON_A_CPU, f"actor_rollout_ref.model.path={path}", f"{OPTION}.timeout=30"]
            if sys.argv[1:]:
                model, loads = "actor_rollout_ref.model", "actor_rollout_ref.rollout.load_format"
                changes += [f"{model}.lora_rank=4", f"{model}.target_modules=[q_proj,down_proj]", f"{loads}={sys.argv[1]}"]
            config = compose("ppo_trainer", overrides=changes).actor_rollout_ref
        worker = PlainActor(config, "actor_rollout")
        worker.init_model()
        rollout = CheckpointEngineWorker(
            omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model), replica_rank=1
        )
        found: dict[str, list[Any]] = {"colocated": [type(worker.rollout).__name__], "separated": []}
        served = [DirectServer(adapter.zmq_handle, path) for adapter in (worker.rollout, rollout.server_adapter)]
        servers |= {f"vllm_server_{number}_0": Handle(server) for number, server in enumerate(served)}
        if sys.argv[1:]:
            print(json.dumps(asyncio.run(adapters(worker, rollout, served[1]))), flush=True)
            os._exit(0)
        for step in (1, 2, 3):
            if step == 3:
                os.environ["VLLM_PLUGINS"] = "another"
                worker.rollout._replica._is_ready = rollout.server_adapter._replica._is_ready = False
            expected = worker.change(step, "bfloat16")
            asyncio.run(worker.update_weights(global_steps=step, mode="naive"))
            held, label = asyncio.run(served[0].holds())
            found["colocated"].append([held == expected, label, worker.gathers() > 0, asyncio.run(served[0].calls())])
            way = agreed([worker, rollout])
            metrics = asyncio.run(together([worker, rollout], step))
            rollout.execute_checkpoint_engine("finalize")
            held, label = asyncio.run(served[1].holds())
            figures = [way, metrics["checkpoint_engine/installed"]]
            found["separated"].append([held == expected, label, worker.gathers() > 0, asyncio.run(served[1].calls()), *figures])
        print(json.dumps(found), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
