"""Transports by the name of their scheme. Each is imported when it is first asked for; third parties add theirs.

A package of a third party declares in its ``pyproject.toml``, with a class that has the methods of
:class:`weightsync.transports.base.Transport`::

    [project.entry-points."weightsync.transports"]
    mine = "my_package.transport:Mine"
"""

from __future__ import annotations

import threading
from importlib import import_module
from importlib.metadata import entry_points

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.transports.base import Transport

__all__ = ["BUILT_IN", "OPT_IN", "known", "register", "scheme"]

BUILT_IN: dict[str, tuple[str, str]] = {
    "inproc": ("weightsync.transports.host.inproc:InProcess", ""),
    "cuda_ipc": ("weightsync.transports.cuda.ipc:CudaIpc", ""),
    "nccl": ("weightsync.transports.broadcast.nccl:Nccl", ""),
    "shared_memory": ("weightsync.transports.host.shared_memory:SharedMemory", ""),
    "tcp": ("weightsync.transports.tcp.transport:Tcp", ""),
    "collective": ("weightsync.transports.broadcast.gloo:Collective", ""),
}
"""Name to where its class is, and what to install if that cannot be imported; fastest first."""

OPT_IN = frozenset({"collective", "nccl"})
"""Built-in schemes that are used only where they are named: one reader's fate there depends on the others'."""

_GROUP = "weightsync.transports"
_made: dict[str, Transport] = {}
_lock = threading.Lock()


def _third_parties() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=_GROUP)}


def known() -> tuple[str, ...]:
    """Names of all schemes that can be asked for: the built-in ones fastest first, then those of third parties by name."""
    return tuple(dict.fromkeys([*BUILT_IN, *_made, *sorted(_third_parties())]))


def register(scheme: Transport) -> None:
    """Use ``scheme``, an object made with settings of your own (an address to bind, say), for its name in this process."""
    with _lock:
        _made[scheme.name] = scheme


def scheme(name: str) -> Transport:
    """The scheme of this name, with default settings unless :func:`register` gave another.

    Raises :class:`~weightsync.errors.ConfigurationError` for an unknown name, and
    :class:`~weightsync.errors.TransportUnavailable` with what to install if its code cannot be imported.
    """
    with _lock:
        if name in _made:
            return _made[name]
    where, hint = BUILT_IN.get(name) or (_third_parties().get(name), "")
    if where is None:
        raise ConfigurationError(f"there is no transport {name!r}; known are {', '.join(known())}")
    module, _, attribute = where.partition(":")
    try:
        found: Transport = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        advice = f"; install it with: {hint}" if hint else ""
        raise TransportUnavailable(f"transport {name!r} cannot be used: {error}{advice}") from error
    with _lock:
        return _made.setdefault(name, found)
