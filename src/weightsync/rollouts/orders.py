"""The rollout side of :class:`~weightsync.rollouts.callbacks.RolloutCallback`: orders, carried out at every replica's server."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import PurePosixPath
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, TypeVar, cast

import httpx
import msgspec

from weightsync.config import ClientSettings, Secret
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError, MembershipError, WeightSyncError, to_wire
from weightsync.external.clients.sglang_modes import sglang_mode
from weightsync.model import PauseMode
from weightsync.protocol.endpoint import reason
from weightsync.protocol.messages import UNREADABLE
from weightsync.protocol.tokens import bearer
from weightsync.rollouts.broker import Answered, Name, Order
from weightsync.rollouts.mail import asked, followed
from weightsync.rollouts.mailbox import Signal
from weightsync.server.watch import coordinator_http

__all__ = ["CommandFollower", "Server", "UpdateServers"]

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 30.0
_SAID = 500
_REMEMBERED = 1024

Names = Annotated[list[Name], msgspec.Meta(max_length=1 << 20)]
Group = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Label = Annotated[str, msgspec.Meta(max_length=256)]
B = TypeVar("B", bound="_Body")


class _Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an order may ask of servers; anything else in it is refused, since it would be asked with the servers' key."""


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
    shapes: list[list[int]]
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
    """One replica's server, as an update sees it."""

    url: str
    ranks: int = 1


class Admitting(Protocol):
    """What is paused with the engines: a :class:`~weightsync.rollouts.RolloutController`."""

    def pause(self) -> None:
        """Admit nothing."""
        ...

    def resume(self) -> None:
        """Admit again."""
        ...


