"""A coordinator on a Ray cluster: in the driver's process, or in an actor of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
import ray

from weightsync.config import Address, Secret, ServerSettings, runtime_directory
from weightsync.errors import ConfigurationError
from weightsync.protocol.tokens import TokenFile, find_token, generate
from weightsync.ray.places import Access
from weightsync.server.server import BackgroundServer

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
    """Holds a coordinator. Made by :func:`start_coordinator`, which calls :meth:`begin` first.

    The token comes by that call and not by the constructor, whose arguments Ray stores in clear for as long as the actor may be
    restarted. For its restart the actor keeps the token in a file of its node that only this user can read.
    """

    def __init__(self, port: int, run: str) -> None:
        self._port, self._run = port, run
        self._server: BackgroundServer | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._serve(self._kept())

    def begin(self, token: str, restartable: bool) -> None:
        """Serve, with this token."""
        secret = Secret(token)
        if restartable:
            TokenFile(self._port, secret, _kept_in())
        self._serve(secret)

    def access(self) -> Access:
        """Where it is, and its token."""
        if self._server is None:
            raise ConfigurationError("the coordinator's actor does not serve: start_coordinator() did not get through to it")
        return Access(self._server.url, self._server.token)

    def _serve(self, token: Secret) -> None:
        self._server = BackgroundServer(cluster_settings(self._port, token=token, run=self._run))
        self._server.start()

    def _kept(self) -> Secret:
        token = find_token(Address("http", "127.0.0.1", self._port), _kept_in()) or ServerSettings.load().token
        if token is None:
            raise ConfigurationError(
                f"the coordinator was restarted on {ray.util.get_node_ip_address()}, which does not have its token: pin its actor "
                "to one node by a scheduling_strategy, or set WEIGHTSYNC_TOKEN_FILE on every node"
            )
        return token


def _kept_in() -> Path:
    """Not where clients look: who ends an actor by ``ray.kill`` leaves the file behind."""
    directory = runtime_directory()
    return directory.with_name(f"{directory.name}-ray")


def start_coordinator(*, port: int = 0, token: str | None = None, run: str = "", **options: object) -> Any:  # noqa: ANN401 - a handle
    """Start a coordinator in an actor and return its handle, for ``Manager(coordinator=handle)``.

    It holds no tensor and needs no GPU. ``options`` are those of a Ray actor: ``name``, ``lifetime``, ``scheduling_strategy``, ...;
    it takes no CPU unless you say so. With ``max_restarts`` it needs a ``port`` of its own and should be pinned to a node:
    agents look for it where it was, and after a restart it is the same run with the same token, which it keeps in a file of that
    node that only this user can read. It ends with its actor.

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
    actor = ray.remote(CoordinatorActor).options(**{"num_cpus": 0, **options}).remote(port, name)
    actor.begin.remote(secret.reveal(), bool(options.get("max_restarts")))
    return actor
