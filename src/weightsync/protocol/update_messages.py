"""Messages of an updated server to its engine ranks, beside Pause, Commit, Resume and Quarantine. Coordinators send none."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.model.manifest import TensorSpec

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Few = msgspec.Meta(max_length=64)
_Many = msgspec.Meta(max_length=1 << 20)


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: immutable, tagged with the class name, strict."""


class Describe(Message, frozen=True):
    """Report which tensors this rank takes. Answered by :class:`Described`."""


class Described(Message, frozen=True):
    """Main and draft tensors together, and the backends of process groups."""

    tensors: Annotated[tuple[TensorSpec, ...], _Many]
    backends: Annotated[tuple[_Name, ...], _Few]


class JoinGroup(Message, frozen=True):
    """Join a process group as rank ``rank_offset`` plus this rank's own number. Answered by :class:`Done`."""

    name: _Name
    backend: _Name
    address: _Text
    port: int
    rank_offset: int
    world_size: int


class LeaveGroup(Message, frozen=True):
    """Leave a group, if this rank is in one of that name. Answered by :class:`Done`."""

    name: _Name


class Receive(Message, frozen=True):
    """Receive one bucket, tensors of the manifest by index, through a group and load it. Answered by :class:`Done`."""

    group: _Name
    tensors: Annotated[tuple[_Index, ...], _Many]
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
