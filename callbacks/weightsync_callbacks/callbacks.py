"""Trainer side of a trainer-driven update: the engine interface, executed by the rollout controller.

A trainer that broadcasts through a process group (the disaggregated update, SGLang, LMDeploy) calls a :class:`RolloutCallback` as
if it were the engine. Each call becomes an order in the coordinator's mailbox. A
:class:`~weightsync_callbacks.orders.CommandFollower` beside the rollout controller receives it, executes it at every replica's
server, and reports the outcome. Calls that pair with a collective return a future, because the trainer must run its own part of
the collective before the outcome is known.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from weightsync import forks
from weightsync.closing import Closeable
from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded
from weightsync.model import PauseMode, TensorSpec
from weightsync.server.http_client import coordinator_http
from weightsync_callbacks.broker import Order
from weightsync_callbacks.mail import request_until

_GRACE = 5.0

T = TypeVar("T")


class RolloutCallback(Closeable):
    """The calls of an engine, sent through the coordinator. Several groups, by name, may be in use at the same time. Close it.

    Every call has a unique id. It is repeated while the coordinator is unreachable, and executed once.

    Args:
        settings: Address of the coordinator, and timeouts.
        timeout: Default time limit of a call in seconds.

    Raises:
        LoadError: Replicas failed. The message names all of them. Like the following errors, it is raised by every call or its
            future.
        CoordinatorUnreachable: The coordinator did not answer before the time limit. The message names its address.
        DeadlineExceeded: No rollout controller executed the call.

    ::

        callback = RolloutCallback(ClientSettings.load(), timeout=300)
        joined = callback.init_group("main", address, port, backend="nccl")    # the engines wait for rank 0
        group = init_custom_process_group(...)                                 # rank 0
        joined.result()
        callback.pause()
        for bucket in buckets:
            loaded = callback.update_from_distributed("main", bucket.specs, last=bucket is buckets[-1], version="run@7")
            group.broadcast(bucket.memory)
            loaded.result()
        callback.continue_generation()
    """

    def __init__(self, settings: ClientSettings, timeout: float = 300.0) -> None:
        self._settings, self._timeout = settings, timeout
        self._origin = forks.Origin()
        self._loop = forks.event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightsync-callback", daemon=True)
        self._thread.start()
        self._closed = False
        self._http = self._wait(self._open(), 30.0)

    async def _open(self) -> Any:  # noqa: ANN401 - httpx's client, made on its event loop
        return coordinator_http(self._settings)

    def init_group(
        self,
        group: str,
        address: str,
        port: int,
        *,
        backend: str = "nccl",
        world_size: int | None = None,
        timeout: float | None = None,
    ) -> Future[str]:
        """Order every engine rank to join the trainer's process group. The follower knows the ranks and their offsets.

        Args:
            group: Name of the group.
            address: Address of the trainer's rank 0.
            port: Its port.
            backend: ``nccl`` or ``gloo``.
            world_size: If given, must equal the number of engine ranks plus one, the trainer.
            timeout: Time limit in seconds.

        Returns:
            A future of the replicas' answers.
        """
        body: dict[str, Any] = {"group_name": group, "master_address": address, "master_port": port, "backend": backend}
        return self._order("init_group", body | ({} if world_size is None else {"world_size": world_size}), timeout)

    def update_from_distributed(
        self,
        group: str,
        specs: tuple[TensorSpec, ...] | list[TensorSpec],
        *,
        last: bool = False,
        version: str | None = None,
        flattened: bool = True,
        timeout: float | None = None,
    ) -> Future[str]:
        """Order every engine rank to receive one bucket, which the trainer then broadcasts through ``group``.

        Args:
            group: Name of the group.
            specs: Tensors of the bucket, in order.
            last: Whether this is the last bucket of the update.
            version: Label of the version.
            flattened: Whether the bucket is one flat buffer.
            timeout: Time limit in seconds.

        Returns:
            A future that is done when the bucket is loaded.
        """
        body: dict[str, Any] = {
            "group_name": group,
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "load_format": "flattened_bucket" if flattened else None,
            "finished": last,
        }
        return self._order("update_from_distributed", body | ({} if version is None else {"weight_version": version}), timeout)

    def update_from_disk(self, path: str, *, version: str | None = None, timeout: float | None = None) -> Future[str]:
        """Order every engine to load a checkpoint from a path that it can read (SGLang)."""
        body: dict[str, Any] = {"model_path": path}
        return self._order("update_from_disk", body | ({} if version is None else {"weight_version": version}), timeout)

    def destroy_group(self, group: str, timeout: float | None = None) -> None:
        """Order every engine rank to leave the group, and wait."""
        self._finish("destroy_group", {"group_name": group}, timeout)

    def pause(self, mode: PauseMode = "abort", timeout: float | None = None) -> None:
        """Stop admitting rollouts, and pause the engines. Interrupted rollouts continue afterwards."""
        self._finish("pause", {"mode": mode}, timeout)

    def continue_generation(self, timeout: float | None = None) -> None:
        """Resume the engines, and admit rollouts again."""
        self._finish("continue", {}, timeout)

    def close(self) -> None:
        """Close connections. Pending calls fail. Idempotent. Does nothing in a forked child."""
        if self._origin.elsewhere:
            return
        if self._closed:
            return
        self._closed = True
        try:
            self._wait(self._end(), 30.0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30.0)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._http.aclose()

    def _order(self, kind: str, body: dict[str, Any], timeout: float | None) -> Future[str]:
        if self._closed:
            raise Aborted("this callback is closed")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        order = Order(uuid.uuid4().hex, kind, body, deadline.seconds)
        return asyncio.run_coroutine_threadsafe(self._send(order, deadline), self._loop)

    async def _send(self, command: Order, deadline: Deadline) -> str:
        # Waits a little longer than the order's own time limit, so that the coordinator's error can arrive.
        try:
            answer = await request_until(
                self._http, self._settings, "POST", "/v1/rollouts/orders", msgspec.json.encode(command), deadline, grace=_GRACE
            )
        except asyncio.CancelledError:
            raise Aborted(f"this callback was closed before its order {command.kind!r} was answered") from None
        return str(msgspec.json.decode(answer.content)["message"])

    def _finish(self, kind: str, body: dict[str, Any], timeout: float | None) -> None:
        answer = self._order(kind, body, timeout)
        answer.result((self._timeout if timeout is None else timeout) + 2 * _GRACE)

    def _wait(self, what: Coroutine[Any, Any, T], seconds: float) -> T:
        answer = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return answer.result(seconds)
        except TimeoutError:
            raise DeadlineExceeded(f"the callback's thread did not answer within {seconds:g} s") from None
