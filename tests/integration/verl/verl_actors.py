"""Ray actors of the verl tests: verl's own workers, which fail on demand, and an adapter in the place of a server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import torch
from tests.integration.verl import verl_platform
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """dtype, shape and hash of each tensor."""
    raw = {name: (tensor, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in named}
    return {name: f"{it.dtype} {tuple(it.shape)} {hashlib.sha256(data).hexdigest()}" for name, (it, data) in raw.items()}


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's actor worker: its ``update_weights`` and ``execute_checkpoint_engine`` are inherited."""

    def __init__(self, config: Any, role: str) -> None:
        torch.set_num_threads(1)
        verl_platform.init_gloo()
        super().__init__(config, role)
        self.fault = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        super().init_model()
        inner = self.actor.engine
        whole = inner.get_per_tensor_param
        inner.get_per_tensor_param = lambda **kwargs: (self.walk(whole(**kwargs)[0]), None)

    def walk(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """What verl's engine yields, until the fault that a test asked for."""
        rank = torch.distributed.get_rank()
        for place, item in enumerate(weights):
            if place == 0 and self.fault == "raise first":
                raise ValueError("the first tensor cannot be gathered")
            if place == 3 and self.fault in ("raise", f"raise on {rank}"):
                raise ValueError("the fourth tensor cannot be gathered")
            if place == 3 and self.fault == f"stop on {rank}":
                threading.Event().wait(600)
            yield item
        self.walked = place

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def set_fault(self, fault: str) -> None:
        self.fault = fault

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def change(self, seed: int, dtype: str) -> dict[str, str]:
        """Set all parameters to values of ``seed``, the same for every sharding; return what a rollout rank must get."""
        expected = {}
        with torch.no_grad():
            for name, parameter in self.actor.engine.module.state_dict().items():
                generator = torch.Generator().manual_seed(seed + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
                whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                expected[name] = whole.to(getattr(torch, dtype))
                if isinstance(parameter, DTensor):
                    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
                else:
                    parameter.copy_(whole)
        return digests(expected.items())


class PlainActor(Actor):
    """As verl made it: no faults, and its calls of ``DTensor.full_tensor`` are counted."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        ActorRolloutRefWorker.init_model(self)
        self.gathered = 0
        kind: Any = DTensor
        gather = kind.full_tensor

        def counted(tensor: DTensor, **kwargs: Any) -> torch.Tensor:
            self.gathered += 1
            whole: torch.Tensor = gather(tensor, **kwargs)
            return whole

        kind.full_tensor = counted

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def gathers(self) -> int:
        """How many tensors were gathered since the last call."""
        gathered, self.gathered = self.gathered, 0
        return gathered

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def replace_parameters(self) -> None:
        """Give all parameters other memory, as offloading does."""
        for parameter in self.actor.engine.module.parameters():
            parameter.data = parameter.data.clone()


class Taking(BaseRollout):  # type: ignore[misc]
    """Keeps digests of what it is given, instead of passing it to a server."""

    def __init__(self, config: Any, model_config: Any) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.taken: dict[str, str] = {}
        self.steps: list[int | None] = []
        self.fault = ""

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: AsyncIterator[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        taken: dict[str, str] = {}
        async for name, tensor in weights:
            taken |= digests([(name, tensor)])
            if len(taken) == 3 and self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if len(taken) == 3 and self.fault == "raise":
                raise ValueError("the loader does not take this tensor")
            if len(taken) == 3 and self.fault == "hang":
                await asyncio.sleep(600)
        self.taken = taken
        self.steps.append(kwargs.get("global_steps"))


class RolloutRank(CheckpointEngineWorker):  # type: ignore[misc]
    def __init__(self, rollout_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        super().__init__(rollout_config, model_config, Taking(rollout_config, model_config), *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def taken(self) -> tuple[dict[str, str], list[int | None]]:
        return self.server_adapter.taken, self.server_adapter.steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def set_fault(self, fault: str) -> None:
        self.server_adapter.fault = fault


class Replica(RolloutReplica):  # type: ignore[misc]
    """A replica without servers: what verl asks of them is counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[str] = []

    async def launch_servers(self) -> None:
        pass

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.asked.append("abort")

    async def release_kv_cache(self) -> None:
        self.asked.append("release")

    async def resume_kv_cache(self) -> None:
        self.asked.append("resume cache")

    async def resume_generation(self) -> None:
        self.asked.append("resume")
