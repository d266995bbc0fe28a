"""Rollout side of :class:`~weightsync_callbacks.callbacks.RolloutCallback`: executes orders at every replica's server."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import accumulate
from pathlib import PurePosixPath
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, TypeVar, cast

import msgspec

from weightsync.config import ClientSettings, Secret
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError, MembershipError, WeightSyncError, to_wire
from weightsync.external.clients.http import EngineHttp, HttpCall
from weightsync.model import PauseMode, TensorSpec
from weightsync_callbacks.broker import Answered, Name, Order
from weightsync_callbacks.mail import follow_signals, follower_http, request_until
from weightsync_callbacks.mailbox import Signal
from weightsync_disaggregated.clients import sglang
from weightsync_disaggregated.clients import weightsync as own
from weightsync_disaggregated.clients.bodies import GroupSpec, destroy_group, init_group

_log = logging.getLogger(__name__.replace("_", ".", 1))  # below weightsync, whose level and handlers it has
_ANSWER_SECONDS = 30.0
_SHOWN = 500
_AT_ONCE = 8  # concurrent orders, for example for several groups
_REMEMBERED = 1024

Names = Annotated[list[Name], msgspec.Meta(max_length=1 << 20)]
Group = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Label = Annotated[str, msgspec.Meta(max_length=256)]
B = TypeVar("B", bound="_Body")


class _Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Body of an order. Unknown fields are rejected, because the request carries the servers' key."""


class _InitGroup(_Body, frozen=True, kw_only=True):
    group_name: Group
    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    backend: Literal["nccl", "gloo"]
    world_size: int | None = None


class _Distributed(_Body, frozen=True, kw_only=True):
    group_name: Group
    names: Names
    dtypes: list[Annotated[str, msgspec.Meta(max_length=32)]]
    shapes: list[tuple[int, ...]]
    load_format: Literal["flattened_bucket"] | None = None
    finished: bool = False
    weight_version: Label | None = None


class _Disk(_Body, frozen=True, kw_only=True):
    model_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    weight_version: Label | None = None


class _Destroy(_Body, frozen=True, kw_only=True):
    group_name: Group


class _PauseBody(_Body, frozen=True, kw_only=True):
    mode: PauseMode = "abort"


class _Continue(_Body, frozen=True, kw_only=True):
    pass


class Server(NamedTuple):
    """Server of one replica: its URL and its number of engine ranks."""

    url: str
    ranks: int = 1


class Admitting(Protocol):
    """Interface that is paused together with the engines: a :class:`~weightsync_rollouts.RolloutController`."""

    def pause(self) -> None:
        """Admit no rollouts."""
        ...

    def resume(self) -> None:
        """Admit rollouts again."""
        ...


