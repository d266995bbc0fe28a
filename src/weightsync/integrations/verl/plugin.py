"""Register the checkpoint engine ``weightsync`` in a process of verl. Imports the rest of weightsync only where it is used.

verl 0.9 finds this module by the entry point ``weightsync`` in the group ``verl.plugins``. It imports it in every process, whatever
the backend is. verl 0.8 needs its name: ``checkpoint_engine.custom_backend_module=weightsync.integrations.verl.plugin``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

if TYPE_CHECKING:
    from weightsync.integrations.verl.backend import StreamCheckpointEngine

BACKEND = "weightsync"


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
