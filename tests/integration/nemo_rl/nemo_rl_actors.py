"""Ray actors of the NeMo-RL tests: its own mixins of a policy worker and of a vLLM worker, around models that fail on demand."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from nemo_rl.models.generation.vllm.checkpoint_engine import (
    VllmAsyncCheckpointEngineRpcMixin,
    VllmCheckpointEngineMixin,
    VllmCheckpointEngineRpcMixin,
)
from nemo_rl.models.policy.workers.checkpoint_engine import DTensorCheckpointEngineSendMixin, PolicyCheckpointEngineMixin
from tests.integration.nemo_rl.refit_contract import Batch, PolicyModel, WorkerModel

EXPERT_LAYOUT = {"expert_params": {}, "missing_weight_prefixes": ["lm_head."]}
"""What a vLLM worker that holds no experts and no head says of itself."""


def without_cuda() -> None:
    """Calls of CUDA that NeMo-RL makes around an update, where there is none."""
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda _: types.SimpleNamespace(total_memory=20 << 20)
    cuda.current_stream = lambda: types.SimpleNamespace(synchronize=lambda: None)


class PolicyRank(DTensorCheckpointEngineSendMixin, PolicyCheckpointEngineMixin):  # type: ignore[misc]
    """Everything of NeMo-RL's policy worker that an update runs through; the generator is ours."""

    cpu_offload = False

    def __init__(self) -> None:
        without_cuda()
        torch.set_num_threads(1)
        self.rank = int(os.environ["RANK"])
        self.state = PolicyModel(self.rank)

    def _checkpoint_engine_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert not torch.is_grad_enabled()
        return self.state.weights()

    def set(self, seed: int | None = None, fault: str | None = None) -> None:
        self.state.seed = self.state.seed if seed is None else seed
        self.state.fault = self.state.fault if fault is None else fault

    def walked(self) -> bool:
        return self.state.walked


class InternalWorker(VllmCheckpointEngineMixin):  # type: ignore[misc]
    """A vLLM worker process with NeMo-RL's extension; vLLM's loader is a model that keeps digests."""

    def __init__(self) -> None:
        store = tempfile.mkdtemp()
        dist.init_process_group("gloo", init_method=f"file://{store}/world", rank=0, world_size=1)
        self.model = WorkerModel()

    def _load_weights(self, batch: Batch) -> None:
        self.model.load(batch)
        if self.model.fault == "die" and len(self.model.loaded) >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def _maybe_process_fp8_kv_cache(self) -> None:
        pass

    def _checkpoint_engine_weight_layout(self) -> Any:
        return EXPERT_LAYOUT


class EngineOfOne:
    """A generation worker, whose engine has one worker, in the same process."""

    def __init__(self) -> None:
        without_cuda()
        torch.set_num_threads(1)
        self.worker = InternalWorker()
        self.llm = self

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return [getattr(self.worker, method)(*args)]

    def set(self, fault: str) -> None:
        self.worker.model.fault = fault

    def begin(self) -> None:
        self.worker.model.loaded = {}

    def loaded(self) -> dict[str, str]:
        return self.worker.model.loaded


class GenerationRank(VllmCheckpointEngineRpcMixin, EngineOfOne):  # type: ignore[misc]
    """NeMo-RL's generation worker with a synchronous engine."""


class AsyncEngineRank(VllmAsyncCheckpointEngineRpcMixin, EngineOfOne):  # type: ignore[misc]
    """The same with an engine whose calls are awaited."""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return asyncio.to_thread(super().collective_rpc, method, args)


Policy = ray.remote(PolicyRank)
Generation = ray.remote(GenerationRank)
AsyncGeneration = ray.remote(AsyncEngineRank)
