"""weightsync on a Ray cluster: one manager for the trainer and engine actors of the user.

Ray carries control calls only. Tensors move between shards as without Ray. See ``docs/guides/ray.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.first_use import on_first_use

try:
    import ray as _ray  # noqa: F401 - one check for the whole package
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError("weightsync_ray needs Ray: pip install 'ray>=2.40'", name="ray") from None

if TYPE_CHECKING:
    from weightsync_ray.coordinator_actor import start_coordinator
    from weightsync_ray.manager import Manager

__all__ = ["Manager", "start_coordinator"]


if not TYPE_CHECKING:  # an actor with a coordinator needs no tensor library
    __getattr__ = on_first_use(__name__, {"Manager": "manager", "start_coordinator": "coordinator_actor"})
