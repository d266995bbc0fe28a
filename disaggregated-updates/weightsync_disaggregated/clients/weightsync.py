"""The client of a server that mounts these routes: sessions, versions, and digests that the server must agree to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.deadline import Deadline
from weightsync.external.clients.http import HttpCall
from weightsync.model import Manifest, PauseMode, TensorSpec
from weightsync_disaggregated.clients.base import UpdateClient
from weightsync_disaggregated.clients.bodies import GroupSpec, bucket_body, init_group, tensors_body

END = HttpCall("POST", "/end_weight_update", {})
"""Commit with what is known, or give up an update that failed: SGLang's end."""
ABORT = HttpCall("POST", "/abort_weight_update", {})
"""Give up; the engine stays paused."""


def check(label: str | None, manifest: Manifest) -> HttpCall:
    """Say whether an update of these tensors would be taken; nothing is paused for it."""
    return HttpCall("POST", "/check_weight_update", {"weight_version": label, "tensors": tensors_body(manifest)})


def begin(label: str | None, fingerprint: str | None, mode: PauseMode | None, timeout: float | None) -> HttpCall:
    """Pause, and take an update within ``timeout`` seconds (``None``: the server's limit), of the manifest of this fingerprint."""
    return HttpCall(
        "POST", "/begin_weight_update", {"weight_version": label, "manifest": fingerprint, "mode": mode, "timeout": timeout}
    )


def update(specs: Sequence[TensorSpec], group: str, label: str | None = None, *, flattened: bool = True) -> HttpCall:
    """Receive a bucket, of one dtype if it is flattened. ``label``: as SGLang has it, instead of one in the begin."""
    body = bucket_body(specs, group, flattened=flattened)
    return HttpCall("POST", "/update_weights_from_distributed", body if label is None else body | {"weight_version": label})


def commit(digests: Mapping[str, str]) -> HttpCall:
    """Verify, finalize, flush, label, resume."""
    return HttpCall("POST", "/commit_weight_update", {"digests": dict(digests)})


class WeightUpdateClient(UpdateClient):
    """One server with weightsync's own routes: it pauses when an update begins and resumes when it is committed, by itself.

    It says no version while it is paused.
    """

    engine = "weightsync"
    verifies = True
    info = HttpCall("GET", "/weight_update")
    _mode: PauseMode | None = None
    _init_seconds = 60.0

    def _init(self, request: GroupSpec) -> HttpCall:
        return init_group(request, self._init_seconds)

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update(specs, self.group_name)

    def join(self, deadline: Deadline) -> None:
        """Make a group with the engine's ranks, which give up when this side does."""
        self._init_seconds = deadline.remaining("joining a group")
        super().join(deadline)

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """Compare names, shapes and dtypes with the engine's, and look at the label."""
        self.call(check(label, manifest), deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """The begin pauses, in this mode."""
        self._mode = mode

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Begin; the server gives the update up by itself when the deadline of the whole update has passed."""
        super().begin(label, fingerprint, deadline)
        self.call(begin(label, fingerprint, self._mode, (whole or deadline).remaining("an update")), deadline)

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """Commit, with the digest of every tensor."""
        return str(self.call(commit(digests), deadline)["message"])

    def abort(self, deadline: Deadline) -> None:
        """Give up."""
        self.call(ABORT, deadline)
