"""Which transports may be used on this machine, and by which of them a reader's host reaches a publisher, best first."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import Transport
from weightsync.transports.registry import BUILT_IN, transport

__all__ = ["choose", "transports_for"]


def transports_for(given: Sequence[Transport | str] | None) -> tuple[Transport, ...]:
    """The transports to use, in order: those given, or all built-in ones that work here and share no fate among readers.

    A name stands for the transport with its default settings. Raises :class:`~weightsync.errors.TransportUnavailable` if one that
    was given cannot work here, with what would help, and :class:`~weightsync.errors.ConfigurationError` for an unknown name.
    """
    if given is None:
        every = map(transport, BUILT_IN)
        return tuple(one for one in every if not one.traits.shared_fate and one.unavailable() is None)
    if isinstance(given, str | Transport):
        raise ConfigurationError(f"transports is a list, best first: give [{given!r}], not {given!r}")
    if not given:
        raise ConfigurationError(f"no transport is allowed; choose from {', '.join(BUILT_IN)}")
    wanted = tuple(transport(one) if isinstance(one, str) else one for one in given)
    for one in wanted:
        reason = one.unavailable()
        if reason is not None:
            raise TransportUnavailable(f"transport {one.name!r} cannot be used on this machine: {reason}")
    if len({one.name for one in wanted}) != len(wanted):
        raise ConfigurationError(f"a transport is given twice: {', '.join(one.name for one in wanted)}")
    return wanted


def choose(offers: Sequence[Offer], allowed: Sequence[Transport], here: Host) -> list[tuple[Transport, Offer]]:
    """The offers that a reader on ``here`` can use, each with its transport, fastest first; the caller tries them in that order.

    A transport of a third party comes before the built-in ones, in the publisher's order: somebody who installs one wants it.
    Raises :class:`~weightsync.errors.TransportUnavailable` with each offer and why it does not reach.
    """
    order = {name: place for place, name in enumerate(BUILT_IN)}
    by_name = {one.name: one for one in allowed}
    usable: list[tuple[Transport, Offer]] = []
    reasons: list[str] = []
    for offer in offers:
        found = by_name.get(offer.scheme)
        reason = f"not among the allowed transports ({', '.join(by_name)})" if found is None else found.unavailable()
        if found is not None and reason is None:
            if found.reaches(offer, here):
                usable.append((found, offer))
                continue
            reason = "does not reach that far"
        reasons.append(f"{offer.scheme} on {offer.host.name}: {reason}")
    if not usable:
        listed = "\n  ".join(reasons) or "the trainer rank offers none"
        raise TransportUnavailable(f"no transport reaches the trainer rank from {here.name}:\n  {listed}")
    return sorted(usable, key=lambda pair: order.get(pair[1].scheme, -1))
