"""vLLM (0.32, in development mode), driven from outside: the requests of its weight-transfer routes as values, and its client.

Which bytes cross, and how, is for the backend that the server was started with (``--weight-transfer-config``). The client here is
for the backend ``weightsync`` (:mod:`weightsync.engines.vllm.push_receiver`): ``init_info`` is the body of
``init_weights_update_group``, ``update_info`` a bucket as LMDeploy's and SGLang's, then the digests of all. vLLM's own ``nccl``
backend has a format of its own, and is not spoken. These routes are open to whoever reaches the server, also where it has an API
key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import LoadError, ProtocolError
from weightsync.external.clients.base import GroupSpec, HttpCall, UpdateClient, bucket_body, group_body, tensors_body
from weightsync.model import Manifest, PauseMode, TensorSpec

__all__ = [
    "VLLMClient",
    "finish_weight_update",
    "init_engine",
    "pause",
    "reset_prefix_cache",
    "resume",
    "shutdown_engine",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "weight_info",
    "world_size",
]


def init_engine(info: Mapping[str, Any]) -> HttpCall:
    """Make the backend ready, once."""
    return HttpCall("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})


def shutdown_engine() -> HttpCall:
    """End the backend."""
    return HttpCall("POST", "/shutdown_weight_transfer_engine", {})


def start_weight_update() -> HttpCall:
    """Open a session for the model."""
    return HttpCall("POST", "/start_weight_update", {})


def start_draft_weight_update() -> HttpCall:
    """Open a session for the draft model."""
    return HttpCall("POST", "/start_draft_weight_update", {})


def update_weights(info: Mapping[str, Any]) -> HttpCall:
    """Receive what ``info`` speaks of, on every rank."""
    return HttpCall("POST", "/update_weights", {"update_info": dict(info)})


def finish_weight_update(version: str) -> HttpCall:
    """Load what came, and label it. Drops no caches."""
    return HttpCall("POST", "/finish_weight_update", {"weight_version": version})


def pause(mode: PauseMode) -> HttpCall:
    """Stop generating, and drop caches. With ``keep`` requests are held, and their cache entries are computed anew."""
    return HttpCall("POST", f"/pause?mode={mode}&clear_cache=true")


def resume() -> HttpCall:
    """Generate again."""
    return HttpCall("POST", "/resume")


def reset_prefix_cache() -> HttpCall:
    """Drop the prefix cache. Answers 200 even where it did not: look at ``success``."""
    return HttpCall("POST", "/reset_prefix_cache")


def weight_info() -> HttpCall:
    """What is served; ``weight_version`` is among it."""
    return HttpCall("GET", "/weight_info")


def world_size() -> HttpCall:
    """How many ranks there are."""
    return HttpCall("GET", "/get_world_size")


class VLLMClient(UpdateClient):
    """One vLLM server whose backend joins weightsync groups."""

    engine = "vllm"
    verifies = True
    _session = False
    _manifest: Manifest | None = None

    def _init(self, request: GroupSpec) -> HttpCall:
        tensors = {} if self._manifest is None else {"tensors": tensors_body(self._manifest)}
        return init_engine(group_body(request) | tensors)

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """The workers compare these tensors with theirs when they join, which comes before the pause."""
        self._manifest = manifest

    def _destroy(self) -> HttpCall:
        return shutdown_engine()

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update_weights(bucket_body(specs, self.group_name))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pause with ``abort``, ``wait`` or ``keep``."""
        self.call(pause(mode), deadline)

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""
        self.call(resume(), deadline)

    def flush(self, deadline: Deadline) -> None:
        """Drop the prefix cache, and look whether that worked."""
        answer = self.call(reset_prefix_cache(), deadline)
        if isinstance(answer, dict) and answer.get("success") is True:
            return
        raise LoadError(f"{self.url} did not drop its prefix cache: {answer!r}")

    def version(self, deadline: Deadline) -> str | None:
        """Its ``weight_version``."""
        answer = self.call(weight_info(), deadline)
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.url} answered /weight_info with a {type(answer).__name__}")
        label = answer.get("weight_version")
        return None if label is None else str(label)

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Open a session."""
        super().begin(label, fingerprint, deadline)
        self._session = True  # also if the answer does not come: vLLM may have opened it
        self.call(start_weight_update(), deadline)

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """Have the digests compared and everything loaded; finish the session, and look whether vLLM took the label."""
        self.call(update_weights({"digests": dict(digests)}), deadline)
        self.call(finish_weight_update(self.label), deadline)
        self._session = False
        version = self.version(deadline)
        if version != self.label:
            raise LoadError(f"{self.url} says that it serves version {version!r}, not {self.label!r}")
        return f"version {version}, verified as received"

    def abort(self, deadline: Deadline) -> None:
        """End the session without a label. A worker whose session an error has ended already refuses both, which is as good."""
        if self._session:
            self._session = False
            for call in (update_weights({"abandon": True}), HttpCall("POST", "/finish_weight_update", {})):
                with suppress(LoadError):
                    self.call(call, deadline)
