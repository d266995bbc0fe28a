"""What the routes of a disaggregated update take and answer besides the bodies that engine ranks read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.external.requests import DEFAULT_GROUP, Digest, GroupName, Label, Name, Seconds, Tensors
from weightsync.model import PauseMode


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
