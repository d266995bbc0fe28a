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
from tests.integration.called_module import MethodsOfPlugin, Model, without_vllm, worker_of
from tests.integration.nemo_rl.refit_contract import Batch, PolicyModel, WorkerModel, digests
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

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


class ShardedPolicyRank(PolicyRank):
    """The same around a model that is sharded by FSDP2, with float32 masters as NeMo-RL loads it."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.cfg = cfg
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model: Any = AutoModelForCausalLM.from_pretrained(cfg["model_name"], dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _prepare_checkpoint_engine_weight_send(self) -> None:
        if self.state.fault == "raise":
            raise ValueError("the parameters cannot be loaded")

    def _checkpoint_engine_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.full_tensor().to(torch.bfloat16)
        self.state.walked = True

    def set(self, seed: int | None = None, fault: str | None = None) -> None:
        self.state.fault = self.state.fault if fault is None else fault
        for number, parameter in enumerate(self.model.parameters()):
            parameter.data.copy_(torch.full_like(parameter.data, (seed or 0) + number / 64))

    def whole(self) -> dict[str, str]:
        return digests((name, tensor.full_tensor().to(torch.bfloat16)) for name, tensor in self.model.state_dict().items())


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


class CalledWorker(VllmCheckpointEngineMixin, MethodsOfPlugin):  # type: ignore[misc]
    """The same with the methods that weightsync's plugin adds to vLLM's worker."""

    def __init__(self, path: str) -> None:
        without_vllm()
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/world", rank=0, world_size=1)
        self.model = Model(path)
        self.__dict__.update(worker_of(self.model, path))

    def _load_weights(self, batch: Batch) -> None:
        self.model.load_weights(batch)

    def _maybe_process_fp8_kv_cache(self) -> None:
        pass


class EngineOfOne:
    """A generation worker, whose engine has one worker, in the same process."""

    def __init__(self, path: str = "") -> None:
        without_cuda()
        torch.set_num_threads(1)
        self.worker: Any = CalledWorker(path) if path else InternalWorker()
        self.llm = self

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> Any:
        if callable(method):
            return [method(self.worker, *args)]
        return [getattr(self.worker, method)(*args)]

    def holds(self) -> dict[str, str]:
        model: Model = self.worker.model
        return digests(model.inner.state_dict().items())

    def set(self, fault: str) -> None:
        self.worker.model.fault = fault

    def begin(self) -> None:
        self.worker.model.loaded = {}

    def loaded(self) -> dict[str, str]:
        return dict(self.worker.model.loaded)


class GenerationRank(VllmCheckpointEngineRpcMixin, EngineOfOne):  # type: ignore[misc]
    """NeMo-RL's generation worker with a synchronous engine."""


class AsyncEngineRank(VllmAsyncCheckpointEngineRpcMixin, EngineOfOne):  # type: ignore[misc]
    """The same with an engine whose calls are awaited."""

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> Any:
        return asyncio.to_thread(super().collective_rpc, method, args)


Policy = ray.remote(PolicyRank)
ShardedPolicy = ray.remote(ShardedPolicyRank)
Generation = ray.remote(GenerationRank)
AsyncGeneration = ray.remote(AsyncEngineRank)
