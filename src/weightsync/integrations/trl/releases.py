"""Which release of TRL this was tried with, and what it needs of any."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from weightsync.errors import ConfigurationError

__all__ = ["TRIED", "check_interface", "warn_if_untried"]

TRIED = "1.16"
"""Major and minor number. Another release is used if it has the interface."""

_log = logging.getLogger(__name__)


@cache
def warn_if_untried() -> None:
    """Log once if the installed TRL is not :data:`TRIED`."""
    try:
        release = version("trl")
    except PackageNotFoundError:  # a source tree on the path
        return
    if release.split(".")[:2] != TRIED.split("."):
        _log.warning(
            "weightsync was tried with TRL %s, and this is %s: its interface fits, its behaviour is untried", TRIED, release
        )


def check_interface(module: object, needed: Mapping[str, Sequence[str]]) -> None:
    """Check that ``module`` has each class in ``needed`` with its methods.

    Raises:
        ConfigurationError: Something is missing. The message names it.
    """
    lacking = [
        f"{kind}.{method}"
        for kind, methods in needed.items()
        for method in methods
        if not callable(getattr(getattr(module, kind, None), method, None))
    ]
    if lacking:
        raise ConfigurationError(
            f"this TRL ({getattr(module, '__name__', module)}) has no {', '.join(lacking)}: weightsync was tried with TRL {TRIED}"
        )
