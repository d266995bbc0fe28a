"""Coordinator on a Ray cluster, in the driver's process or in its own actor."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import msgspec
import ray

from weightsync.config import Address, Secret, SecretKind, ServerSettings, runtime_directory
from weightsync.errors import ConfigurationError
from weightsync.protocol.tokens import TokenFile, find_token, generate
from weightsync.server.server import BackgroundServer
from weightsync_ray.actor_calls import Access

_KEPT: tuple[SecretKind, ...] = ("token", "operator")
"""Secrets that an actor keeps for its restart."""


def cluster_settings(port: int = 0, **given: object) -> ServerSettings:
    """Settings of a coordinator that other nodes can reach: this node's address and a token.

    The environment takes precedence over these defaults, and what is ``given``, or a port other than 0, over the environment.
    """
    defaults = {"WEIGHTSYNC_HOST": ray.util.get_node_ip_address(), "WEIGHTSYNC_PORT": "0"}
    return with_token(ServerSettings.load(None, defaults, **given, **({"port": port} if port else {})))


def with_token(settings: ServerSettings) -> ServerSettings:
    """Return the settings with a token, generated if there is none. Processes that join through Ray receive it."""
    return settings if settings.token is not None else msgspec.structs.replace(settings, token=generate())


class CoordinatorActor:
    """Actor that runs a coordinator. :func:`start_coordinator` makes it and calls :meth:`begin` first.

    The token is an argument of that call instead of the constructor, because Ray stores a constructor's arguments in clear as long
    as the actor may be restarted. For its restart the actor keeps the token in a file of its node that only this user can read.
    """

    def __init__(self, port: int, run: str) -> None:
        self._port, self._run = port, run
        self._server: BackgroundServer | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._serve(*self._kept())

    def begin(self, token: str, operator: str | None, restartable: bool) -> None:
        """Start to serve with this token, and with the operator's if there is one."""
        secrets = Secret(token), Secret(operator) if operator is not None else None
        if restartable:
            for kind, secret in zip(_KEPT, secrets, strict=True):
                if secret is not None:
                    TokenFile(self._port, secret, _kept_in(), kind)
        self._serve(*secrets)

    def access(self) -> Access:
        """Return the coordinator's URL and token.

        Raises:
            ConfigurationError: The coordinator does not run.
        """
        if self._server is None:
            raise ConfigurationError("the coordinator's actor does not serve: the call of start_coordinator() did not reach it")
        return Access(self._server.url, self._server.token)

    def _serve(self, token: Secret, operator: Secret | None) -> None:
        self._server = BackgroundServer(cluster_settings(self._port, token=token, operator_token=operator, run=self._run))
        self._server.start()

    def _kept(self) -> tuple[Secret, Secret | None]:
        here = Address("http", "127.0.0.1", self._port)
        token, operator = (find_token(here, _kept_in(), kind) for kind in _KEPT)
        token = token or ServerSettings.load().token
        if token is None:
            raise ConfigurationError(
                f"the coordinator was restarted on {ray.util.get_node_ip_address()}, which does not have its token: pin its actor "
                "to one node with a scheduling_strategy, or set WEIGHTSYNC_TOKEN_FILE on every node"
            )
        return token, operator


def _kept_in() -> Path:
    """Directory of the token file. Clients do not search it, because ``ray.kill`` leaves the file behind."""
    directory = runtime_directory()
    return directory.with_name(f"{directory.name}-ray")


def start_coordinator(
    *, port: int = 0, token: str | None = None, operator_token: str | None = None, run: str = "", **options: object
) -> Any:  # noqa: ANN401 - a handle
    """Start a coordinator in an actor and return its handle, for ``Manager(coordinator=handle)``.

    The actor holds no tensor and needs neither a GPU nor, by default, a CPU. The coordinator ends with its actor. With
    ``max_restarts`` it needs a fixed ``port`` and should be pinned to a node, because agents reconnect to the same address. After a
    restart it is the same run with the same token, which it keeps in a file of that node that only this user can read.

    Args:
        port: Port to listen on; 0 selects a free one.
        token: Token; by default that of the environment, or a new one.
        operator_token: Operator's token; by default that of the environment. Without one, operators' actions are refused.
        run: Id of the run; by default that of the environment, or a new one.
        options: Options of the Ray actor, such as ``name``, ``lifetime`` or ``scheduling_strategy``.

    Raises:
        ConfigurationError: ``max_restarts`` is given without a ``port``, or a setting is wrong.
    """
    if options.get("max_restarts") and not port:
        raise ConfigurationError(
            "a coordinator that may be restarted needs a fixed port, so that agents find it again: "
            "start_coordinator(port=7400, max_restarts=...)"
        )
    # Chosen here instead of in the actor, so that a restarted actor uses the same.
    settings = ServerSettings.load(
        token=Secret(token) if token else None, operator_token=Secret(operator_token) if operator_token else None, run=run or None
    )
    secret, operator = settings.token or generate(), settings.operator_token
    name = settings.run or f"run-{secrets.token_hex(4)}"
    actor = ray.remote(CoordinatorActor).options(**{"num_cpus": 0, **options}).remote(port, name)
    actor.begin.remote(secret.reveal(), None if operator is None else operator.reveal(), bool(options.get("max_restarts")))
    return actor
