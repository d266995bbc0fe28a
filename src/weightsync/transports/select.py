"""Which transports may be used on this machine, and by which of them a reader's host reaches a publisher, best first."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import Transport
from weightsync.transports.registry import BUILT_IN, transport

__all__ = ["choose", "transports_for"]


def transports_for(given: Sequence[Transport | str] | None, encrypted: bool = False) -> tuple[Transport, ...]:
    """The transports to use, in order: those given, or all built-in ones that work here and need not be named.

    With ``encrypted``, those that cannot encrypt on a network must be named. A name stands for the transport with its default
    settings. Raises :class:`~weightsync.errors.TransportUnavailable` if one that was given cannot work here, with what would
    help, and :class:`~weightsync.errors.ConfigurationError` for an unknown name.
    """
    if given is None:
        every = map(transport, BUILT_IN)
        return tuple(
            transport
            for transport in every
            if transport.automatic()
            and (transport.traits.encrypted or transport.traits.reach != "network" or not encrypted)
            and transport.unavailable() is None
        )
    if isinstance(given, str | Transport):
        raise ConfigurationError(f"transports is a list, best first: give [{given!r}], not {given!r}")
    if not given:
        raise ConfigurationError(f"no transport is allowed; choose from {', '.join(BUILT_IN)}")
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

    A transport of a third party comes before the built-in ones, in the publisher's order: somebody who installs one wants it.
    Raises :class:`~weightsync.errors.TransportUnavailable` with each offer and why it does not reach.
    """
    order = {name: place for place, name in enumerate(BUILT_IN)}
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
    return sorted(usable, key=lambda pair: order.get(pair[1].scheme, -1))
