"""What vLLM calls in each of its processes: the entry point ``weightsync`` in the group ``vllm.general_plugins``."""

from __future__ import annotations

import logging
from typing import NoReturn

from weightsync.adapters.vllm.releases import check_release, installed_release, is_supported

__all__ = ["BACKEND", "UnsupportedRelease", "register"]

BACKEND = "weightsync"

_log = logging.getLogger(__name__)


class UnsupportedRelease:
    """Stands in for the engine under a vLLM that is not supported, and says so when it is asked for."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn:
        check_release(installed_release())
        raise RuntimeError("this vLLM is supported: registering went wrong")


def register() -> None:
    """Make ``{"backend": "weightsync"}`` known to vLLM. May run several times in a process.

    Under a release that is not supported nothing is raised here, because every vLLM of that environment would fail to start,
    also those that do not use weightsync: the error comes when the backend is used.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        _log.warning("weightsync is not available in this vLLM (%s): %s", installed_release(), error)
        return
    supported = is_supported(installed_release())
    module, name = ("weightsync.adapters.vllm.worker", "WeightsyncEngine") if supported else (__name__, "UnsupportedRelease")
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, module, name)
    except ValueError:
        _log.debug("weightsync is registered with this vLLM already")
