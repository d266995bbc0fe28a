"""Manager of a trainer's and its replicas' Ray actors.

The token in a file on every node of the cluster, for processes that join on their own.

Ray writes the ``env_vars`` of a ``runtime_env`` into logs that every user of a node can read, so a token must not be in them. The
arguments of an actor's method go from process to process and are stored nowhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.closing import Closeable, OnFailure
from weightsync.config import Address, ClientSettings, Secret, ServerSettings, agent_environment
from weightsync.coordinator.status import Status
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, CoordinatorUnreachable, MembershipError, PeerLost, WeightSyncError
from weightsync.forks import Origin
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.tokens import TokenFile, secret_of
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync_ray.actor_calls import Access, ActorCalls, call, handles
from weightsync_ray.coordinator_actor import cluster_settings, with_token
from weightsync_ray.rejoining import ActorGroup, Rejoining, is_joined, leave, publish

_CLOSE_SECONDS = 5.0


class _Keeper:
    """Actor on one node, which writes the file and removes it."""

    def __init__(self) -> None:
        self._file: TokenFile | None = None

    def write(self, port: int, token: str, directory: str) -> None:
        self._file = TokenFile(port, Secret(token), Path(directory))

    def remove(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file.path.parent.rmdir()


class TokenFiles:
    """Files with one coordinator's token, at the same path on all nodes, that only this user can read. Thread-safe."""

    def __init__(self, coordinator: Address, token: Secret) -> None:
        self._port, self._token = coordinator.port, token
        named = hashlib.sha256(coordinator.url.encode()).hexdigest()[:16]
        self._directory = Path(tempfile.gettempdir()) / f"weightsync-ray-{os.getuid()}-{named}"
        self._keepers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def place(self, timeout: float) -> Path:
        """Write the file on the nodes that do not have it yet, and return its path.

        Raises:
            ConfigurationError: A node cannot keep it, for example because the directory belongs to another user there.
            DeadlineExceeded: ``timeout`` seconds passed.
            PeerLost: A node went away while its file was written.
        """
        with self._lock:
            alive = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
            fresh = {node: self._keeper(node) for node in alive if node not in self._keepers}
            arguments = self._port, self._token.reveal(), str(self._directory)
            calls = [(f"node {node}", keeper.write.remote(*arguments)) for node, keeper in fresh.items()]
            ActorCalls("leaving the token on all nodes", calls).wait(timeout)
            self._keepers |= fresh
        return self._directory / f"{self._port}.token"

    def _keeper(self, node: str) -> Any:  # noqa: ANN401 - Ray's types
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(_Keeper).options(num_cpus=0, scheduling_strategy=there).remote()

    def close(self, remove: bool) -> None:
        """End the actors. With ``remove``, their files go, because the coordinator has ended."""
        with self._lock:
            keepers, self._keepers = self._keepers, {}
        if not ray.is_initialized():
            return
        calls = [(f"node {node}", keeper.remove.remote()) for node, keeper in keepers.items() if remove]
        with contextlib.suppress(WeightSyncError, OSError, ray.exceptions.RayError):  # a node that is gone has no file
            ActorCalls("removing the token", calls).wait(_CLOSE_SECONDS)
        for keeper in keepers.values():
            ray.kill(keeper)


_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has
_LEAVE_SECONDS = 10.0
_ALIVE_SECONDS = 2.0
"""Seconds in which a live actor answers, unless it is busy."""
_GRACE = 5.0
"""Seconds that an update may exceed its own timeout, so that a more specific error can arrive first."""


