"""Bodies of requests that the routes of several engines have in common. Needs no tensor library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import ConfigurationError
from weightsync.external.clients.http import HttpCall
from weightsync.model import TensorSpec

if TYPE_CHECKING:
    from weightsync.transports.broadcast.process_groups import Backend


class GroupSpec(NamedTuple):
    """A process group that the engine shall join: the trainer is rank 0, the engine's ranks follow from ``rank_offset``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Backend


def init_group(request: GroupSpec, timeout: float | None = None) -> HttpCall:
    """Join a group, as LMDeploy and SGLang have it. Only weightsync's own routes take a ``timeout`` in seconds."""
    return HttpCall("POST", "/init_weights_update_group", request._asdict() | ({} if timeout is None else {"timeout": timeout}))


def destroy_group(name: str) -> HttpCall:
    """Leave a group, as LMDeploy, SGLang and weightsync's own routes have it."""
    return HttpCall("POST", "/destroy_weights_update_group", {"group_name": name})


def bucket_body(specs: Sequence[TensorSpec], group: str, *, flattened: bool = True) -> dict[str, Any]:
    """What LMDeploy's and SGLang's ``update_weights_from_distributed`` have in common.

    A flattened bucket is one broadcast and has one dtype: only then do both engines mean the same bytes by it. Otherwise each
    tensor is broadcast separately. Raises :class:`~weightsync.errors.ConfigurationError` for several dtypes in a flattened one.
    """
    dtypes = {spec.dtype for spec in specs}
    if flattened and len(dtypes) > 1:
        raise ConfigurationError(f"a flattened bucket holds one dtype, not {', '.join(sorted(dtypes))}")
    return tensors_body(specs) | {"group_name": group, "load_format": "flattened_bucket" if flattened else None}


def tensors_body(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """Names, dtypes and shapes, as all these routes have them."""
    specs = list(specs)
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }
