"""verl's and weightsync's vLLM adapters without vLLM: a Ray actor takes the place of its server and its worker."""

from __future__ import annotations

import asyncio
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
import torch
import verl
from tests.integration.called_module import Model, without_vllm, worker_of
from tests.integration.verl.verl_actors import Replica, digests
from verl.checkpoint_engine import CheckpointEngineWorker

from weightsync.engines.vllm import in_call

FOLDER = "verl.workers.rollout.vllm_rollout"


def part_of_vllm_rollout(name: str) -> Any:
    """A module of verl's vLLM rollout. Its package imports vLLM only to name a sleep level and to require a release."""
    if FOLDER not in sys.modules:
        levels: Any = ModuleType("verl.third_party.vllm")
        levels.VLLM_SLEEP_LEVEL = 2
        sys.modules[levels.__name__] = levels
        package = ModuleType(FOLDER)
        package.__path__ = [f"{verl.__path__[0]}/workers/rollout/vllm_rollout"]
        sys.modules[FOLDER] = package
    return importlib.import_module(f"{FOLDER}.{name}")


@ray.remote(num_cpus=0)
class Server:
    """What verl's adapter calls of a vLLM server with one worker."""

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.loaded: dict[str, str] = {}
        self.step: int | None = None

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        assert (method, args) == ("update_weights_from_ipc", ())
        await asyncio.to_thread(self.receive, **(kwargs or {}))

    def receive(self, use_shm: bool) -> None:
        transfer = part_of_vllm_rollout("bucketed_weight_transfer")
        self.loaded = {}
        transfer.BucketedWeightReceiver(self.handle, torch.device("cpu"), use_shm).receive_weights(self.load)

    def load(self, weights: list[tuple[str, torch.Tensor]], _is_last: bool) -> None:
        self.loaded |= digests(weights)

    async def clear_kv_cache(self) -> None:
        pass

    async def set_global_steps(self, step: int) -> None:
        self.step = step

    async def holds(self) -> tuple[dict[str, str], int | None]:
        """What its worker loaded last, and verl's count of it."""
        return self.loaded, self.step


class VllmRank(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's rollout rank with verl's own vLLM adapter, and the server that the adapter finds by its name."""

    def __init__(self, rollout_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        adapter = part_of_vllm_rollout("vllm_rollout").ServerAdapter(rollout_config, model_config, device_mesh=None)
        kind: Any = Server
        self.server = kind.options(name=f"vllm_server_{adapter.replica_rank}_0").remote(adapter.zmq_handle)
        ray.get(self.server.holds.remote())
        super().__init__(rollout_config, model_config, adapter, *args, **kwargs)


def servers(replicas: list[Replica]) -> list[Any]:
    """The servers of ``replicas``."""
    return [ray.get_actor(f"vllm_server_{replica.replica_rank}_0") for replica in replicas]


class DirectServer:
    """A server whose one worker has weightsync's methods: the real ones, of a model in host memory instead of a vLLM."""

    def __init__(self, handle: str, path: str) -> None:
        torch.set_num_threads(1)
        self.handle, self.fault = handle, ""
        self.asked: list[str] = []
        self.step: int | None = None
        self.adapter: dict[str, torch.Tensor] = {}
        self.model = Model(path)
        self.worker = SimpleNamespace(**worker_of(self.model, path))
        self.thread = ThreadPoolExecutor(1)
        without_vllm()

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        self.asked.append(method)
        if self.fault == f"raise in {method}":
            raise RuntimeError("the worker does not like it")
        called: Any = getattr(in_call.called(self.worker), method.removeprefix("weightsync_"), None)
        work = called if method.startswith("weightsync_") else self.receive
        await asyncio.get_running_loop().run_in_executor(self.thread, lambda: work(**(kwargs or {})))

    def receive(self, use_shm: bool, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, **_: Any) -> None:
        """As verl's worker: an adapter takes the place of the one before, and other weights are loaded."""
        transfer = part_of_vllm_rollout("bucketed_weight_transfer")
        receiver = transfer.BucketedWeightReceiver(self.handle, torch.device("cpu"), use_shm)
        if not (peft_config and base_sync_done):
            receiver.receive_weights(lambda weights, _: self.model.load_weights(weights))
            return
        self.peft_config, self.adapter = peft_config, {}
        receiver.receive_weights(lambda weights, _: self.adapter.update((name, own.clone()) for name, own in weights))

    async def wake_up(self, tags: list[str]) -> None:
        self.asked.append(f"wake {tags[0]}")

    async def clear_kv_cache(self) -> None:
        self.asked.append("clear")

    async def set_global_steps(self, step: int) -> None:
        self.step = step

    async def holds(self) -> tuple[dict[str, str], int | None]:
        return digests(self.model.inner.state_dict().items()), self.step

    async def calls(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked
