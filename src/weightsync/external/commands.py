"""Commands of an updated server to its engine ranks, and their answers: bytes, which any engine's executor can carry.

Every command of an update has its number, ``update``, which the server draws at random when the update begins. A rank obeys only
the commands of the update that it was last paused for, so a late command does nothing.
"""

from __future__ import annotations

import msgspec

from weightsync.errors import WeightSyncError, from_wire
from weightsync.external.checks import Incoming
from weightsync.model import PauseMode, TensorSpec, Version
from weightsync.protocol.messages import decoding

__all__ = [
    "Command",
    "CommandAnswer",
    "CommandDone",
    "CommandFailed",
    "Describe",
    "Described",
    "Digested",
    "Finish",
    "JoinGroup",
    "LeaveGroup",
    "PauseRank",
    "QuarantineRank",
    "Receive",
    "ResumeRank",
    "Step",
    "Verify",
    "decode_answer",
    "decode_command",
    "encode",
]

SECONDS = 300.0
"""Default timeout of a command, in seconds."""


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Say which tensors you take and which backends you have."""


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Join a group as rank ``rank_offset`` plus your own rank."""

    name: str
    backend: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    timeout: float


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """Leave a group; nothing happens if you are in none of that name."""

    name: str


class PauseRank(msgspec.Struct, frozen=True, tag=True):
    """Stop generating, wake the weights, and from now on obey orders of this update only."""

    mode: PauseMode
    timeout: float
    update: int = 0


class QuarantineRank(msgspec.Struct, frozen=True, tag=True):
    """Stop generating, and obey no order of this update or an earlier one until the next pause."""

    timeout: float
    update: int = 0


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Receive one bucket through a group and load it."""

    group: str
    tensors: tuple[Incoming, ...]
    flattened: bool
    timeout: float
    update: int = 0


class Verify(msgspec.Struct, frozen=True, tag=True):
    """Take no more buckets, and report the digests."""

    update: int = 0
    timeout: float = SECONDS


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Finalize, reset captured graphs, take the label, drop caches."""

    version: Version
    update: int = 0
    timeout: float = SECONDS


class ResumeRank(msgspec.Struct, frozen=True, tag=True):
    """Generate again."""

    update: int = 0
    timeout: float = SECONDS


Step = PauseRank | QuarantineRank | Receive | Verify | Finish | ResumeRank
"""What belongs to an update."""
Command = Describe | JoinGroup | LeaveGroup | Step


class Described(msgspec.Struct, frozen=True, tag=True):
    """Main and draft tensors together."""

    tensors: tuple[TensorSpec, ...]
    backends: tuple[str, ...]


class Digested(msgspec.Struct, frozen=True, tag=True):
    """One digest for each tensor of the manifest, ``<u8``; zero for what is not known.

    Known are the tensors that were received, and, if ``installed``, all others that can be read back.
    """

    digests: bytes
    installed: bool
    """Whether they are of the parameters themselves, not of what the loader was given."""


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The command succeeded. ``nbytes`` is the number of bytes received."""

    nbytes: int = 0


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """The command failed. Fields as in :func:`weightsync.errors.to_wire`."""

    kind: str
    message: str

    def error(self) -> WeightSyncError:
        """Return it as an exception."""
        return from_wire(self.kind, self.message)


CommandAnswer = Described | Digested | CommandDone | CommandFailed

_commands = msgspec.msgpack.Decoder(Command)
_answers = msgspec.msgpack.Decoder(CommandAnswer)


def encode(body: Command | CommandAnswer) -> bytes:
    """Encode as MessagePack."""
    return msgspec.msgpack.encode(body)


def decode_command(data: bytes) -> Command:
    """The order in ``data``. Raises :class:`~weightsync.errors.ProtocolError`."""
    with decoding("not an order"):
        order: Command = _commands.decode(data)
    return order


def decode_answer(data: bytes) -> CommandAnswer:
    """The answer in ``data``. Raises :class:`~weightsync.errors.ProtocolError`."""
    with decoding("not an answer"):
        answer: CommandAnswer = _answers.decode(data)
    return answer
