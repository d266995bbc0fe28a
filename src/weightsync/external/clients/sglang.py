"""SGLang (0.5.23), updated from outside: its requests as values, and its client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError, ProtocolError
from weightsync.external.clients.base import GroupSpec, HttpCall, UpdateClient, bucket_body, group_body
from weightsync.external.clients.sglang_modes import SGLangMode, sglang_mode
from weightsync.model import Manifest, PauseMode, TensorSpec

__all__ = [
    "SGLangClient",
    "begin",
    "continue_generation",
    "destroy_group",
    "end",
    "flush_cache",
    "init_group",
    "model_info",
    "pause_generation",
    "update",
    "update_weight_version",
]


def init_group(request: GroupSpec) -> HttpCall:
    """Join a group."""
    return HttpCall("POST", "/init_weights_update_group", group_body(request))


def destroy_group(name: str) -> HttpCall:
    """Leave a group."""
    return HttpCall("POST", "/destroy_weights_update_group", {"group_name": name})


def begin(selector: Literal["all", "target", "draft"] = "all") -> HttpCall:
    """Open the session that updates need."""
    return HttpCall("POST", "/begin_weight_update", {"selector": selector})


def update(specs: Sequence[TensorSpec], group: str, version: str | None) -> HttpCall:
    """Receive a flattened bucket of one dtype. ``version`` comes with the last bucket, which also flushes; else ``None``."""
    body = bucket_body(specs, group) | {"flush_cache": version is not None, "abort_all_requests": False}
    return HttpCall("POST", "/update_weights_from_distributed", body if version is None else body | {"weight_version": version})


def end() -> HttpCall:
    """Close the session, after the last bucket or after a failure."""
    return HttpCall("POST", "/end_weight_update", {})


def pause_generation(mode: SGLangMode) -> HttpCall:
    """Stop generating."""
    return HttpCall("POST", "/pause_generation", {"mode": mode})


def continue_generation() -> HttpCall:
    """Generate again."""
    return HttpCall("POST", "/continue_generation", {})


def flush_cache() -> HttpCall:
    """Drop the prefix cache."""
    return HttpCall("GET", "/flush_cache")


def update_weight_version(version: str) -> HttpCall:
    """Label the weights that are there."""
    return HttpCall("POST", "/update_weight_version", {"new_version": version})


def model_info() -> HttpCall:
    """What is served; ``weight_version`` is among it."""
    return HttpCall("GET", "/model_info")


class SGLangClient(UpdateClient):
    """One SGLang server."""

    engine = "sglang"

    def _init(self, request: GroupSpec) -> HttpCall:
        return init_group(request)

    def _destroy(self) -> HttpCall:
        return destroy_group(self.group_name)

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update(specs, self.group_name, self.label if last else None)

    def check(self, manifest: Manifest, label: str | None, deadline: Deadline) -> None:
        """SGLang has no route that says which tensors it takes."""

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pause with ``abort``, or ``keep`` (retract). SGLang has no way to ``wait``."""
        self.call(pause_generation(sglang_mode(mode)), deadline)

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""
        self.call(continue_generation(), deadline)

    def flush(self, deadline: Deadline) -> None:
        """The last bucket flushed already: SGLang refuses the update where that fails."""

    def version(self, deadline: Deadline) -> str | None:
        """Its ``weight_version``."""
        answer = self.call(model_info(), deadline)
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.url} answered /model_info with a {type(answer).__name__}")
        label = answer.get("weight_version")
        return None if label is None else str(label)

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Open a session."""
        if not label:
            raise ConfigurationError("SGLang labels what it serves: an update needs a label")
        super().begin(label, fingerprint, deadline)
        self.call(begin(), deadline)

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """Close the session, and look whether SGLang took the label."""
        self.call(end(), deadline)
        version = self.version(deadline)
        if version != self.label:
            raise LoadError(f"{self.url} says that it serves version {version!r}, not {self.label!r}")
        return f"version {version}; SGLang verifies nothing of it"

    def abort(self, deadline: Deadline) -> None:
        """Close the session; everything must be sent again."""
        self.call(end(), deadline)
