"""Messages of an updated server to its engine ranks, beside Pause, Commit, Resume and Quarantine. Coordinators send none."""

from __future__ import annotations

from typing import Annotated

from weightsync.model.manifest import TensorSpec
from weightsync.protocol.fields import Few, Many, Message, Name, Number, Text


class Describe(Message, frozen=True):
    """Report which tensors this rank takes. Answered by :class:`Described`."""


class Described(Message, frozen=True):
    """Main and draft tensors together, and the backends of process groups."""

    tensors: Annotated[tuple[TensorSpec, ...], Many]
    backends: Annotated[tuple[Name, ...], Few]


class JoinGroup(Message, frozen=True):
    """Join a process group as rank ``rank_offset`` plus this rank's own number. Answered by :class:`Done`."""

    name: Name
    backend: Name
    address: Text
    port: int
    rank_offset: int
    world_size: int


class LeaveGroup(Message, frozen=True):
    """Leave a group, if this rank is in one of that name. Answered by :class:`Done`."""

    name: Name


class Receive(Message, frozen=True):
    """Receive one bucket, tensors of the manifest by index, through a group and load it. Answered by :class:`Done`."""

    group: Name
    tensors: Annotated[tuple[Number, ...], Many]
    flattened: bool = False


class Verify(Message, frozen=True):
    """Take no more buckets, and report the digests. Answered by :class:`Digested`."""


class Digested(Message, frozen=True):
    """Digest of each tensor of the manifest (uint64, little-endian); zero if it is not known.

    Known are the tensors that were received, and, if ``installed``, all others that can be read back.
    """

    digests: bytes
    installed: bool
    """Whether they are of the parameters themselves, not of what the loader was given."""


UpdateMessage = Describe | Described | JoinGroup | LeaveGroup | Receive | Verify | Digested
