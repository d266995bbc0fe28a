"""Which way to take from a reader's host to an owner, best first."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors import ConfigurationError, TransportUnavailable
from weightsync.messages import Host, Offer
from weightsync.transports.registry import BUILT_IN, scheme

__all__ = ["choose"]


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
