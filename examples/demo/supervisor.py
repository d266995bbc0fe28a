"""The owner of the demo's processes: starts each, kills one where the plot wants it, and starts it again at the same address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Self

from examples.demo.coordinator import CoordinatorSettings
from examples.demo.family import Child, Family
from examples.demo.records import Order
from examples.demo.reports import Report
from examples.demo.settings import ReplicaSettings, Settings, TrainerSettings
from weightsync.config import Address
from weightsync.errors import ConfigurationError
from weightsync.model import FIRST_EPOCH

__all__ = ["Supervisor"]

_LOOPBACK = "127.0.0.1"
_REPLICAS = {"transformers": "examples.demo.replica", "vllm": "examples.demo.vllm_replica"}


class Supervisor:
    """Holds what outlives a process: the ports of the coordinator and of the replicas, the run's id, the trainer's epoch.

    Restarts are asked for by the owner of this object; what ends without being killed here fails the family.
    """

    def __init__(self, settings: Settings, family: Family, heard: Callable[[Report], None]) -> None:
        self._settings, self._family, self._heard = settings, family, heard
        self._sockets = contextlib.ExitStack()
        self._run, self._port = f"run-{secrets.token_hex(4)}", 0
        self._listeners: dict[str, socket.socket] = {}
        self.directory = settings.directory or family.directory
        """Where checkpoints go."""
        self.replicas: dict[str, str] = {}
        """Addresses by name."""
        self.epoch = FIRST_EPOCH
        """The trainer's epoch, as far as the demo began it."""
        self.lead: Child | None = None
        """The trainer's rank 0."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()

    async def start_coordinator(self) -> None:
        """Start it, or start it again with the same address, run and history."""
        if not self._port:
            # Bound here and never listened on: nobody else can take the port while the coordinator is down.
            reserved = self._sockets.enter_context(socket.socket())
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((_LOOPBACK, 0))
            self._port = reserved.getsockname()[1]
        wish = CoordinatorSettings(
            parent=os.getpid(), pause_mode=self._settings.pause_mode, port=self._port, run=self._run,
            state_dir=str(self._family.directory / "state"),
        )  # fmt: skip
        await self._family.start("coordinator", "examples.demo.coordinator", wish, self._heard)

    async def start_replica(self, index: int, url: str) -> str:
        """Start a replica, or start it again with the same name and address. Returns its name."""
        name = f"{self._settings.replica_prefix}-{index}"
        listener = self._listeners.get(name)
        if listener is None:
            # Bound here, so that the address is known before the process is ready, and nobody else can take the port.
            listener = self._listeners[name] = self._sockets.enter_context(_listen(self._settings.host))
            host, port = listener.getsockname()[:2]
            self.replicas[name] = Address("http", host, port).url
        wish = ReplicaSettings(
            parent=os.getpid(), name=name, listen_fd=listener.fileno(), coordinator=url,
            directory=str(self._family.directory), settings=self._settings.for_children(),
        )  # fmt: skip
        await self._family.start(name, _REPLICAS[self._settings.engine], wish, self._heard, [listener.fileno()])
        return name

    async def start_trainers(self, url: str, resume: Order | None = None) -> None:
        """Start all ranks. With ``resume`` they go on from that version's checkpoint, in a new epoch."""
        if resume is not None:
            self.epoch += 1
        await asyncio.to_thread(self.directory.mkdir, parents=True, exist_ok=True)
        with socket.create_server((_LOOPBACK, 0), backlog=128) as listener:
            port = listener.getsockname()[1]
            for rank, name in enumerate(self.trainers):
                files = [listener.fileno()] if rank == 0 else []
                wish = TrainerSettings(
                    parent=os.getpid(), rank=rank, world_size=self._settings.trainer_ranks, port=port,
                    listen_fd=listener.fileno() if rank == 0 else None, directory=str(self.directory), coordinator=url,
                    settings=self._settings.for_children(), epoch=self.epoch, resume=resume,
                )  # fmt: skip
                child = await self._family.start(name, "examples.demo.trainer", wish, self._heard, files)
                if rank == 0:
                    self.lead = child

    @property
    def trainers(self) -> list[str]:
        """Names of the trainer's ranks."""
        return [f"trainer-{rank}" for rank in range(self._settings.trainer_ranks)]


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise ConfigurationError(f"replicas cannot listen on --host {host}: {error.strerror or error}") from None
