"""Everything that weightsync raises, one small tree.

::

    WeightSyncError
    ├── ConfigurationError        a setting or argument is wrong (also a ValueError)
    ├── ManifestMismatch          trainer and engine do not name the same tensors
    ├── LayoutError               shards with holes, overlaps, or outside their tensor
    ├── PlanMismatch              two ends hold different plans or layouts
    ├── VersionError              a version published twice, or backwards
    ├── MembershipError           a name or rank in use, a second trainer, an unknown member
    ├── AuthenticationError       a wrong or missing token or run key
    ├── CoordinatorUnreachable    nobody answers at the coordinator's address
    ├── TransportError            bytes could not cross
    │   ├── TransportUnavailable  this scheme cannot work here; the message says what to install or change
    │   ├── SharedMemoryTooSmall  the shared-memory area cannot be had; the message says how much is needed
    │   ├── ProtocolError         a frame that is not what the contract says
    │   ├── StaleSource           the owner no longer holds the version or layout that was asked for
    │   └── PeerLost              the other process went away
    ├── LoadError                 the engine's own loader raised, or took nothing
    ├── VerificationError         installed bytes do not add up to the published digests
    ├── RoundFailed               a round ended without the required replicas
    ├── DeadlineExceeded          a wait ended (also a TimeoutError)
    └── Aborted                   somebody called abort, or the round was cancelled

Every message says what happened, to whom (replica, rank, tensor, version), and what to do. An error crosses processes as its
class name and message (:func:`to_wire`, :func:`from_wire`): never as a pickle. The text is :func:`readable` at both ends.
"""

from __future__ import annotations

__all__ = [
    "Aborted",
    "AuthenticationError",
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
    "from_wire",
    "readable",
    "to_wire",
]

_LONGEST = 4096
_CUT = " ... (cut)"


class WeightSyncError(Exception):
    """Base of all errors that weightsync raises on purpose."""


class ConfigurationError(WeightSyncError, ValueError):
    """A setting or argument is wrong."""


class ManifestMismatch(WeightSyncError):
    """Trainer and engine do not name the same tensors, shapes and dtypes."""


class LayoutError(WeightSyncError):
    """Shards have holes, overlap, or lie outside their tensor or memory."""


class PlanMismatch(WeightSyncError):
    """Two ends hold different plans or layouts."""


class VersionError(WeightSyncError):
    """A version was published twice, or backwards."""


class MembershipError(WeightSyncError):
    """A replica name or rank is in use, a second trainer joined, or a member is unknown."""


class AuthenticationError(WeightSyncError):
    """A token or run key is missing or wrong."""


class CoordinatorUnreachable(WeightSyncError):
    """Nobody answers at the coordinator's address."""


class TransportError(WeightSyncError):
    """Bytes could not cross between two ranks."""


class TransportUnavailable(TransportError):
    """This scheme cannot work here."""


class SharedMemoryTooSmall(TransportError):
    """The shared-memory area cannot be had; the message says how much is needed and how to get it."""


class ProtocolError(TransportError):
    """A frame is not what the contract says."""


class StaleSource(TransportError):
    """The owner no longer holds the version or layout that was asked for."""


class PeerLost(TransportError):
    """The other process went away."""


class LoadError(WeightSyncError):
    """The engine's own loader raised, or silently took nothing."""


class VerificationError(WeightSyncError):
    """Installed bytes do not add up to the published digests."""


class RoundFailed(WeightSyncError):
    """A round ended without the replicas that its policy requires."""


class DeadlineExceeded(WeightSyncError, TimeoutError):
    """A wait reached its deadline."""


class Aborted(WeightSyncError):
    """The operation was aborted by its owner or because its round was cancelled."""


def _tree(base: type[WeightSyncError]) -> dict[str, type[WeightSyncError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found |= _tree(child)
    return found


def readable(text: str, most: int = _LONGEST) -> str:
    """Text of somebody else, fit for a log or a terminal: at most ``most`` characters, all printable, and later lines are indented.

    So it moves no cursor, and no line of it can be taken for a line of the log.
    """
    shown = text[:most]
    if not shown.isprintable():
        lines = ["".join(one if one.isprintable() else repr(one)[1:-1] for one in line) for line in shown.split("\n")]
        shown = "\n".join([lines[0], *(line if line.startswith("  ") else f"  {line}" for line in lines[1:])])
    return shown if len(text) <= most and len(shown) <= most else shown[: most - len(_CUT)] + _CUT


def to_wire(error: BaseException) -> tuple[str, str]:
    """The class name and message under which ``error`` crosses a process; foreign errors keep their type's name in the text."""
    if isinstance(error, WeightSyncError):
        return type(error).__name__, readable(str(error))
    if isinstance(error, TimeoutError):
        return DeadlineExceeded.__name__, readable(str(error)) or "timed out"
    return WeightSyncError.__name__, readable(f"{type(error).__name__}: {error}")


def from_wire(kind: str, message: str) -> WeightSyncError:
    """The error that :func:`to_wire` described; an unknown kind becomes the base class, so a newer peer is still readable."""
    return _tree(WeightSyncError).get(kind, WeightSyncError)(readable(message))
