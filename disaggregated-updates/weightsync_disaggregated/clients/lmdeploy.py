"""LMDeploy (0.18, PyTorch backend with the Ray executor), updated from outside: its requests as values, and its client.

It has no session, no version and no flush: tensors are loaded as they come, the last request finalizes, and after a failure all
are sent again. Prefix caching must be off (its default), and requests must be aborted before (the server answers 501 unless it was
started with ``--enable-abort-handling``), or the engine put to sleep. On a single GPU it must be started with
``--distributed-executor-backend ray``: its default executor there has none of the routes, and the server answers 500.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError
from weightsync.external.clients.http import HttpCall
from weightsync.model import PauseMode, TensorSpec
from weightsync_disaggregated.clients.base import UpdateClient
from weightsync_disaggregated.clients.bodies import bucket_body

ABORT_REQUESTS = HttpCall("POST", "/abort_request", {"abort_all": True})
"""End all running requests."""


def update(specs: Sequence[TensorSpec], group: str, finished: bool) -> HttpCall:
    """Receive a flattened bucket of one dtype, and finalize if it was the last. Raises ``ConfigurationError`` for mixed dtypes."""
    return HttpCall("POST", "/update_weights_from_distributed", bucket_body(specs, group) | {"finished": finished})


class LMDeployClient(UpdateClient):
    """One LMDeploy server.

    It has no route that says which tensors it takes, drops caches (prefix caching must be off), or tells its version. Nothing
    holds back requests, and there is no way back: what was loaded stays until everything is sent again.
    """

    engine = "lmdeploy"

    def join(self, deadline: Deadline) -> None:
        """Make a group with the engine's ranks."""
        try:
            super().join(deadline)
        except LoadError as error:
            if ": 500 " in str(error):  # an executor without these routes raises NotImplementedError
                raise LoadError(f"{error}; start LMDeploy with --distributed-executor-backend ray to update it") from error
            raise

    def _bucket(self, specs: Sequence[TensorSpec], last: bool) -> HttpCall:
        return update(specs, self.group_name, last)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """End running requests; nothing holds back new ones, so the router must. Only ``abort``."""
        if mode != "abort":
            raise ConfigurationError(f"LMDeploy cannot pause with {mode!r}: it only aborts")
        self.call(ABORT_REQUESTS, deadline)

    def commit(self, digests: Mapping[str, str], deadline: Deadline) -> str:
        """The last bucket finalized already."""
        return "finalized; LMDeploy keeps no version and verifies nothing"
