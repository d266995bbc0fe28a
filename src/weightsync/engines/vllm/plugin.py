"""What vLLM calls in each of its processes: the entry point ``weightsync`` in the group ``vllm.general_plugins``."""

from __future__ import annotations

import logging
import os

from weightsync.engines.vllm.releases import installed_release

__all__ = ["BACKEND", "log_as_vllm_does", "register"]

BACKEND = "weightsync"

_log = logging.getLogger(__name__)


class _ToVLLM(logging.Handler):
    """Hands records to vLLM's logger, whose handlers and level are set later than plugins are loaded, and may change."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if not logging.getLogger().handlers and theirs.isEnabledFor(record.levelno):  # else the root logger's handlers have it
            theirs.handle(record)


def log_as_vllm_does() -> None:
    """Send this package's log lines where vLLM's go: vLLM configures loggers of its own name only. Safe twice.

    Where logging is configured already, for the root logger or for ``weightsync``, nothing is changed.
    """
    ours = logging.getLogger("weightsync")
    if ours.handlers or logging.getLogger().handlers:
        return
    ours.addHandler(_ToVLLM())
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def register() -> None:
    """Make ``{"backend": "weightsync"}`` known to vLLM, for workers and for trainers. May run several times in a process.

    With ``WEIGHTSYNC_COORDINATOR`` set, engines of this process that ask for the backend join that coordinator by themselves.

    Under a release that lacks what weightsync needs nothing is raised here, because every vLLM of that environment would fail to
    start, also those that do not use weightsync: the error comes when the backend is used, and names what is missing.
    """
    log_as_vllm_does()
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError as error:
        _log.warning("weightsync is not available in this vLLM (%s): %s", installed_release(), error)
        return
    folder = __name__.rpartition(".")[0]
    worker, trainer = (f"{folder}.worker", "WeightsyncEngine"), (f"{folder}.trainer", "WeightsyncTrainerEngine")
    for registry, (module, name) in (("WeightTransferEngineFactory", worker), ("WeightTransferTrainerFactory", trainer)):
        try:
            getattr(factory, registry).register_engine(BACKEND, module, name)
        except ValueError:
            _log.debug("weightsync is registered with this vLLM already")
        except AttributeError:  # an older release has one of them, and says what it lacks when it is asked for
            _log.debug("this vLLM has no %s", registry)
    if os.environ.get("WEIGHTSYNC_COORDINATOR"):
        from weightsync.engines.vllm.patches import follow_engines

        follow_engines()
