"""verl's vLLM adapter, but for its updates: vLLM's own workers read the weights from actor ranks, in a call of verl's server.

verl calls :meth:`VllmAdapter.update_weights` in a rollout rank with what the checkpoint engine of that process received or, where
actor and rollout share GPUs (``naive``), in each actor rank with the training engine's generator. There the actor ranks agree
among themselves. In both cases verl has paused its engine and mapped the weights, and goes on with both itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import torch.distributed as dist
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from weightsync.closing import OnFailure
from weightsync.errors import RoundFailed
from weightsync.integrations.stream_ranks import say_verified, say_why
from weightsync.integrations.updates import in_thread
from weightsync.integrations.verl import backend
from weightsync.integrations.verl.source import training_worker
from weightsync.integrations.verl.vllm_servers import ServedReplica
from weightsync.launch import texts_of_ranks

_log = logging.getLogger(__name__)


class VllmAdapter(ServerAdapter):  # type: ignore[misc]
    """verl's adapter, whose workers take the weights where all ranks can take part in that. Otherwise it does what verl does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - verl's
        super().__init__(*args, **kwargs)
        self._replica = ServedReplica(self)
        self._colocated = None if training_worker() is None else _Colocated(self._replica, self.config)

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - verl's
        """Let the workers take the weights, or pass on to verl what came instead."""
        if isinstance(weights, backend.AdapterUpdate):  # verl's workers then replace the adapter that its requests name
            weights, kwargs = weights.tensors, {**kwargs, "peft_config": weights.config, "base_sync_done": True}
        if isinstance(weights, backend.DirectUpdate):
            if self._replica.leads:
                await _in_thread(lambda: self._replica.update(weights.number, weights.seconds))
        elif self._colocated is None or not await self._colocated.update(global_steps):
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        if self._replica.leads:
            await self._replica.server.clear_kv_cache.remote()
            if global_steps is not None:
                await self._replica.server.set_global_steps.remote(global_steps)


async def _in_thread(work: Any) -> Any:  # noqa: ANN401 - of any type
    return await asyncio.wrap_future(in_thread(work, "weightsync-verl"))


class _Colocated:
    """Updates of replicas whose workers share the GPUs of the actor ranks. All actor ranks call it together."""

    def __init__(self, replica: ServedReplica, config: Any) -> None:  # noqa: ANN401 - verl's
        given = config.checkpoint_engine.engine_kwargs.get("weightsync") or {}
        self._options = backend.EngineOptions.of(given, backend.WHERE)
        self._replica = replica
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._actor = backend.StreamCheckpointEngine(1 << 20, is_master=self._rank == 0, **given)

    async def update(self, step: int | None) -> bool:
        """Bring the weights to all replicas, or return ``False`` before anything was sent: verl's own transfer must do it.

        Raises:
            RoundFailed: A replica did not take them. Raised on all ranks, so verl does not wake its caches.
            WeightSyncError: What :class:`weightsync.Trainer` raises.
        """
        if not await _in_thread(self._agree):
            return False
        calls = self._replica.calls if self._replica.leads else None
        with OnFailure(self._replica.forget):
            metrics = await self._actor.send_weights((), step, calls)
        if not self._options.keep_copy:
            await _in_thread(self._actor.leave)
        if metrics:
            say_verified("actor", bool(metrics["checkpoint_engine/installed"]))
            _log.info("weightsync: step %s: %s", step, metrics)
        return True

    def _agree(self) -> bool:
        """Whether all ranks take part; then all have joined."""
        actor, replica, error = self._say()
        about = [json.loads(text) for text in texts_of_ranks(json.dumps([actor, replica, error]))]
        _raise_first(error for *_, error in about)
        actors, replicas = [actor for actor, _, _ in about], [replica for _, replica, _ in about]
        way, reason = backend.choose_way(actors, replicas)
        if way != "direct":
            if self._rank == 0:
                say_why("verl gathers the weights and hands them to vLLM itself", reason)
            self._replica.leave()
            self._actor.leave()
            return False
        arguments = backend.StreamCheckpointEngine.arguments(way, actors, replicas)
        error = ""
        try:
            self._actor.init_process_group(self._rank, self._world_size, **arguments)
            self._replica.join(self._actor.meeting, self._options, arguments["joined"])
        except Exception as failure:  # noqa: BLE001 - raised on all ranks
            error = f"{type(failure).__name__}: {failure}"
        _raise_first(texts_of_ranks(error))
        return True

    def _say(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        """What the other ranks must know of this actor rank and of its part of a replica, or its error."""
        try:
            actor = self._actor.prepare()
            return actor, {**{name: actor[name] for name in ("name", "host")}, **self._replica.about()}, ""
        except Exception as failure:  # noqa: BLE001 - raised on all ranks
            return {}, {}, f"{type(failure).__name__}: {failure}"


def _raise_first(errors: Any) -> None:  # noqa: ANN401 - texts
    first = next(filter(None, errors), "")
    if first:
        raise RoundFailed(f"the update did not begin, because an actor rank failed: {first}")
