"""Which transports may be used on this machine, and which way to take from a reader's host to an owner, best first."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.protocol.messages import Host, Offer
from weightsync.transports.base import Transport
from weightsync.transports.registry import BUILT_IN, OPT_IN, scheme

__all__ = ["choose", "schemes_for"]


def schemes_for(names: Sequence[str] | None) -> list[Transport]:
    """The transports to use, in order: those named, or all built-in ones that work here and need not be named.

    Raises :class:`~weightsync.errors.TransportUnavailable` if one that was named cannot work here, with what would help.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"transports is a list of names, best first: give [{names!r}], not {names!r}")
    if names is None:
        return [found for found in map(scheme, (name for name in BUILT_IN if name not in OPT_IN)) if found.unavailable() is None]
    if not names:
        raise ConfigurationError(f"no transport is allowed; choose from {', '.join(BUILT_IN)}")
    wanted = [scheme(name) for name in names]
    for found in wanted:
        reason = found.unavailable()
        if reason is not None:
            raise TransportUnavailable(f"transport {found.name!r} cannot be used on this machine: {reason}")
    return wanted


def choose(offers: Sequence[Offer], allowed: Sequence[str] | None, here: Host) -> list[Offer]:
    """The offers that a reader on ``here`` can use, fastest first; the caller tries them in that order.

    ``allowed`` names the schemes that may be used, ``None`` all. A scheme of a third party comes before the built-in ones, in
    the owner's order: somebody who installs one wants it. Raises :class:`~weightsync.errors.TransportUnavailable` with each
    offer and why it does not reach.
    """
    order = {name: place for place, name in enumerate(BUILT_IN)}
    usable: list[Offer] = []
    reasons: list[str] = []
    for offer in offers:
        reason = _obstacle(offer, allowed, here)
        if reason is None:
            usable.append(offer)
        else:
            reasons.append(f"{offer.scheme} on {offer.host.name}: {reason}")
    if not usable:
        listed = "\n  ".join(reasons) or "the trainer rank offers none"
        raise TransportUnavailable(f"no transport reaches the trainer rank from {here.name}:\n  {listed}")
    return sorted(usable, key=lambda offer: order.get(offer.scheme, -1))


def _obstacle(offer: Offer, allowed: Sequence[str] | None, here: Host) -> str | None:
    if allowed is not None and offer.scheme not in allowed:
        return f"not among the allowed transports ({', '.join(allowed)})"
    try:
        found = scheme(offer.scheme)
    except (ConfigurationError, TransportUnavailable) as error:
        return str(error)
    return found.unavailable() or (None if found.reaches(offer, here) else "does not reach that far")
