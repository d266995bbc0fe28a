"""The token in a file on every node of the cluster, for processes that join on their own.

Ray writes the ``env_vars`` of a ``runtime_env`` into logs that every user of a node can read, so a token must not be in them. The
arguments of an actor's method go from process to process and are stored nowhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.config import Address, Secret
from weightsync.errors import WeightSyncError
from weightsync.protocol.tokens import TokenFile
from weightsync.ray.actor_calls import ActorCalls

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