class UpdateServers:
    """Servers with the routes of :mod:`weightsync.external`, or SGLang's, all told the same at once.

    Engine ranks follow the trainer in each group: those of the first server from rank 1, and so on. ``kind`` says how they pause.
    Servers load from disk only what lies under ``checkpoints``, an absolute path as they see it; ``None``: nothing.
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
            raise ConfigurationError(f"at least one server, of kind weightsync or sglang, not {len(servers)} of {kind!r}")
        if checkpoints is not None and not checkpoints.startswith("/"):
            raise ConfigurationError(f"checkpoints={checkpoints!r}: give the absolute path of a folder, as the servers see it")
        self._servers, self._kind, self._checkpoints = dict(servers), kind, checkpoints
        self._http = httpx.AsyncClient(headers=bearer(token), trust_env=False, follow_redirects=False)

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def carry_out(self, command: Order) -> str:
        """Do it everywhere.

        Raises :class:`~weightsync.errors.LoadError` that names every server that failed, and
        :class:`~weightsync.errors.ConfigurationError` for an order that no server was told of.
        """
        sglang = self._kind == "sglang"
        match command.kind:
            case "init_group":
                group = _body(command, _InitGroup)
                return await self._tell_all(command, "/init_weights_update_group", self._groups(group, command.timeout))
            case "update_from_distributed":
                bucket = _body(command, _Distributed)
                body = msgspec.to_builtins(bucket)
                last = bool(body.pop("finished", False))  # weightsync's servers commit on ``continue``, not with a bucket
                body |= {"load_format": bucket.load_format} | ({"flush_cache": last} if sglang else {})
                return await self._tell_all(command, "/update_weights_from_distributed", body)
            case "update_from_disk":
                return await self._tell_all(command, "/update_weights_from_disk", self._from_disk(_body(command, _Disk)))
            case "destroy_group":
                return await self._tell_all(command, "/destroy_weights_update_group", msgspec.to_builtins(_body(command, _Destroy)))
            case "pause":
                mode = _body(command, _PauseBody).mode
                if sglang:
                    await self._tell_all(command, "/pause_generation", {"mode": sglang_mode(mode)})
                    return await self._tell_all(command, "/begin_weight_update", {})
                return await self._tell_all(command, "/begin_weight_update", {"mode": mode})
            case "continue":
                _body(command, _Continue)
                answer = await self._tell_all(command, "/end_weight_update", {})
                return await self._tell_all(command, "/continue_generation", {}) if sglang else answer
            case _:
                raise ConfigurationError(f"{command.kind!r} is no order that servers know")

    def _from_disk(self, request: _Disk) -> dict[str, Any]:
        """What to ask: a path under the folder of checkpoints, and nothing but safetensors, which hold no code."""
        root = self._checkpoints
        if root is None:
            raise ConfigurationError("servers load nothing from disk here: give UpdateServers the folder (checkpoints=...)")
        path = PurePosixPath(request.model_path)
        if ".." in path.parts or not path.is_relative_to(root) or not request.model_path.isprintable():
            raise ConfigurationError(f"{request.model_path[:200]!r} is not a path under {root}, the folder of checkpoints")
        return {**msgspec.to_builtins(request), "load_format": "safetensors"}

    async def _tell_all(self, command: Order, path: str, body: Mapping[str, Any] | list[dict[str, Any]]) -> str:
        bodies = body if isinstance(body, list) else [body] * len(self._servers)
        answers = await asyncio.gather(
            *(self._tell(server, path, mine, command.timeout) for server, mine in zip(self._servers.values(), bodies, strict=True))
        )
        failed = [f"{name}: {answer}" for name, (good, answer) in zip(self._servers, answers, strict=True) if not good]
        if failed:
            raise LoadError(f"{command.kind} failed at {len(failed)} of {len(answers)} replicas: {' | '.join(failed)}")
        return " | ".join(f"{name}: {answer}" for name, (_, answer) in zip(self._servers, answers, strict=True))

    def _groups(self, request: _InitGroup, timeout: float) -> list[dict[str, Any]]:
        world, body = 1 + sum(server.ranks for server in self._servers.values()), msgspec.to_builtins(request)
        if request.world_size not in (None, world):
            raise ConfigurationError(f"the trainer says {request.world_size} ranks, but it and the engines' ranks are {world}")
        bodies, offset = [], 1
        for server in self._servers.values():
            mine = body | {"world_size": world, "rank_offset": offset}
            bodies.append(mine | ({"timeout": timeout} if self._kind == "weightsync" else {}))
            offset += server.ranks
        return bodies

    async def _tell(self, server: Server, path: str, body: Mapping[str, Any], timeout: float) -> tuple[bool, str]:
        try:
            answer = await self._http.post(server.url.rstrip("/") + path, json=dict(body), timeout=timeout)
        except httpx.HTTPError as error:
            return False, f"{server.url} did not answer: {reason(error)}"
        try:
            decoded = msgspec.json.decode(answer.content, type=dict[str, Any])
        except UNREADABLE:
            decoded = {}
        message = str(decoded.get("message", answer.text))[:_SAID]
        return answer.is_success and decoded.get("success", True) is not False, message or f"HTTP {answer.status_code}"


def _body(command: Order, kind: type[B]) -> B:
    try:
        return msgspec.convert(command.body, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"an order {command.kind!r} of another form than servers are asked: {error}") from None


class CommandFollower:
    """Carries out the orders of a :class:`~weightsync.rollouts.callbacks.RolloutCallback`, each once, as they are pushed.

    ``controller`` is paused with the engines. Made and used on one event loop; use it in an ``async with``. Only one follower may
    listen to a coordinator.
    """

    def __init__(self, settings: ClientSettings, servers: UpdateServers, controller: Admitting | None = None) -> None:
        self._settings, self._servers, self._controller = settings, servers, controller
        self._http = coordinator_http(settings)
        self._done: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._outcomes: OrderedDict[str, asyncio.Task[tuple[str, str | None]]] = OrderedDict()
        """By an order's id: one that comes again, since the coordinator was restarted meanwhile, is answered and not done again."""
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
        async with aclosing(cast(Any, followed(self._http, self._settings, "/v1/rollouts/orders/events"))) as signals:
            async for signal in signals:
                key = (signal.epoch, signal.number)
                self._done[key] = asyncio.create_task(self._carry_out(signal), name=f"order {signal.number}")
                self._done[key].add_done_callback(self._forget(key))

    def _forget(self, key: tuple[str, int]) -> Callable[[asyncio.Task[None]], None]:
        def forget(task: asyncio.Task[None]) -> None:
            self._done.pop(key, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.warning("an order's answer was not heard: %s", error)

        return forget

    async def _carry_out(self, signal: Signal) -> None:
        where = f"/v1/rollouts/orders/{signal.number}"
        try:
            content = await asked(
                self._http, self._settings, "GET", f"{where}?epoch={signal.epoch}", b"", Deadline(_ANSWER_SECONDS)
            )
        except MembershipError:  # it timed out, or was answered already
            return
        outcome = self._outcomes.get(signal.id)
        if outcome is None:
            outcome = self._outcomes[signal.id] = asyncio.create_task(self._try(content.content))
            while len(self._outcomes) > _REMEMBERED:
                self._outcomes.popitem(last=False)
        message, failure = await asyncio.shield(outcome)
        answered = Answered(signal.epoch, message, failure)
        await asked(self._http, self._settings, "POST", where, msgspec.json.encode(answered), Deadline(_ANSWER_SECONDS))

    async def _try(self, content: bytes) -> tuple[str, str | None]:
        """What to answer: a message, and the kind of the error if it is one."""
        try:
            return await self._do(msgspec.json.decode(content, type=Order)), None
        except Exception as error:  # noqa: BLE001 - it crosses to the trainer, and is logged here
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
