"""Routes that other packages add to the coordinator's service, by name. By itself it has none.

A package declares a function of the settings, which returns a :class:`Mount`, in its ``pyproject.toml``::

    [project.entry-points."weightsync.mounts"]
    mine = "my_package.routes:mount"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Protocol

from starlette.routing import BaseRoute

from weightsync.config import ServerSettings
from weightsync.distributions import how_to_install
from weightsync.errors import ConfigurationError
from weightsync.server.openapi import Operation

_GROUP = "weightsync.mounts"
_PACKAGES = {"rollouts": "weightsync_callbacks"}
"""Packages of this repository, by the mount that they add."""


class Mount(Protocol):
    """Routes behind the coordinator's token, on its event loop."""

    routes: Sequence[BaseRoute]
    operations: Sequence[Operation]
    """The routes as the OpenAPI description has them."""
    lasting: Sequence[str]
    """Paths whose requests last, and do not count against the limit of requests under way. They have limits of their own."""

    def close(self) -> None:
        """End all streams and waits; called once, before the coordinator closes."""


def load_mounts(settings: ServerSettings) -> list[Mount]:
    """Make the mounts that the settings name.

    Raises :class:`~weightsync.errors.ConfigurationError` for an unknown name, and for code that cannot be imported.
    """
    known = {entry.name: entry.value for entry in entry_points(group=_GROUP)}
    made: list[Mount] = []
    for name in settings.mounts:
        if name not in known:
            hint = how_to_install(_PACKAGES[name]) if name in _PACKAGES else "install its package"
            raise ConfigurationError(
                f"no installed package has routes named {name!r} (WEIGHTSYNC_MOUNTS or --mount; installed: "
                f"{', '.join(sorted(known)) or 'none'}): {hint}"
            )
        module, _, attribute = known[name].partition(":")
        try:
            factory: Callable[[ServerSettings], Mount] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"the mount {name!r} cannot be used: {error}") from error
        made.append(factory(settings))
    return made
