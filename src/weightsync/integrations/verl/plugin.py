"""Register weightsync in a process of verl. Imports the rest of weightsync only where it is used.

The checkpoint engine ``weightsync`` is one of verl's backends. verl's adapter for vLLM is made by :func:`vllm_adapter`.

verl 0.9 finds this module by the entry point ``weightsync`` in the group ``verl.plugins``. It imports it in every process, whatever
the backend is. verl 0.8 needs its name: ``checkpoint_engine.custom_backend_module=weightsync.integrations.verl.plugin``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import base as rollouts

if TYPE_CHECKING:
    from weightsync.integrations.verl.backend import StreamCheckpointEngine

BACKEND = "weightsync"
_VLLM = ("vllm", "async")
_VERLS: dict[tuple[str, str], str] = getattr(rollouts, "_ROLLOUT_REGISTRY", {})
_verls_adapter = _VERLS.get(_VLLM)


@CheckpointEngineRegistry.register(BACKEND)
class LazyCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Stands for :class:`~weightsync.integrations.verl.backend.StreamCheckpointEngine` until verl makes one."""

    def __new__(cls, *args: Any, **options: Any) -> StreamCheckpointEngine:  # noqa: ANN401 - verl's
        """Make the checkpoint engine of a rank."""
        from weightsync.integrations.verl.backend import StreamCheckpointEngine

        return StreamCheckpointEngine(*args, **options)

    @classmethod
    def build_topology(cls, *args: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:  # noqa: ANN401 - verl's
        """Return each rank's coordinator address and member name, in verl's driver."""
        from weightsync.integrations.verl.backend import StreamCheckpointEngine

        return StreamCheckpointEngine.build_topology(*args)


def is_chosen(checkpoint_engine: Any) -> bool:  # noqa: ANN401 - verl's configuration
    """Whether the user chose weightsync: as the backend or, for colocated rollouts of any backend, by options for it."""
    return checkpoint_engine.backend == BACKEND or BACKEND in (checkpoint_engine.engine_kwargs or {})


def vllm_adapter(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - verl's
    """Make what verl calls to update a vLLM: weightsync's adapter, or verl's own where weightsync was not chosen."""
    if is_chosen(kwargs["config"].checkpoint_engine):
        from weightsync.integrations.verl.vllm_adapter import VllmAdapter

        return VllmAdapter(*args, **kwargs)
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    return ServerAdapter(*args, **kwargs)


# verl 0.8 passes other arguments, and other plugins may have put their own adapter there.
_KNOWN = "verl.workers.rollout.vllm_rollout.ServerAdapter"
if _verls_adapter == _KNOWN and "wire_format" in inspect.signature(rollouts.BaseRollout.update_weights).parameters:
    _VERLS[_VLLM] = f"{__name__}.{vllm_adapter.__name__}"
