"""Bodies of requests to join a group and to receive a bucket: LMDeploy's and SGLang's, and the fields that theirs lack."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.old_names import moved_names
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


moved_names(
    __name__, "weightsync_disaggregated.server_requests",
    *("AbortRequest", "BeginRequest", "CheckRequest", "CommitRequest", "DestroyRequest", "EndRequest", "Reply", "UpdateState"),
)  # fmt: skip
