"""Transports by name, and the choice of them for a machine and for an offer.

Each is imported when it is first asked for; third parties add theirs.

A package of a third party declares in its ``pyproject.toml``, with a class that derives from
:class:`weightsync.transports.base.Transport`::

    [project.entry-points."weightsync.transports"]
    mine = "my_package.transport:Mine"

``weightsync-nixl``, in this repository, adds its transport that way too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from weightsync.distributions import how_to_install
from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import Transport

BUILT_IN: dict[str, str] = {
    "inproc": "weightsync.transports.host.inproc:InProcess",
    "cuda_ipc": "weightsync.transports.cuda.ipc:CudaIpc",
    "nccl": "weightsync.transports.broadcast.nccl:Nccl",
    "shared_memory": "weightsync.transports.host.shared_memory:SharedMemory",
    "tcp": "weightsync.transports.tcp.transport:Tcp",
    "collective": "weightsync.transports.broadcast.collective:Collective",
    "store": "weightsync.transports.store:Store",
}
"""Name to where its class is; fastest first."""
FROM_HOST_MEMORY = ("shared_memory", "tcp")
"""What reaches every engine from a copy in host memory: those of the trainer's host, and all others."""

_log = logging.getLogger(__name__)
_GROUP = "weightsync.transports"
_PACKAGES = {"nixl": "weightsync_nixl"}
"""Packages of this repository, by the transport that they add."""


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
    if where is None and name in _PACKAGES:
        raise TransportUnavailable(f"transport {name!r} is not installed: {how_to_install(_PACKAGES[name])}")
    if where is None:
        raise ConfigurationError(f"there is no transport {name!r}; known are {', '.join(known())}")
    module, _, attribute = where.partition(":")
    try:
        made: Transport = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise TransportUnavailable(f"transport {name!r} cannot be used: {error}") from error
    return made


def _automatic() -> tuple[Transport, ...]:
    """Make the transports that may be used without being named, in order: the built-in ones, and each that says its place."""
    every = [transport(name) for name in BUILT_IN]
    for name in sorted(set(_third_parties()) - set(BUILT_IN)):
        try:
            every.append(transport(name))
        except Exception as error:  # noqa: BLE001 - a package that is broken must not stop a run that does not name it
            _log.warning("transport %r is left out: %s", name, error)
    return tuple(sorted((candidate for candidate in every if _place(candidate) > -1), key=_place))


def _place(candidate: Transport) -> float:
    """Its place among the built-in ones; -1 if it is a third party's that says none."""
    order = tuple(BUILT_IN)
    if candidate.name in order:
        return order.index(candidate.name)
    return order.index(candidate.before) - 0.5 if candidate.before in order else -1


def transports_for(given: Sequence[Transport | str] | None, encrypted: bool = False) -> tuple[Transport, ...]:
    """The transports to use, in order: those given, or all that work here and need not be named.

    With ``encrypted``, those that cannot encrypt on a network must be named. A name stands for the transport with its default
    settings. Raises :class:`~weightsync.errors.TransportUnavailable` if one that was given cannot work here, with what would
    help, and :class:`~weightsync.errors.ConfigurationError` for an unknown name.
    """
    if given is None:
        return tuple(
            transport
            for transport in _automatic()
            if transport.automatic()
            and (transport.traits.encrypted or transport.traits.reach != "network" or not encrypted)
            and transport.unavailable() is None
        )
    if isinstance(given, str | Transport):
        raise ConfigurationError(f"transports is a list, best first: give [{given!r}], not {given!r}")
    if not given:
        raise ConfigurationError(f"no transport is allowed; choose from {', '.join(known())}")
    wanted = tuple(transport(one) if isinstance(one, str) else one for one in given)
    for given_transport in wanted:
        reason = given_transport.unavailable()
        if reason is not None:
            raise TransportUnavailable(f"transport {given_transport.name!r} cannot be used on this machine: {reason}")
    if len({transport.name for transport in wanted}) != len(wanted):
        raise ConfigurationError(f"a transport is given twice: {', '.join(transport.name for transport in wanted)}")
    return wanted


def choose(offers: Sequence[Offer], allowed: Sequence[Transport], local_host: Host) -> list[tuple[Transport, Offer]]:
    """The offers that a reader on ``local_host`` can use, each with its transport, in the order in which to try them.

    A transport of a third party comes before the built-in ones, in the publisher's order, unless it says its place.
    Raises :class:`~weightsync.errors.TransportUnavailable` with each offer and why it does not reach.
    """
    by_name = {allowed_transport.name: allowed_transport for allowed_transport in allowed}
    usable: list[tuple[Transport, Offer]] = []
    reasons: list[str] = []
    for offer in offers:
        known = by_name.get(offer.scheme)
        reason = f"not among the allowed transports ({', '.join(by_name)})" if known is None else known.unavailable()
        if known is not None and reason is None:
            if known.reaches(offer, local_host):
                usable.append((known, offer))
                continue
            reason = "does not reach that far"
        reasons.append(f"{offer.scheme} on {offer.host.name}: {reason}")
    if not usable:
        listed = "\n  ".join(reasons) or "the source offers none"
        raise TransportUnavailable(f"no transport reaches the source from {local_host.name}:\n  {listed}")
    return sorted(usable, key=lambda pair: _place(pair[0]))
