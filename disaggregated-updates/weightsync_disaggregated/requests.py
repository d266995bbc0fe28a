"""What the routes of a disaggregated update take and answer: LMDeploy's and SGLang's bodies, and the fields that theirs lack."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.model import PauseMode
from weightsync.protocol.update_messages import JoinGroup, Receive

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
GroupName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Label = Annotated[str, msgspec.Meta(max_length=256)]

Names = Annotated[list[Name], msgspec.Meta(max_length=1 << 20)]
Dtypes = Annotated[list[Annotated[str, msgspec.Meta(max_length=32)]], msgspec.Meta(max_length=1 << 20)]
Shapes = Annotated[list[Annotated[list[Extent], msgspec.Meta(max_length=16)]], msgspec.Meta(max_length=1 << 20)]

DEFAULT_GROUP = "weight_update_group"


class InitGroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /init_weights_update_group``: join the trainer's group. The trainer is rank 0, engine ranks follow at the offset."""

    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]
    group_name: GroupName = DEFAULT_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout: Seconds | None = None
    """Seconds until all ranks must be there. Ours; the server's own limit if not given, and never more than that."""

    def message(self) -> JoinGroup:
        """Return the message to the engine ranks."""
        place = self.master_address, self.master_port
        return JoinGroup(self.group_name, self.backend, *place, self.rank_offset, self.world_size)


class Tensors(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that an update or one of its buckets brings."""

    names: Names
    dtypes: Dtypes
    shapes: Shapes


class UpdateRequest(Tensors, frozen=True, kw_only=True):
    """``POST /update_weights_from_distributed``: one bucket, which the trainer broadcasts. Answered when it is loaded."""

    group_name: GroupName = DEFAULT_GROUP
    load_format: Literal["flattened_bucket"] | None = None
    finished: bool = False
    """LMDeploy: this was the last bucket. With no names it only finalizes."""
    weight_version: Label | None = None
    """SGLang: the version's label."""
    digest: Digest | None = None
    """Ours, with ``finished``: what all tensors must fold to."""
    digests: dict[Name, Digest] | None = None
    """Ours, with ``finished``: the digest of each tensor."""
    timeout: Seconds | None = None

    def message(self, tensors: tuple[int, ...]) -> Receive:
        """Return the message to the engine ranks, for the tensors of this bucket as indices of the manifest."""
        return Receive(self.group_name, tensors, self.load_format is not None)


class DestroyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /destroy_weights_update_group``."""

    group_name: GroupName = DEFAULT_GROUP


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /check_weight_update``: whether an update of these tensors would be taken. Changes nothing, pauses nothing."""

    tensors: Tensors
    weight_version: Label | None = None
    partial: bool = False


class BeginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /begin_weight_update``: pause the engine and start an update. It ends with commit, end, abort or timeout."""

    weight_version: Label | None = None
    manifest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")] | None = None
    """Fingerprint of the sender's manifest; another than the engine's is refused before anything is paused."""
    tensors: Tensors | None = None
    """Everything that will be sent; what the engine could not take, or what is missing, is refused before anything is paused."""
    mode: PauseMode | None = None
    partial: bool = False
    """Whether the commit may leave tensors as they were. Refused for an engine whose last update failed."""
    timeout: Seconds | None = None
    """Seconds for the whole update."""


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /commit_weight_update``: verify, finalize, flush, label, resume."""

    weight_version: Label | None = None
    digest: Digest | None = None
    digests: dict[Name, Digest] | None = None


class EndRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /end_weight_update``: SGLang's end: a commit with what is known, or the end of an update that failed."""


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /abort_weight_update``: give up; the engine stays paused until an update is committed."""


class Reply(msgspec.Struct, frozen=True):
    """Every answer: 200 with ``success``, 400 without, 401 for a wrong token, 413 for too large a body."""

    success: bool
    message: str


class UpdateState(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /weight_update``: where the engine stands."""

    state: Literal["serving", "updating", "dirty"]
    """``dirty``: paused, after an update that failed, until one is committed."""
    weight_version: str | None
    digest: str | None
    """What all tensors of that version fold to, those that a partial update did not send included."""
    manifest: str
    tensors: int
    received: int
    """Tensors of the update that runs."""
    groups: tuple[str, ...]
    error: str | None
    """Why it is dirty."""
