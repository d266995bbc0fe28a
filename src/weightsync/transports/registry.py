"""Transports by name. Each is imported when it is first asked for; third parties add theirs.

A package of a third party declares in its ``pyproject.toml``, with a class that derives from
:class:`weightsync.transports.base.Transport`::

    [project.entry-points."weightsync.transports"]
    mine = "my_package.transport:Mine"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.transports.base import Transport

__all__ = ["BUILT_IN", "FROM_HOST_MEMORY", "known", "transport"]

BUILT_IN: dict[str, str] = {
    "inproc": "weightsync.transports.host.inproc:InProcess",
    "cuda_ipc": "weightsync.transports.cuda.ipc:CudaIpc",
    "nccl": "weightsync.transports.broadcast.nccl:Nccl",
    "shared_memory": "weightsync.transports.host.shared_memory:SharedMemory",
    "nixl": "weightsync.transports.nixl.transport:Nixl",
    "tcp": "weightsync.transports.tcp.transport:Tcp",
    "collective": "weightsync.transports.broadcast.collective:Collective",
}
"""Name to where its class is; fastest first."""
FROM_HOST_MEMORY = ("shared_memory", "tcp")
"""What reaches every engine from a copy in host memory: those of the trainer's host, and all others."""

_GROUP = "weightsync.transports"


def _third_parties() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=_GROUP)}


def known() -> tuple[str, ...]:
    """Names of all transports that can be asked for: the built-in ones fastest first, then those of third parties by name."""
    return tuple(dict.fromkeys([*BUILT_IN, *sorted(_third_parties())]))


def transport(name: str) -> Transport:
    """Make the transport of this name, with default settings.

    Raises :class:`~weightsync.errors.ConfigurationError` for an unknown name, and
    :class:`~weightsync.errors.TransportUnavailable` if its code cannot be imported.
    """
    where = BUILT_IN.get(name) or _third_parties().get(name)
    if where is None:
        raise ConfigurationError(f"there is no transport {name!r}; known are {', '.join(known())}")
    module, _, attribute = where.partition(":")
    try:
        made: Transport = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise TransportUnavailable(f"transport {name!r} cannot be used: {error}") from error
    return made
