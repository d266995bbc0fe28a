"""SGLang (0.5.23), updated from outside: its requests as values, and its client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.external.clients.http import HttpCall
from weightsync.model import PauseMode, TensorSpec
from weightsync_disaggregated.clients.base import UpdateClient
from weightsync_disaggregated.clients.bodies import bucket_body

SGLangMode = Literal["abort", "retract", "in_place"]

_MODES: dict[PauseMode, SGLangMode] = {"abort": "abort", "keep": "retract"}
"""``keep``: requests go back to the queue and are computed again. ``in_place`` would keep cache entries of the old weights, which
SGLang refuses to flush while requests run, after the weights have changed."""

BEGIN = HttpCall("POST", "/begin_weight_update", {"selector": "all"})
"""Open the session that updates need."""
END = HttpCall("POST", "/end_weight_update", {})
"""Close the session, after the last bucket or after a failure."""
CONTINUE_GENERATION = HttpCall("POST", "/continue_generation", {})
"""Generate again."""


def sglang_mode(mode: PauseMode) -> SGLangMode:
    """What ``mode`` is called there. Raises :class:`~weightsync.errors.ConfigurationError`: SGLang has no way to ``wait``."""
    if mode not in _MODES:
        raise ConfigurationError(f"SGLang cannot pause with {mode!r}; it knows {', '.join(_MODES)}")
    return _MODES[mode]


def update(
    specs: Sequence[TensorSpec], group: str, version: str | None = None, *, last: bool = False, flattened: bool = True
) -> HttpCall:
    """Receive a bucket, of one dtype if it is flattened. The ``last`` one also flushes. ``version`` labels what is there now."""
    body = bucket_body(specs, group, flattened=flattened) | {"flush_cache": last, "abort_all_requests": False}
    return HttpCall("POST", "/update_weights_from_distributed", body if version is None else body | {"weight_version": version})


def pause_generation(mode: SGLangMode) -> HttpCall:
    """Stop generating."""
    return HttpCall("POST", "/pause_generation", {"mode": mode})


class SGLangClient(UpdateClient):
    """One SGLang server.

    It has no route that says which tensors it takes. The last bucket flushes: SGLang refuses the update where that fails.
    """

    engine = "sglang"
    info = HttpCall("GET", "/model_info")

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update(specs, self.group_name, self.label if last else None, last=last)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Pause with ``abort``, or ``keep`` (retract). SGLang has no way to ``wait``."""
        self.call(pause_generation(sglang_mode(mode)), deadline)

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""
        self.call(CONTINUE_GENERATION, deadline)

    def begin(self, label: str | None, fingerprint: str | None, deadline: Deadline, whole: Deadline | None = None) -> None:
        """Open a session."""
        if not label:
            raise ConfigurationError("SGLang labels what it serves: an update needs a label")
        super().begin(label, fingerprint, deadline)
        self.call(BEGIN, deadline)

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """Close the session, and look whether SGLang took the label."""
        self.call(END, deadline)
        self._check_label(deadline)
        return f"version {self.label}; SGLang verifies nothing of it"

    def abort(self, deadline: Deadline) -> None:
        """Close the session; everything must be sent again."""
        self.call(END, deadline)
