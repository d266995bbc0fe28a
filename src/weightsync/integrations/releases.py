"""Releases of frameworks that were tried. Others are used if they have the interface, and each is named once in the log."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

__all__ = ["SERIES", "Series", "warn_if_untried"]

_log = logging.getLogger(__name__)


class Series(NamedTuple):
    """A framework, and the major and minor number of its releases that were tried."""

    title: str
    tried: str

    def has(self, release: str) -> bool:
        """Whether ``release`` is one of them."""
        return release.split(".")[:2] == self.tried.split(".")


SERIES = {
    "areal": Series("AReaL", "1.0"),
    "openrlhf": Series("OpenRLHF", "0.11"),
    "skyrl": Series("SkyRL", "0.4"),
    "trl": Series("TRL", "1.16"),
}
"""By the name of the package."""


@cache
def warn_if_untried(package: str) -> None:
    """Log once if the installed release of ``package`` was not tried."""
    series = SERIES[package]
    try:
        release = version(package)
    except PackageNotFoundError:  # a source tree on the path
        return
    if not series.has(release):
        _log.warning(
            "weightsync was tried with %s %s, and this is %s: its interface fits, its behaviour is untried",
            series.title, series.tried, release,
        )  # fmt: skip
