"""What of NeMo-RL the refit engine was tried with, and what it needs of any."""

from __future__ import annotations

import inspect
import logging
import sys
from functools import cache

from weightsync.errors import ConfigurationError

__all__ = ["COMMIT", "INTERFACE", "TRIED", "check_interface", "is_tried", "warn_if_untried"]

TRIED = "0.6"
"""Major and minor number that the tried commit has. NeMo-RL is used from its main branch; another one is used if it fits."""
COMMIT = "7ea279abf"
"""Of 2026-08-22."""
INTERFACE = "nemo_rl.utils.checkpoint_engines.base"
"""The module that makes an engine by its name, and holds the base class that says what it calls."""

_log = logging.getLogger(__name__)


def is_tried(release: str) -> bool:
    """Whether ``release`` is of the series :data:`TRIED`."""
    return release.startswith(f"{TRIED}.")


@cache
def warn_if_untried() -> None:
    """Log once if the NeMo-RL of this process is not of the series :data:`TRIED`."""
    release = str(getattr(sys.modules.get("nemo_rl"), "__version__", ""))
    if release and not is_tried(release):
        _log.warning(
            "weightsync was tried with NeMo-RL %s (commit %s), and this is %s: its interface fits, its behaviour is untried",
            TRIED, COMMIT, release,
        )  # fmt: skip


def check_interface(engine: type) -> None:
    """Check ``engine`` against NeMo-RL's base class, where NeMo-RL made it. Elsewhere there is nothing to compare.

    Raises:
        ConfigurationError: NeMo-RL calls a method or an argument that it lacks. The message names them.
    """
    base = getattr(sys.modules.get(INTERFACE), "CheckpointEngine", None)
    lacking = [
        f"{name}({parameter})"
        for name in sorted(getattr(base, "__abstractmethods__", ()))
        for parameter in inspect.signature(getattr(base, name)).parameters
        if parameter not in _parameters(engine, name)
    ]
    if lacking:
        raise ConfigurationError(
            f"this NeMo-RL calls {', '.join(lacking)} of a checkpoint engine, which weightsync does not have: it was tried with "
            f"NeMo-RL {TRIED}, commit {COMMIT}"
        )


def _parameters(engine: type, name: str) -> set[str]:
    method = getattr(engine, name, None)
    return set(inspect.signature(method).parameters) if callable(method) else set()
