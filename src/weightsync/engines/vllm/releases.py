"""Tested releases of vLLM, and checks for the features that weightsync needs. Other releases with these features are used too."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from weightsync.errors import ConfigurationError

__all__ = [
    "TRIED",
    "check_worker_interface",
    "has_labels",
    "installed_release",
    "require",
    "tried_releases",
    "warn_if_untried",
    "was_tried",
]

TRIED = ((0, 25), (0, 27), (0, 28), (0, 29), (0, 30), (0, 31), (0, 32))
"""Major and minor numbers of releases that updated for real. Others are used if they have the interface."""

_log = logging.getLogger(__name__)


def installed_release() -> str:
    """Return the version of the vLLM that this process imports.

    Reads ``vllm.__version__`` instead of metadata, because the CPU wheel has another name.
    """
    from vllm import __version__

    return str(__version__)


def was_tried(release: str) -> bool:
    """Return whether ``release`` is one of :data:`TRIED`."""
    numbers = release.split(".")[:2]
    return all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) in TRIED


def tried_releases() -> str:
    """Format :data:`TRIED` for messages."""
    return ", ".join(f"{major}.{minor}" for major, minor in TRIED)


@cache
def warn_if_untried(release: str) -> None:
    """Log a warning once if ``release`` is not a tested one."""
    if not was_tried(release):
        _log.warning(
            "weightsync was tried with vLLM %s, and this is %s: its interface fits, its behaviour is untried",
            tried_releases(),
            release,
        )


def require(release: str, purpose: str, owner: object, methods: Iterable[str]) -> None:
    """Check that ``owner``, a class or a module of vLLM, has all ``methods``.

    Raises:
        ConfigurationError: Some are missing. The message names them.
    """
    missing = [name for name in methods if not hasattr(owner, name)]
    if missing:
        raise ConfigurationError(
            f"vLLM {release} cannot be used for {purpose}: {getattr(owner, '__name__', owner)} has no {', '.join(missing)}. "
            f"weightsync was tried with vLLM {tried_releases()}"
        )


def check_worker_interface() -> None:
    """Check that this vLLM has the interface that a replica's workers need, and log a warning once if it is not tested.

    Raises:
        ConfigurationError: A part is missing. The message names it.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.v1.worker.gpu_worker import Worker

    release = installed_release()
    session = ("start_weight_update", "update_weights", "finish_weight_update")
    require(release, "a replica", WeightTransferEngine, (*session, "init_transfer_engine", "receive_weights", "shutdown"))
    require(release, "a replica", Worker, session)
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError as error:
        raise ConfigurationError(f"vLLM {release} cannot be used for a replica: {error}") from None
    require(release, "a replica", layerwise, ("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info"))
    warn_if_untried(release)


def has_labels() -> bool:
    """Return whether this vLLM has labels for weights (``/update_weight_version``). Its server then reports dropped caches, too."""
    from vllm.engine.protocol import EngineClient

    return hasattr(EngineClient, "update_weight_version")