class UpdateServers:
    """Client that sends each order to all servers concurrently. Close it.

    Engine ranks follow the trainer in each group: those of the first server start at rank 1, and so on.

    Args:
        servers: Servers by replica name.
        token: API key of the servers.
        kind: Routes of the servers: ``weightsync`` (:mod:`weightsync_disaggregated`) or ``sglang``.
        checkpoints: Absolute path, as the servers see it, below which they may load checkpoints. ``None`` forbids all.

    Raises:
        ConfigurationError: There is no server, ``kind`` is unknown, or ``checkpoints`` is not absolute.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        *,
        token: Secret | None = None,
        kind: str = "weightsync",
        checkpoints: str | None = None,
    ) -> None:
        if kind not in ("weightsync", "sglang") or not servers:
            raise ConfigurationError(f"{len(servers)} servers of kind {kind!r}: give at least one, of kind weightsync or sglang")
        if checkpoints is not None and not checkpoints.startswith("/"):
            raise ConfigurationError(f"checkpoints={checkpoints!r} is not the absolute path of a directory, as the servers see it")
        self._kind, self._checkpoints = kind, checkpoints
        self._ranks = [server.ranks for server in servers.values()]
        self._engines = {name: EngineHttp(server.url, token) for name, server in servers.items()}
        self._threads = ThreadPoolExecutor(_AT_ONCE * len(servers), thread_name_prefix="weightsync-order")

    async def aclose(self) -> None:
        """End running requests and close connections."""
        for engine in self._engines.values():
            engine.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def carry_out(self, command: Order) -> str:
        """Send an order to all servers and return their answers.

        Raises:
            LoadError: Servers failed. The message names each of them.
            ConfigurationError: The order is invalid. It was sent to no server.
        """
        answer = ""
        for calls in self._steps(command):
            answer = await self._send(command, calls)
        return answer

    def _steps(self, command: Order) -> list[list[HttpCall]]:
        """Return the requests of each step: one for each server."""
        match command.kind:
            case "init_group":
                return [self._groups(_body(command, _InitGroup), command.timeout)]
            case "update_from_distributed":
                calls = [self._update(_body(command, _Distributed))]
            case "update_from_disk":
                calls = [self._from_disk(_body(command, _Disk))]
            case "destroy_group":
                calls = [destroy_group(_body(command, _Destroy).group_name)]
            case "pause" if self._kind == "sglang":
                calls = [sglang.pause_generation(sglang.sglang_mode(_body(command, _PauseBody).mode)), sglang.BEGIN]
            case "pause":
                calls = [own.begin(None, None, _body(command, _PauseBody).mode, None)]
            case "continue":
                _body(command, _Continue)
                calls = [sglang.END, sglang.CONTINUE_GENERATION] if self._kind == "sglang" else [own.END]
            case _:
                raise ConfigurationError(f"unknown order {command.kind!r}")
        return [[call] * len(self._engines) for call in calls]

    def _update(self, bucket: _Distributed) -> HttpCall:
        try:
            specs = [TensorSpec(*spec) for spec in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True)]
        except ValueError:
            raise ConfigurationError("the names, dtypes and shapes of an order differ in length") from None
        flattened = bucket.load_format is not None
        if self._kind == "sglang":
            return sglang.update(specs, bucket.group_name, bucket.weight_version, last=bucket.finished, flattened=flattened)
        # weightsync's servers commit on ``continue``, not with the last bucket
        return own.update(specs, bucket.group_name, bucket.weight_version, flattened=flattened)

    def _from_disk(self, request: _Disk) -> HttpCall:
        """Return the request to load safetensors from a path below the checkpoint directory."""
        root = self._checkpoints
        if root is None:
            raise ConfigurationError("loading from disk is disabled: give UpdateServers(checkpoints=...) a directory")
        path = PurePosixPath(request.model_path)
        if ".." in path.parts or not path.is_relative_to(root) or not request.model_path.isprintable():
            raise ConfigurationError(f"{request.model_path[:200]!r} is not a path below the checkpoint directory {root}")
        version = {} if request.weight_version is None else {"weight_version": request.weight_version}
        body = {"model_path": request.model_path, "load_format": "safetensors"} | version  # which hold no code
        return HttpCall("POST", "/update_weights_from_disk", body)

    def _groups(self, group: _InitGroup, timeout: float) -> list[HttpCall]:
        world = 1 + sum(self._ranks)
        if group.world_size not in (None, world):
            raise ConfigurationError(f"the trainer announced {group.world_size} ranks, but it and the engines have {world}")
        specs = [
            GroupSpec(group.master_address, group.master_port, offset, world, group.group_name, group.backend)
            for offset in accumulate(self._ranks[:-1], initial=1)
        ]
        return [init_group(spec, None if self._kind == "sglang" else timeout) for spec in specs]

    async def _send(self, command: Order, calls: Sequence[HttpCall]) -> str:
        loop, deadline = asyncio.get_running_loop(), Deadline(command.timeout)

        async def ask(engine: EngineHttp, call: HttpCall) -> object:
            try:
                return await loop.run_in_executor(self._threads, engine.call, call, deadline)
            except WeightSyncError as error:
                return error

        answers = await asyncio.gather(*map(ask, self._engines.values(), calls))
        shown = [
            f"{name}: {str(answer.get('message', answer) if isinstance(answer, dict) else answer)[:_SHOWN]}"
            for name, answer in zip(self._engines, answers, strict=True)
        ]
        failed = [text for text, answer in zip(shown, answers, strict=True) if isinstance(answer, WeightSyncError)]
        if failed:
            raise LoadError(f"{command.kind} failed at {len(failed)} of {len(answers)} replicas: {' | '.join(failed)}")
        return " | ".join(shown)


def _body(command: Order, kind: type[B]) -> B:
    try:
        return msgspec.convert(command.body, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"invalid body of order {command.kind!r}: {error}") from None


class CommandFollower:
    """Executes the orders of a :class:`~weightsync_callbacks.callbacks.RolloutCallback`, each once, as they are pushed.

    Use it on one event loop, in an ``async with``. Only one follower may be connected to a coordinator.

    Args:
        settings: Address of the coordinator, and timeouts.
        servers: The servers. Closed with the follower.
        controller: Paused and resumed together with the engines.
    """

    def __init__(self, settings: ClientSettings, servers: UpdateServers, controller: Admitting | None = None) -> None:
        self._settings, self._servers, self._controller = settings, servers, controller
        self._http = follower_http(settings)
        self._done: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._outcomes: OrderedDict[str, asyncio.Task[tuple[str, str | None]]] = OrderedDict()
        """Outcomes by order id. An order that arrives again, after a restart of the coordinator, is answered but not repeated."""
        self._paused = False
        self.ended = asyncio.create_task(self._follow(), name="follow orders")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tasks = [self.ended, *self._done.values(), *self._outcomes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()
        await self._servers.aclose()

    async def _follow(self) -> None:
        async with aclosing(cast(Any, follow_signals(self._http, self._settings, "/v1/rollouts/orders/events"))) as signals:
            async for signal in signals:
                key = (signal.epoch, signal.number)
                self._done[key] = asyncio.create_task(self._carry_out(signal), name=f"order {signal.number}")
                self._done[key].add_done_callback(self._discard(key))

    def _discard(self, key: tuple[str, int]) -> Callable[[asyncio.Task[None]], None]:
        def discard(task: asyncio.Task[None]) -> None:
            self._done.pop(key, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.warning("could not report the outcome of an order: %s", error)

        return discard

    async def _carry_out(self, signal: Signal) -> None:
        where = f"/v1/rollouts/orders/{signal.number}"
        try:
            content = await request_until(
                self._http, self._settings, "GET", f"{where}?epoch={signal.epoch}", b"", Deadline(_ANSWER_SECONDS)
            )
        except MembershipError:  # it timed out or was already answered
            return
        outcome = self._outcomes.get(signal.id)
        if outcome is None:
            outcome = self._outcomes[signal.id] = asyncio.create_task(self._try(content.content))
            while len(self._outcomes) > _REMEMBERED:
                self._outcomes.popitem(last=False)
        message, failure = await asyncio.shield(outcome)
        answered = Answered(signal.epoch, message, failure)
        await request_until(self._http, self._settings, "POST", where, msgspec.json.encode(answered), Deadline(_ANSWER_SECONDS))

    async def _try(self, content: bytes) -> tuple[str, str | None]:
        """Execute an order. Returns a message, and the kind of the error if it failed."""
        try:
            return await self._do(msgspec.json.decode(content, type=Order)), None
        except Exception as error:  # noqa: BLE001 - sent to the trainer, and logged here
            if not isinstance(error, WeightSyncError):
                _log.exception("an order failed")
            kind, message = to_wire(error)
            return message, kind

    async def _do(self, command: Order) -> str:
        if command.kind == "pause" and not self._paused and self._controller is not None:
            self._controller.pause()
            self._paused = True
        answer = await self._servers.carry_out(command)
        if command.kind == "continue" and self._paused and self._controller is not None:
            self._controller.resume()
            self._paused = False
        return answer
