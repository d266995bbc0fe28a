"""vLLM plugin: the entry point ``weightsync`` in the group ``vllm.general_plugins``, which vLLM calls in each process."""

from __future__ import annotations

import logging
import sys
from typing import Any

from weightsync.config import variable
from weightsync.engines.vllm import BACKEND
from weightsync.engines.vllm.versioned_server import add_to_servers
from weightsync.releases import release_of

_log = logging.getLogger(__name__)


class _ToVLLM(logging.Handler):
    """Forwards records to the root logger if the program configured it, and otherwise to vLLM's logger.

    Looks for each record, because vLLM and programs configure their loggers after plugins are loaded.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if _root_is_configured():
            logging.getLogger().callHandlers(record)  # as propagation does
        elif (theirs := logging.getLogger("vllm")).isEnabledFor(record.levelno):
            theirs.handle(record)


def _root_is_configured() -> bool:
    """Whether the root logger has other handlers than that of ``logging.basicConfig()`` without arguments.

    ``logging.debug()`` and its siblings install that one, and vLLM's CPU build calls them. It is no program's choice.
    """
    root = logging.getLogger()
    return any(
        root.level != logging.WARNING
        or getattr(handler, "stream", None) is not sys.stderr
        or getattr(handler.formatter, "_fmt", None) != logging.BASIC_FORMAT
        for handler in root.handlers
    )


def log_as_vllm_does() -> None:
    """Send this package's log records to vLLM's handlers, because vLLM configures only its own loggers. Idempotent.

    Does nothing if logging is already configured for the root logger or for ``weightsync``.
    """
    ours = logging.getLogger("weightsync")
    if ours.handlers or _root_is_configured():
        return
    ours.addHandler(_ToVLLM())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def add_worker_methods() -> None:
    """Add ``weightsync_ready``, ``_join``, ``_update`` and ``_leave`` to vLLM's workers, for a framework's own calls. Idempotent.

    They are the methods of :class:`~weightsync.engines.vllm.in_call.CalledWorker`.
    """
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        _log.debug("this vLLM has no worker of the required kind: %s", error)
        return
    for name in ("ready", "join", "update", "leave"):
        setattr(WorkerBase, f"weightsync_{name}", worker_method(name))


def worker_method(name: str) -> Any:  # noqa: ANN401 - vLLM's
    """Return one of these methods of vLLM's worker."""

    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        from weightsync.engines.vllm.in_call import called  # late: most processes of vLLM have no worker

        return getattr(called(worker), name)(*args, **kwargs)

    return call


def register() -> None:
    """Register ``{"backend": "weightsync"}`` with vLLM, for workers and for trainers, and add methods to workers. Idempotent.

    With ``WEIGHTSYNC_COORDINATOR`` set, engines of this process that use the backend join that coordinator automatically.

    Under a release without the required interface this raises no error, because then every vLLM of that environment would fail to
    start, even without weightsync. The error is raised when the backend is used, and names the missing parts.
    """
    log_as_vllm_does()
    add_worker_methods()
    add_to_servers()
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError as error:
        _log.warning("weightsync is not available in this vLLM (%s): %s", release_of("vllm"), error)
        return
    folder = __name__.rpartition(".")[0]
    worker, trainer = (f"{folder}.worker", "WeightsyncEngine"), (f"{folder}.trainer", "WeightsyncTrainerEngine")
    for registry, (module, name) in (("WeightTransferEngineFactory", worker), ("WeightTransferTrainerFactory", trainer)):
        try:
            getattr(factory, registry).register_engine(BACKEND, module, name)
        except ValueError:
            _log.debug("weightsync is already registered with this vLLM")
        except AttributeError:  # an older release has only one of them, and reports the missing one on use
            _log.debug("this vLLM has no %s", registry)
    if variable("WEIGHTSYNC_COORDINATOR"):
        from weightsync.engines.vllm.patches import follow_engines

        follow_engines()
