"""NeMo-RL with policy and vLLM on the same GPUs. Its driver makes the calls, and no method of a worker is replaced.

The synchronizer is NeMo-RL's own for CUDA IPC: its order of offloading, waking and putting to sleep holds. Only in the place of its
two calls that transfer the weights, policy workers publish their shards, and vLLM's workers read them.
"""

from __future__ import annotations

import inspect
import secrets
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import nemo_rl.weight_sync.ipc_weight_synchronizer as synchronizers
import ray
from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import CheckpointEngineWeightSynchronizer
from nemo_rl.weight_sync.ipc_weight_synchronizer import IPCWeightSynchronizer

from weightsync.engines.wrapped_methods import wrap_once
from weightsync.integrations.engine_calls import plugin_release
from weightsync.integrations.nemo_rl.engine import NAME, in_worker
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import say_why, why_streamed


class _Replacing:
    """An object of NeMo-RL, some of whose methods are replaced."""

    def __init__(self, owner: Any, **methods: Any) -> None:  # noqa: ANN401 - NeMo-RL's
        self._owner = owner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - NeMo-RL's
        if name.startswith("__"):  # asked for by pickle before there is an owner: NeMo-RL's single controller is an actor
            raise AttributeError(name)
        return getattr(self._owner, name)


class ColocatedSynchronizer(IPCWeightSynchronizer):  # type: ignore[misc]
    """NeMo-RL's, whose workers transfer shards where all of them can take part in that. Otherwise it does what NeMo-RL does."""

    chosen: ClassVar[Mapping[str, object]] = {}
    """The user's options, as under ``refit_cfg``, for the next one that is made."""

    def __init__(self, policy: Any, generation: Any, refit_buffer_size_gb: float | None = None) -> None:  # noqa: ANN401 - NeMo-RL's
        self._owned, self._engines, self.options = policy, generation, dict(self.chosen)
        self._calls = CheckpointEngineWeightSynchronizer(policy, generation, {})
        self._joined, self._direct, self._call = False, True, 0
        super().__init__(
            _Replacing(policy, stream_weights_via_ipc_zmq=self._send, offload_after_refit=self._offload),
            _Replacing(generation, update_weights_via_ipc_zmq=self._receive),
            refit_buffer_size_gb,
        )

    def _vllms(self, method: str, **arguments: object) -> Any:  # noqa: ANN401 - what Ray gives of calls
        return self._calls._run_generation(in_worker, (method, self.options, arguments))

    def _join(self) -> str:
        """Let all workers join, or return why they cannot."""
        try:
            ray.get([actor.__ray_call__.remote(plugin_release) for actor in self._engines.worker_group.workers])
            made = {"backend": NAME, "bucket_size_bytes": 1 << 20, "engine_kwargs": self.options}
            ray.get(self._calls._run_policy("init_checkpoint_engine", **made))
            policies = sorted(ray.get(self._calls._run_policy("prepare_checkpoint_engine")), key=lambda about: int(about["rank"]))
            groups = ray.get(self._vllms("prepare"))
        except Exception as error:  # noqa: BLE001 - Ray's, of any worker
            return f"{type(error).__name__}: {error}".strip().splitlines()[-1]
        vllms = [{**about, "rank": rank} for group in groups for rank, about in enumerate(group)]
        if reason := why_streamed(policies, vllms):
            return reason
        every = {"train_world_size": len(policies), "rollout_world_size": len(vllms), "metadata": [*policies, *vllms]}
        self._joined = True  # or some of them, if this fails
        ray.get(
            self._calls._run_policy("init_checkpoint_engine_process_group", **every)
            + self._vllms("init_rollout_process_group", rollout_rank=0, **every)
        )
        return ""

    def _send(self, **arguments: Any) -> Any:  # noqa: ANN401 - NeMo-RL's
        """Take the place of NeMo-RL's call of policy workers. vLLM's weights are awake by then."""
        if self._direct and not self._joined:
            reason = self._join()
            self._direct = not reason
            if reason:
                say_why("NeMo-RL gathers the weights and hands them to vLLM itself", reason)
        if self._direct:
            self._call = secrets.randbits(48) + 1
            return self._calls._run_policy("send_weights_via_checkpoint_engine")
        return self._owned.stream_weights_via_ipc_zmq(**arguments)

    def _receive(self) -> Any:  # noqa: ANN401 - NeMo-RL's
        """Take the place of the call of vLLM's workers, which follows that."""
        return self._vllms("read_shards", call=self._call) if self._direct else self._engines.update_weights_via_ipc_zmq()

    def _offload(self) -> None:
        """Free what policy workers published, unless they keep it, before they offload their model and vLLM wakes its cache.

        If they failed before they published, this ends vLLM's call, for which waking its cache waits.
        """
        if self._joined:
            self._joined = False
            stay = ray.get(self._calls._run_policy("end_update", call=self._call))
            self._joined = all(stay)
            if any(stay) and not self._joined:  # all join again together
                ray.get(self._calls._run_policy("finalize"))
        self._owned.offload_after_refit()


def synchronized(original: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - NeMo-RL's
    """NeMo-RL's ``refit_policy_generation``, where a colocated vLLM has a :class:`ColocatedSynchronizer`."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    generation = given["policy_generation"]
    lacks = getattr(generation, "weight_synchronizer", None) is None
    if given["colocated_inference"] and lacks and generation.cfg["backend"] == "vllm":
        made = ColocatedSynchronizer(given["policy"], generation, given.get("_refit_buffer_size_gb"))
        generation.weight_synchronizer = made
    return original(*args, **kwargs)


def enable_colocated(options: Mapping[str, object]) -> None:
    """Let NeMo-RL make this synchronizer. Raises what :func:`weightsync.integrations.nemo_rl.enable` raises."""
    from nemo_rl.algorithms import grpo

    Options.of(options, "weightsync.integrations.nemo_rl.enable")
    ColocatedSynchronizer.chosen = options
    synchronizers.IPCWeightSynchronizer = ColocatedSynchronizer
    name = "refit_policy_generation"
    original = getattr(grpo, name)
    wrap_once(grpo, name, synchronized)
    for module in list(sys.modules.values()):  # others import the function by its name
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, getattr(grpo, name))
