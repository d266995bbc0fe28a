"""vLLM (0.32, in development mode), driven from outside: the requests of its weight-transfer routes as values, and its client.

Which bytes cross, and how, is for the backend that the server was started with (``--weight-transfer-config``). The client here is
for the backend ``weightsync`` (:mod:`weightsync.engines.vllm.push_receiver`): ``init_info`` is the body of
``init_weights_update_group``, ``update_info`` a bucket as LMDeploy's and SGLang's, then the digests of all. vLLM's own ``nccl``
backend has a format of its own, and is not spoken. These routes are open to every client that reaches the server, also where it
has an API key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import LoadError
from weightsync.external.clients.base import UpdateClient
from weightsync.external.clients.http import GroupSpec, HttpCall, bucket_body, tensors_body
from weightsync.model import Manifest, PauseMode, TensorSpec

MISSING_ROUTE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
SHUTDOWN_ENGINE = HttpCall("POST", "/shutdown_weight_transfer_engine", {})
"""End the backend."""
START_WEIGHT_UPDATE = HttpCall("POST", "/start_weight_update", {})
"""Open a session for the model."""
RESUME = HttpCall("POST", "/resume")
"""Generate again."""


def init_engine(info: Mapping[str, Any]) -> HttpCall:
    """Make the backend ready, once."""
    return HttpCall("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})


def update_weights(info: Mapping[str, Any]) -> HttpCall:
    """Receive what ``info`` speaks of, on every rank."""
    return HttpCall("POST", "/update_weights", {"update_info": dict(info)})


def finish_weight_update(version: str) -> HttpCall:
    """Load what came, and label it. Drops no caches."""
    return HttpCall("POST", "/finish_weight_update", {"weight_version": version})


def pause(mode: PauseMode, *, clear_cache: bool = True) -> HttpCall:
    """Stop generating. With ``keep`` requests are held; if caches are dropped, their entries are computed again."""
    return HttpCall("POST", f"/pause?mode={mode}&clear_cache={'true' if clear_cache else 'false'}")


def reset_prefix_cache(*, everything: bool = False) -> HttpCall:
    """Drop the prefix cache; ``everything``: also entries of requests that are held, and in an external cache.

    Answers 200 even where it did not: look at ``success``.
    """
    more = "?reset_running_requests=true&reset_external=true" if everything else ""
    return HttpCall("POST", f"/reset_prefix_cache{more}")


def update_weight_version(version: str) -> HttpCall:
    """Label the weights that are there: in ``/weight_info``, and in the version spans of outputs."""
    return HttpCall("POST", "/update_weight_version", {"new_version": version})


def collective_rpc(method: str) -> HttpCall:
    """Call a method of every worker."""
    return HttpCall("POST", "/collective_rpc", {"method": method})


class VLLMClient(UpdateClient):
    """One vLLM server whose backend joins weightsync groups."""

    engine = "vllm"
    verifies = True
    missing_route = MISSING_ROUTE
    info = HttpCall("GET", "/weight_info")
    _session = False
    _manifest: Manifest | None = None

    def _init(self, request: GroupSpec) -> HttpCall:
        tensors = {} if self._manifest is None else {"tensors": tensors_body(self._manifest)}
        return init_engine(request._asdict() | tensors)

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """The workers compare these tensors with theirs when they join, which comes before the pause."""
        self._manifest = manifest

    def _destroy(self) -> HttpCall:
        return SHUTDOWN_ENGINE

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update_weights(bucket_body(specs, self.group_name))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pause with ``abort``, ``wait`` or ``keep``."""
        self.call(pause(mode), deadline)

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""
        self.call(RESUME, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Drop the prefix cache, and look whether that worked."""
        answer = self.call(reset_prefix_cache(), deadline)
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