class Manager(Closeable):
    """Brings trainer workers and replicas in Ray actors to a version with one call.

    The actors belong to the user and may have any class and placement. The manager lets them join a coordinator and then asks the
    trainer's ranks to publish. Initialize Ray first, and close the manager before Ray shuts down.

    An actor that dies is a lost rank, which the coordinator detects by its connection. If Ray restarts it, it rejoins automatically
    and its replica receives the published version. Replicas that join on their own, such as vLLM with :attr:`environment`, take
    part like all others.

    Example::

        manager = weightsync_ray.Manager()
        manager.add_trainer(workers, state=lambda worker: worker.model)
        manager.add_replica("policy-0", engines, adapter=lambda worker: MyAdapter(worker.engine))
        report = manager.update_weights(7)

    Args:
        coordinator: ``None`` runs one in this process, on this node's address. Otherwise the URL of a running one, or the handle
            that :func:`start_coordinator` returned.
        token: Token for a coordinator given by URL, as for :class:`weightsync.Trainer`.
        settings: Settings of a coordinator in this process.

    Raises:
        ConfigurationError: Ray is not initialized, or a setting is wrong.
        CoordinatorUnreachable: The coordinator does not answer.
        AuthenticationError: The coordinator rejects the token.
    """

    def __init__(
        self,
        coordinator: str | Any | None = None,  # noqa: ANN401 - an actor's handle
        *,
        token: str | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        self._origin = Origin()
        if not ray.is_initialized():
            raise ConfigurationError("a weightsync manager needs Ray: call ray.init() first")
        if coordinator is not None and settings is not None:
            raise ConfigurationError("settings are those of a coordinator in this process, but this coordinator runs elsewhere")
        with ExitStack() as owned:
            url = coordinator
            if coordinator is None:
                server = owned.enter_context(BackgroundServer(cluster_settings() if settings is None else with_token(settings)))
                url, token = server.url, server.token
            elif isinstance(coordinator, ray.actor.ActorHandle):
                access: Access = ray.get(coordinator.access.remote(), timeout=ClientSettings.load().timeouts.connect)
                url, token = access.url, access.token
            self._settings = ClientSettings.load(coordinator=url, token=Secret(token) if token else None)
            token_of_run = secret_of(self._settings)
            self._access = Access(self._settings.coordinator.url, token_of_run.reveal() if token_of_run is not None else None)
            self.status()  # fails if the coordinator is unreachable or rejects the token
            self._members = Rejoining(self._settings, self._access)
            owned.callback(self._members.close)
            owned.callback(self._leave_all)
            self._tokens = None if token_of_run is None else TokenFiles(self._settings.coordinator, token_of_run)
            if self._tokens is not None:
                owned.callback(self._tokens.close, remove=coordinator is None)
            self._owned = owned.pop_all()

    @property
    def coordinator(self) -> str:
        """URL of the coordinator."""
        return self._access.url

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which another process joins on its own (``env_vars`` of a ``runtime_env``).

        Ray writes them into logs that other users can read, so the token is not among them: they name a file, which this leaves on
        every node of the cluster for this user alone. Look again after nodes were added.

        Raises:
            ConfigurationError: A node cannot keep the file.
            DeadlineExceeded: A node did not answer in time.
        """
        variables = agent_environment(msgspec.structs.replace(self._settings, token=None))
        if self._tokens is not None:
            # An empty variable is none, whatever Ray was started with.
            variables |= {"WEIGHTSYNC_TOKEN": "", "WEIGHTSYNC_TOKEN_FILE": str(self._tokens.place(self._settings.timeouts.connect))}
        return variables

    def add_trainer(
        self,
        workers: object,
        state: Callable[[Any], Any],
        *,
        timeout: float = 300.0,
        **options: Any,  # noqa: ANN401 - those of weightsync.Trainer
    ) -> None:
        """Make these actors the trainer's ranks, and wait until all have joined. Workers of an earlier trainer leave.

        If this raises, no rank stays joined.

        Args:
            workers: Handles in rank order, or an object that has them as ``workers``.
            state: Runs in each actor, with the actor's object. Returns the module or state dict to publish.
            timeout: Seconds for all ranks to join.
            options: Options of :class:`weightsync.Trainer`.

        Raises:
            PeerLost: An actor died.
            DeadlineExceeded: ``timeout`` passed.
            WeightSyncError: :class:`weightsync.Trainer` raised it.
        """
        self._add(ActorGroup(None, handles(workers), state, options), timeout)

    def add_replica(
        self,
        name: str,
        workers: object,
        adapter: Callable[[Any], Any],
        *,
        timeout: float = 300.0,
        **options: Any,  # noqa: ANN401 - those of weightsync.Engine
    ) -> None:
        """Make these actors the ranks of replica ``name``, and wait until all have joined. The replica is then seeded.

        May be called at any time, also during an update.

        Args:
            name: Name of the replica.
            workers: Handles in rank order, or an object that has them as ``workers``.
            adapter: Runs in each actor, with the actor's object. Returns its :class:`weightsync.EngineAdapter`.
            timeout: Seconds for all ranks to join.
            options: Options of :class:`weightsync.Engine`.

        Raises:
            ConfigurationError: ``name`` is empty.
            PeerLost: An actor died.
            DeadlineExceeded: ``timeout`` passed.
            WeightSyncError: :class:`weightsync.Engine` raised it.
        """
        if not name:
            raise ConfigurationError("a replica needs a name")
        self._add(ActorGroup(name, handles(workers), adapter, options), timeout)

    def _add(self, group: ActorGroup, timeout: float) -> None:
        _refuse_captured(group.source)
        self._remove(group.replica)
        calls = ActorCalls("joining", [(place, group.join(place, self._access)) for place in group.places])
        with OnFailure(self._leave, group):
            calls.wait(timeout)
        self._members.add(group)

    def remove_replica(self, name: str) -> None:
        """Disconnect a replica's ranks. The replica keeps its weights and receives no further updates.

        Raises:
            MembershipError: This manager has no such replica.
        """
        if not self._remove(name):
            raise MembershipError(f"this manager has no replica {name!r}")

    def update_weights(self, version: int, timeout: float = 300.0) -> RoundResult:
        """Publish the trainer's weights as ``version`` to every replica, and wait until they serve it.

        Ray runs an actor's calls in order, so the trainer's actors first finish earlier calls.

        Returns:
            The result of the round.

        Raises:
            PeerLost: A trainer's actor died.
            WeightSyncError: :meth:`weightsync.Trainer.publish` raised it.
        """
        result: RoundResult = self._publish(version, timeout).wait(timeout + _GRACE)[0]  # rank 0 has it
        return result

    async def update_weights_async(self, version: int, timeout: float = 300.0) -> RoundResult:
        """Do the same as :meth:`update_weights`, on an event loop."""
        result: RoundResult = (await self._publish(version, timeout).join(timeout + _GRACE))[0]
        return result

    def _publish(self, version: int, timeout: float) -> ActorCalls:
        Deadline(timeout)  # validates the timeout
        group = self._members.group(None)
        if group is None:
            raise ConfigurationError("this manager has no trainer: call add_trainer() first")
        if self._members.trainer_lost():  # otherwise the other ranks would wait for the lost one until the timeout
            self._refuse_lost(group)
        calls = [(place, call(group.actors[place.rank], publish, place, version, timeout)) for place in group.places]
        return ActorCalls(f"publishing version {version}", calls)

    def _refuse_lost(self, group: ActorGroup) -> None:
        """Raise PeerLost if a trainer's actor is gone. A rank whose connection broke reconnects, so it is waited for."""
        try:
            missing = group.missing(self.status())
        except CoordinatorUnreachable:
            missing = group.places
        probes = {call(group.actors[place.rank], is_joined, place): place for place in missing}
        # An actor that does not answer in this time is busy with another call, and publishes after it.
        answered, _ = ray.wait(list(probes), num_returns=len(probes), timeout=_ALIVE_SECONDS) if probes else ([], [])
        for ref in answered:
            try:
                alive = ray.get(ref, timeout=_ALIVE_SECONDS)
            except RayError:
                alive = False
            if not alive:
                raise PeerLost(
                    f"{probes[ref]}: its actor died or is being restarted. Continue when it has its model again, or call "
                    "add_trainer() with other actors"
                )

    def status(self) -> Status:
        """Status of the coordinator: which version each replica serves."""
        with Client(self._settings) as client:
            return client.status()

    def close(self) -> None:
        """Disconnect all ranks and stop a coordinator in this process. Replicas keep their weights, and the actors stay alive.

        Does nothing in a forked child.
        """
        if self._origin.elsewhere:
            return
        self._owned.close()

    def _remove(self, replica: str | None) -> bool:
        group = self._members.remove(replica)
        if group is not None:
            self._leave(group)
        return group is not None

    def _leave_all(self) -> None:
        for name in self._members.names():
            self._remove(name)

    def _leave(self, group: ActorGroup) -> None:
        """Ask all ranks to leave. A rank that cannot be reached has left already."""
        if not ray.is_initialized():
            return
        try:
            ActorCalls("leaving", [(place, call(group.actors[place.rank], leave, place)) for place in group.places]).wait(
                _LEAVE_SECONDS
            )
        except (WeightSyncError, ray.exceptions.RayError) as error:
            _log.info("could not ask all ranks to leave: %s", error)


def _refuse_captured(function: Callable[[Any], Any]) -> None:
    """Reject a function that captures a model of this process: the actor would publish that copy instead of its own model."""
    if not callable(function):
        raise ConfigurationError(f"pass a function of the actor's object, not {function!r}")
    if not inspect.isfunction(function):
        return
    captured = inspect.getclosurevars(function)
    taken = {**captured.nonlocals, **(captured.globals if function.__module__ == "__main__" else {})}
    for name, value in taken.items():
        if isinstance(value, torch.Tensor | torch.nn.Module):
            raise ConfigurationError(
                f"{name!r} is a {type(value).__name__} of this process, so Ray would send a copy of it. Get it from the actor "
                "instead, through the function's argument: lambda worker: worker.model"
            )
