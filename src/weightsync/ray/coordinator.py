"""A coordinator on a Ray cluster: in the driver's process, or in an actor of its own."""

from __future__ import annotations

import os
import secrets
from typing import Any

import msgspec
import ray

from weightsync.errors import ConfigurationError
from weightsync.ray.places import Access
from weightsync.service.auth import generate
from weightsync.service.server import BackgroundServer
from weightsync.service.settings import Secret, ServerSettings

__all__ = ["CoordinatorActor", "cluster_settings", "start_coordinator"]


def cluster_settings(port: int = 0, **given: object) -> ServerSettings:
    """Settings of a coordinator that the cluster's other nodes reach: this node's address, a token; the environment wins.

    ``given`` wins over the environment, as everywhere.
    """
    defaults = {"WEIGHTSYNC_HOST": ray.util.get_node_ip_address(), "WEIGHTSYNC_PORT": str(port)}
    return with_token(ServerSettings.load({**defaults, **os.environ}, **given))


def with_token(settings: ServerSettings) -> ServerSettings:
    """The same with a token, generated if there is none: who joins through Ray is told it."""
    return settings if settings.token is not None else msgspec.structs.replace(settings, token=generate())


class CoordinatorActor:
    """Holds a coordinator. Made by :func:`start_coordinator`."""

    def __init__(self, port: int, token: str, run: str) -> None:
        self._server = BackgroundServer(cluster_settings(port, token=Secret(token), run=run))
        self._server.start()

    def access(self) -> Access:
        """Where it is, and its token."""
        return Access(self._server.url, self._server.token)


def start_coordinator(*, port: int = 0, token: str | None = None, run: str = "", **options: object) -> Any:  # noqa: ANN401 - a handle
    """Start a coordinator in an actor and return its handle, for ``Manager(coordinator=handle)``.

    It holds no tensor and needs no GPU. ``options`` are those of a Ray actor: ``name``, ``lifetime``, ``scheduling_strategy``, ...;
    it takes no CPU unless you say so. With ``max_restarts`` it needs a ``port`` of its own and should be pinned to a node:
    agents look for it where it was, and after a restart it is the same run with the same token. It ends with its actor.

    Raises :class:`~weightsync.errors.ConfigurationError`.
    """
    if options.get("max_restarts") and not port:
        raise ConfigurationError(
            "a coordinator that may be restarted needs a port, so that agents find it again: "
            "start_coordinator(port=7400, max_restarts=...)"
        )
    # Chosen here and not in the actor, so that a restarted one has the same.
    here = ServerSettings.load(token=Secret(token) if token else None, run=run or None)
    secret = here.token or generate()
    name = here.run or f"run-{secrets.token_hex(4)}"
    return ray.remote(CoordinatorActor).options(**{"num_cpus": 0, **options}).remote(port, secret.reveal(), name)
