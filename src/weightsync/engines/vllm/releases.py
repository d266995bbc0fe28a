"""Which releases of vLLM were tried, and what weightsync needs of any: features are looked for, not numbers."""

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

TRIED = ((0, 25), (0, 27), (0, 32))
"""Major and minor numbers of releases that updated for real. Others are used if they have the interface."""

_log = logging.getLogger(__name__)


def installed_release() -> str:
    """The release of the vLLM that this process would import. By its own word: the CPU wheel's metadata has another name."""
    from vllm import __version__

    return str(__version__)


def was_tried(release: str) -> bool:
    """Whether ``release`` is one of :data:`TRIED`."""
    numbers = release.split(".")[:2]
    return all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) in TRIED


def tried_releases() -> str:
    """:data:`TRIED`, for messages."""
    return ", ".join(f"{major}.{minor}" for major, minor in TRIED)


@cache
def warn_if_untried(release: str) -> None:
    """Log once if ``release`` was not tried."""
    if not was_tried(release):
        _log.warning(
            "weightsync was tried with vLLM %s, and this is %s: its interface fits, its behaviour is untried",
            tried_releases(),
            release,
        )


def require(release: str, purpose: str, owner: object, methods: Iterable[str]) -> None:
    """Check that ``owner``, a class or a module of vLLM's, has ``methods``.

    Raises:
        ConfigurationError: Some are missing. The message names them.
    """
    lacking = [name for name in methods if not hasattr(owner, name)]
    if lacking:
        raise ConfigurationError(
            f"vLLM {release} cannot be used for {purpose}: {getattr(owner, '__name__', owner)} has no {', '.join(lacking)}. "
            f"weightsync was tried with vLLM {tried_releases()}"
        )


def check_worker_interface() -> None:
    """Check that this vLLM has what a replica's workers need, and log once if it was not tried.

    Raises:
        ConfigurationError: Something is missing. The message names it.
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
    """Whether this vLLM names its weights (``/update_weight_version``). One that does also says whether it dropped its caches."""
    from vllm.engine.protocol import EngineClient

    return hasattr(EngineClient, "update_weight_version")
