"""The rollout side of :class:`~weightsync.rollouts.callbacks.RolloutCallback`: orders, carried out at every replica's server."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, cast

import httpx
import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, LoadError, MembershipError, WeightSyncError, to_wire
from weightsync.messages import UNREADABLE
from weightsync.rollouts.mail import asked, followed
from weightsync.rollouts.watch import coordinator_http
from weightsync.service.auth import bearer
from weightsync.service.endpoint import reason
from weightsync.service.mailbox import Signal
from weightsync.service.rollouts import Answered, Order
from weightsync.service.settings import ClientSettings, Secret

__all__ = ["OrderFollower", "Server", "UpdateServers"]

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 30.0
_SAID = 500
_REMEMBERED = 1024
_SGLANG_MODES = {"wait": "retract", "keep": "in_place"}


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
    """Servers with the routes of :mod:`weightsync.adapters.disaggregated`, or SGLang's, all told the same at once.

    Engine ranks follow the trainer in each group: those of the first server from rank 1, and so on. ``kind`` says how they pause.
    """

    def __init__(self, servers: Mapping[str, Server], *, token: Secret | None = None, kind: str = "weightsync") -> None:
        if kind not in ("weightsync", "sglang") or not servers:
            raise ConfigurationError(f"at least one server, of kind weightsync or sglang, not {len(servers)} of {kind!r}")
        self._servers, self._kind = dict(servers), kind
        self._http = httpx.AsyncClient(headers=bearer(token), trust_env=False, follow_redirects=False)

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def carry_out(self, order: Order) -> str:
        """Do it everywhere. Raises :class:`~weightsync.errors.LoadError` that names every server that failed."""
        body, sglang = dict(order.body), self._kind == "sglang"
        match order.kind:
            case "init_group":
                return await self._tell_all(order, "/init_weights_update_group", self._groups(body, order.timeout))
            case "update_from_distributed":
                last = bool(body.pop("finished", False))
                body |= {"flush_cache": last} if sglang else {}  # weightsync's servers commit on ``continue``, not with a bucket
                return await self._tell_all(order, "/update_weights_from_distributed", body)
            case "update_from_disk":
                return await self._tell_all(order, "/update_weights_from_disk", body)
            case "destroy_group":
                return await self._tell_all(order, "/destroy_weights_update_group", body)
            case "pause":
                if sglang:
                    await self._tell_all(order, "/pause_generation", {"mode": _SGLANG_MODES.get(str(body.get("mode")), "abort")})
                    return await self._tell_all(order, "/begin_weight_update", {})
                return await self._tell_all(order, "/begin_weight_update", body)
            case "continue":
                said = await self._tell_all(order, "/end_weight_update", {})
                return await self._tell_all(order, "/continue_generation", {}) if sglang else said
            case _:
                raise ConfigurationError(f"{order.kind!r} is no order that servers know")

    async def _tell_all(self, order: Order, path: str, body: Mapping[str, Any] | list[dict[str, Any]]) -> str:
        bodies = body if isinstance(body, list) else [body] * len(self._servers)
        told = await asyncio.gather(
            *(self._tell(server, path, mine, order.timeout) for server, mine in zip(self._servers.values(), bodies, strict=True))
        )
        failed = [f"{name}: {said}" for name, (good, said) in zip(self._servers, told, strict=True) if not good]
        if failed:
            raise LoadError(f"{order.kind} failed at {len(failed)} of {len(told)} replicas: {' | '.join(failed)}")
        return " | ".join(f"{name}: {said}" for name, (_, said) in zip(self._servers, told, strict=True))

    def _groups(self, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        world = 1 + sum(server.ranks for server in self._servers.values())
        if body.get("world_size", world) != world:
            raise ConfigurationError(f"the trainer says {body['world_size']} ranks, but it and the engines' ranks are {world}")
        found, offset = [], 1
        for server in self._servers.values():
            mine = body | {"world_size": world, "rank_offset": offset}
            found.append(mine | ({"timeout": timeout} if self._kind == "weightsync" else {}))
            offset += server.ranks
        return found

    async def _tell(self, server: Server, path: str, body: Mapping[str, Any], timeout: float) -> tuple[bool, str]:
        try:
            answer = await self._http.post(server.url.rstrip("/") + path, json=dict(body), timeout=timeout)
        except httpx.HTTPError as error:
            return False, f"{server.url} did not answer: {reason(error)}"
        try:
            said = msgspec.json.decode(answer.content, type=dict[str, Any])
        except UNREADABLE:
            said = {}
        message = str(said.get("message", answer.text))[:_SAID]
        return answer.is_success and said.get("success", True) is not False, message or f"HTTP {answer.status_code}"


class OrderFollower:
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
            found = await asked(self._http, self._settings, "GET", f"{where}?epoch={signal.epoch}", b"", Deadline(_ANSWER_SECONDS))
        except MembershipError:  # it timed out, or was answered already
            return
        outcome = self._outcomes.get(signal.id)
        if outcome is None:
            outcome = self._outcomes[signal.id] = asyncio.create_task(self._try(found.content))
            while len(self._outcomes) > _REMEMBERED:
                self._outcomes.popitem(last=False)
        message, failure = await asyncio.shield(outcome)
        said = Answered(signal.epoch, message, failure)
        await asked(self._http, self._settings, "POST", where, msgspec.json.encode(said), Deadline(_ANSWER_SECONDS))

    async def _try(self, content: bytes) -> tuple[str, str | None]:
        """What to answer: a message, and the kind of the error if it is one."""
        try:
            return await self._do(msgspec.json.decode(content, type=Order)), None
        except Exception as error:  # noqa: BLE001 - it crosses to the trainer, and is logged here
            if not isinstance(error, WeightSyncError):
                _log.exception("an order failed")
            kind, message = to_wire(error)
            return message, kind

    async def _do(self, order: Order) -> str:
        if order.kind == "pause" and not self._paused and self._controller is not None:
            self._controller.pause()
            self._paused = True
        said = await self._servers.carry_out(order)
        if order.kind == "continue" and self._paused and self._controller is not None:
            self._controller.resume()
            self._paused = False
        return said
