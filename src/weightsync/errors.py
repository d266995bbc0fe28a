"""Errors of weightsync, one small tree.

::

    WeightSyncError
    ├── ConfigurationError        a setting or argument is wrong (also a ValueError)
    ├── ManifestMismatch          trainer and engine hold different tensors, shapes or dtypes
    ├── LayoutError               shards have holes, overlap, or lie outside their tensor
    ├── PlanMismatch              two ends hold different plans or layouts
    ├── VersionError              a version number is not above the last one, or ranks disagree about it
    ├── MembershipError           a name or rank is in use, a second trainer joined, or a member is unknown
    ├── AuthenticationError       a token, run key or credential is missing, wrong or revoked
    ├── CoordinatorUnreachable    no coordinator answers at the address
    ├── TransportError            bytes could not be transferred
    │   ├── TransportUnavailable  this transport cannot work here; the message says what to install or change
    │   ├── SharedMemoryTooSmall  shared memory cannot be allocated; the message says how much is needed
    │   ├── ProtocolError         a frame violates the protocol
    │   ├── StaleSource           the publisher no longer holds the requested version or layout
    │   └── PeerLost              the other process disconnected
    │       └── BroadcastBroken   another reader of a broadcast left or stopped; the bytes can be requested again
    ├── LoadError                 the engine's loader raised, or did not consume its tensors
    ├── VerificationError         installed bytes do not match the published digests
    ├── RoundFailed               a round ended without the required replicas
    ├── DeadlineExceeded          a wait reached its deadline (also a TimeoutError)
    └── Aborted                   the operation was aborted, or its round was cancelled

Every message says what happened, to whom (replica, rank, tensor, version), and what to do. An error crosses processes as its class
name and message (:func:`to_wire`, :func:`from_wire`), never as a pickle. Both ends make the text :func:`readable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "Aborted",
    "AuthenticationError",
    "BroadcastBroken",
    "ConfigurationError",
    "CoordinatorUnreachable",
    "DeadlineExceeded",
    "LayoutError",
    "LoadError",
    "ManifestMismatch",
    "MembershipError",
    "PeerLost",
    "PlanMismatch",
    "ProtocolError",
    "RoundFailed",
    "SharedMemoryTooSmall",
    "StaleSource",
    "TransportError",
    "TransportUnavailable",
    "VerificationError",
    "VersionError",
    "WeightSyncError",
]

_LONGEST = 4096
_CUT = " ... (cut)"


class WeightSyncError(Exception):
    """Base of all errors that weightsync raises deliberately."""


class ConfigurationError(WeightSyncError, ValueError):
    """A setting or argument is wrong."""


class ManifestMismatch(WeightSyncError):
    """Trainer and engine hold different tensors, shapes or dtypes."""


class LayoutError(WeightSyncError):
    """Shards have holes, overlap, or lie outside their tensor or memory."""


class PlanMismatch(WeightSyncError):
    """Two ends hold different plans or layouts."""


class VersionError(WeightSyncError):
    """A version number is not above the last one, or ranks disagree about it."""


class MembershipError(WeightSyncError):
    """A replica name or rank is in use, a second trainer joined, or a member is unknown."""


class AuthenticationError(WeightSyncError):
    """A token, run key or credential is missing, wrong or revoked."""


class CoordinatorUnreachable(WeightSyncError):
    """No coordinator answers at the address."""


class TransportError(WeightSyncError):
    """Bytes could not be transferred between two ranks."""


class TransportUnavailable(TransportError):
    """This transport cannot work here."""


class SharedMemoryTooSmall(TransportError):
    """Shared memory cannot be allocated. The message says how much is needed and how to provide it."""


class ProtocolError(TransportError):
    """A frame violates the protocol."""


class StaleSource(TransportError):
    """The publisher no longer holds the requested version or layout."""


class PeerLost(TransportError):
    """The other process disconnected."""


class BroadcastBroken(PeerLost):
    """Another reader of a broadcast left or stopped. The publisher is alive: the bytes can be requested again."""


class LoadError(WeightSyncError):
    """The engine's loader raised, or did not consume its tensors."""


class VerificationError(WeightSyncError):
    """Installed bytes do not match the published digests."""


class RoundFailed(WeightSyncError):
    """A round ended without the replicas that its policy requires."""


class DeadlineExceeded(WeightSyncError, TimeoutError):
    """A wait reached its deadline."""


class Aborted(WeightSyncError):
    """The operation was aborted by its owner, or its round was cancelled."""


def _tree(base: type[WeightSyncError]) -> dict[str, type[WeightSyncError]]:
    tree = {base.__name__: base}
    for child in base.__subclasses__():
        tree |= _tree(child)
    return tree


def in_words(why: str) -> str:
    """What a value must be, from msgspec's message, for people who do not know the names of types."""
    for kind, words in (("int", "a whole number"), ("float", "a number")):
        if (bound := re.match(rf"Expected `{kind}` (>=|<=|>|<) (\S+?)(?:\.0)?$", why)) is not None:
            limit = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}[bound[1]]
            return f"it must be {words} of {limit} {bound[2]}"
        if why.startswith(f"Expected `{kind}"):
            return f"it must be {words}"
    return why


HINT = ". Hint: "
"""Between what happened and what to do, where a message says both. Commands print the latter on a line of its own."""


@contextmanager
def as_load_error(what: str) -> Iterator[None]:
    """Raise what an engine's code raises as a :class:`LoadError` that says ``what`` failed; our own as it is."""
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        raise LoadError(f"{what}: {type(error).__name__}: {error}") from error


def readable(text: str, most: int = _LONGEST) -> str:
    """Make text from another process safe for logs and terminals: at most ``most`` printable characters, later lines indented.

    So the text moves no cursor, and none of its lines can be mistaken for a line of the log.
    """
    shown = text[:most]
    if not shown.isprintable():
        lines = [
            "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)
            for line in shown.split("\n")
        ]
        shown = "\n".join([lines[0], *(line if line.startswith("  ") else f"  {line}" for line in lines[1:])])
    return shown if len(text) <= most and len(shown) <= most else shown[: most - len(_CUT)] + _CUT


def few(items: Iterable[str], most: int = 5, joint: str = ", ", total: int | None = None) -> str:
    """Join the first of ``items`` for a message, and say how many more there are; of ``total``, if not all are given."""
    listed = list(items)
    left = (len(listed) if total is None else total) - most
    return joint.join([*listed[:most], *([f"and {left} more"] if left > 0 else [])])


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return the class name and message that describe ``error`` to another process. Foreign errors become the base class."""
    if isinstance(error, WeightSyncError):
        return type(error).__name__, readable(str(error))
    if isinstance(error, TimeoutError):
        return DeadlineExceeded.__name__, readable(str(error)) or "timed out"
    return WeightSyncError.__name__, readable(f"{type(error).__name__}: {error}")


def from_wire(kind: str, message: str) -> WeightSyncError:
    """Return the error that :func:`to_wire` described. An unknown class becomes the base class, so newer peers stay readable."""
    return _tree(WeightSyncError).get(kind, WeightSyncError)(readable(message))
