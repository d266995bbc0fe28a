"""vLLM (0.32, in development mode), updated from outside: its requests as values, and its client.

It is for the backend ``weightsync`` (:mod:`weightsync_disaggregated.push_receiver`): ``init_info`` is the body of
``init_weights_update_group``, ``update_info`` a bucket as LMDeploy's and SGLang's, then the digests of all. vLLM's own ``nccl``
backend has a separate format, and is not spoken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import LoadError
from weightsync.external.clients import vllm
from weightsync.external.clients.http import HttpCall
from weightsync.model import Manifest, PauseMode, TensorSpec
from weightsync_disaggregated.clients.base import UpdateClient
from weightsync_disaggregated.clients.bodies import GroupSpec, bucket_body, tensors_body

SHUTDOWN_ENGINE = HttpCall("POST", "/shutdown_weight_transfer_engine", {})
"""End the backend."""
START_WEIGHT_UPDATE = HttpCall("POST", "/start_weight_update", {})
"""Open a session for the model."""


def update_weights(info: Mapping[str, Any]) -> HttpCall:
    """Receive what ``info`` speaks of, on every rank."""
    return HttpCall("POST", "/update_weights", {"update_info": dict(info)})


def finish_weight_update(version: str) -> HttpCall:
    """Load what came, and label it. Drops no caches."""
    return HttpCall("POST", "/finish_weight_update", {"weight_version": version})


class VLLMClient(UpdateClient):
    """One vLLM server whose backend joins weightsync groups."""

    engine = "vllm"
    verifies = True
    missing_route = vllm.MISSING_ROUTE
    info = HttpCall("GET", "/weight_info")
    _session = False
    _manifest: Manifest | None = None

    def _init(self, request: GroupSpec) -> HttpCall:
        tensors = {} if self._manifest is None else {"tensors": tensors_body(self._manifest)}
        return vllm.init_engine(request._asdict() | tensors)

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """The workers compare these tensors with theirs when they join, which comes before the pause."""
        self._manifest = manifest

    def _destroy(self) -> HttpCall:
        return SHUTDOWN_ENGINE

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update_weights(bucket_body(specs, self.group_name))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pause with ``abort``, ``wait`` or ``keep``."""
        self.call(vllm.pause(mode), deadline)

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""
        self.call(vllm.RESUME, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Drop the prefix cache, and look whether that worked."""
        answer = self.call(vllm.reset_prefix_cache(), deadline)
        if isinstance(answer, dict) and answer.get("success") is True:
            return
        raise LoadError(f"{self.url} did not drop its prefix cache: {answer!r}")

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Open a session."""
        super().begin(label, fingerprint, deadline)
        self._session = True  # also if the answer does not come: vLLM may have opened it
        self.call(START_WEIGHT_UPDATE, deadline)

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """Have the digests compared and everything loaded; finish the session, and look whether vLLM took the label."""
        self.call(update_weights({"digests": dict(digests)}), deadline)
        self.call(finish_weight_update(self.label), deadline)
        self._session = False
        self._check_label(deadline)
        return f"version {self.label}, verified as received"

    def abort(self, deadline: Deadline) -> None:
        """End the session without a label. A worker whose session an error has ended already refuses both, which is as good."""
        if self._session:
            self._session = False
            for call in (update_weights({"abandon": True}), HttpCall("POST", "/finish_weight_update", {})):
                with suppress(LoadError):
                    self.call(call, deadline)
