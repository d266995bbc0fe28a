"""The trainer's side of an update that it drives itself: the engine's interface, carried out by the rollout controller.

A trainer that broadcasts through a process group (the disaggregated update, SGLang, LMDeploy) calls a :class:`RolloutCallback`
as if it were the engine. Each call becomes an order in the coordinator's mailbox; an :class:`OrderFollower` beside the rollout
controller hears of it at once, carries it out at every replica's server, and answers. Calls that pair with a collective return a
future, since the trainer has its own part of the collective to do before the answer can come.
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
from weightsync.rollouts.broker import Order
from weightsync.rollouts.mail import asked
from weightsync.server.watch import coordinator_http

__all__ = ["RolloutCallback"]

_GRACE = 5.0

T = TypeVar("T")


class RolloutCallback(Closeable):
    """Same calls as an engine's, through the coordinator. Several groups, by name, may be under way at once. Close it.

    Every call carries an id of its own: it is repeated while the coordinator cannot be reached, and carried out once. Raises (or
    its future does) what the replicas answered, all of them named; :class:`~weightsync.errors.CoordinatorUnreachable` with the
    address if the coordinator is gone until ``timeout``; :class:`~weightsync.errors.DeadlineExceeded` if no rollout controller
    carried it out.

    ::

        callback = RolloutCallback(ClientSettings.load(), timeout=300)
        joined = callback.init_group("main", address, port, backend="nccl")    # the engines wait for us there
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

    async def _open(self) -> Any:  # noqa: ANN401 - httpx's client, made on its loop
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
        """Have every engine rank join the trainer's group of this name. The follower knows the ranks and their offsets.

        ``world_size`` is checked against theirs plus one (the trainer) where it is given.
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
        """Have every engine rank receive one bucket that the trainer broadcasts through ``group`` now; done when it is loaded."""
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
        """Have every engine load a checkpoint from a path that it can read (SGLang)."""
        body: dict[str, Any] = {"model_path": path}
        return self._order("update_from_disk", body | ({} if version is None else {"weight_version": version}), timeout)

    def destroy_group(self, group: str, timeout: float | None = None) -> None:
        """Have every engine rank leave the group."""
        self._finish("destroy_group", {"group_name": group}, timeout)

    def pause(self, mode: PauseMode = "abort", timeout: float | None = None) -> None:
        """Admit no rollouts, and have the engines stop. What was under way is gone on with afterwards."""
        self._finish("pause", {"mode": mode}, timeout)

    def continue_generation(self, timeout: float | None = None) -> None:
        """Generate, and admit again."""
        self._finish("continue", {}, timeout)

    def close(self) -> None:
        """Close connections; calls under way fail. Safe twice. In a forked child: nothing."""
        if self._origin.elsewhere:
            return
        if self._closed:
            return
        self._wait(self._http.aclose(), 30.0)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _order(self, kind: str, body: dict[str, Any], timeout: float | None) -> Future[str]:
        if self._closed:
            raise Aborted("this callback is closed")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        order = Order(uuid.uuid4().hex, kind, body, deadline.seconds)
        return asyncio.run_coroutine_threadsafe(self._ask(order, deadline), self._loop)

    async def _ask(self, command: Order, deadline: Deadline) -> str:
        # A little longer than the order's own, so that the coordinator's word on it is heard, if it has one.
        answer = await asked(
            self._http, self._settings, "POST", "/v1/rollouts/orders", msgspec.json.encode(command), deadline, patience=_GRACE
        )
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
