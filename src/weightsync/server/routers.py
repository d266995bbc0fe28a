"""Tells routers which replicas may get requests: those that serve a verified version and are not about to be paused.

For each router one task brings it to the coordinator's state after every change, and looks again with every heartbeat, because a
router that was restarted says nothing. So each exchange is a whole state: what was missed or lost in between does not matter. A
router that fails is asked again in at most a second, and holds up neither the others nor a round beyond its drain.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote

import httpx
import msgspec

from weightsync.config import ServerSettings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.events import Audited, ReplicaBytes
from weightsync.errors import ProtocolError, readable
from weightsync.model import Version
from weightsync.protocol.endpoint import reason
from weightsync.protocol.messages import decoding
from weightsync.protocol.tokens import bearer
from weightsync.server.http_client import Backoff

_log = logging.getLogger(__name__)
_ATTEMPT_SECONDS = 5.0
_ANSWER_BYTES = 16 << 20

Routes = Mapping[str, tuple[str, Version | None]]
"""See :meth:`Coordinator.routes`."""


class _Router(ABC):
    """A router, or what passes the news on to one: an HTTP server that takes requests of ours. Notes what it knows."""

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, run: str) -> None:
        self.name, self._client, self._url, self._run = name, client, url, run
        self.changed, self.settled = asyncio.Event(), asyncio.Event()
        self.known: dict[str, str] = {}
        """Replicas by URL that it may still send requests to."""
        self._trouble = ""

    def stale(self) -> None:
        """There is a newer state than it may know."""
        self.settled.clear()
        self.changed.set()

    def failed(self, why: str) -> None:
        """It could not be told."""
        if why != self._trouble:
            self._trouble = why
            _log.warning("router %s does not know which replicas serve, and is told again: %s", self.name, why)

    def answered(self) -> None:
        """It could be told."""
        if self._trouble:
            self._trouble = ""
            _log.info("router %s knows again which replicas serve", self.name)

    @abstractmethod
    async def tell(self, routes: Routes) -> bool:
        """Bring the router closer to ``routes``. Returns whether it is there; otherwise, and after an error, it is called again."""

    async def _ask(self, method: str, path: str = "", body: object = None) -> bytes:
        """Return the body of the answer, of bounded size. Raises ``ProtocolError`` unless it is a success."""
        content = None if body is None else msgspec.json.encode(body)
        answer = bytearray()
        async with self._client.stream(method, self._url + path, content=content) as response:
            async for part in response.aiter_bytes():
                answer += part
                if len(answer) > _ANSWER_BYTES:
                    raise ProtocolError(f"its answer has more than {_ANSWER_BYTES} bytes")
        if not response.is_success:
            shown = readable(bytes(answer).decode("utf-8", "replace"), 200)
            raise ProtocolError(f"{method} {path or '/'} was answered with HTTP {response.status_code}: {shown}")
        return bytes(answer)


class _ListedWorker(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool


class _Workers(msgspec.Struct):
    workers: list[_ListedWorker]


class _Sglang(_Router):
    """sglang-router: serving replicas are its workers. Workers that the coordinator does not know are left as they are."""

    async def tell(self, routes: Routes) -> bool:
        """See :meth:`_Router.tell`. It answers before it has done what it is asked, so only what it lists then counts."""
        listed = await self._ask("GET", "/workers")
        with decoding("its list of workers is not that of sglang-router"):
            workers = {worker.url.rstrip("/"): worker for worker in msgspec.json.decode(listed, type=_Workers).workers}
        serving = {url for url, (_, version) in routes.items() if version is not None}
        stale = [worker for url, worker in workers.items() if url in routes and url not in serving]
        for worker in stale:
            await self._ask("DELETE", f"/workers/{quote(worker.id, safe='')}")
        for url in sorted(serving - workers.keys()):
            await self._ask("POST", "/workers", {"url": url})
        return not stale and all(url in workers and workers[url].is_healthy for url in serving)


class _Webhook(_Router):
    """Anything that takes the list of known replicas in one request. What is not in it is to be left as it is."""

    async def tell(self, routes: Routes) -> bool:
        """See :meth:`_Router.tell`."""
        replicas = [
            {"name": name, "url": url, "version": None if version is None else str(version)}
            for url, (name, version) in sorted(routes.items())
        ]  # fmt: skip
        await self._ask("POST", body={"run": self._run, "replicas": replicas})
        return True


_KINDS: dict[str, type[_Router]] = {"sglang": _Sglang, "webhook": _Webhook}


class Routers:
    """The routers of one coordinator. Made on its event loop; close it with :meth:`aclose`."""

    def __init__(self, coordinator: Coordinator, settings: ServerSettings) -> None:
        self._coordinator, self._drain, self._heartbeat = coordinator, coordinator.settings.drain, settings.heartbeat
        headers = {"Content-Type": "application/json"} | bearer(settings.router_token)
        self._client = httpx.AsyncClient(headers=headers, timeout=_ATTEMPT_SECONDS, trust_env=False)
        self._told = []
        for name in settings.routers:
            kind, _, url = name.partition("+")
            self._told.append(_KINDS[kind](name, self._client, url.rstrip("/"), coordinator.settings.run))
        self._tasks = [asyncio.ensure_future(self._follow()), *(asyncio.ensure_future(self._keep(entry)) for entry in self._told)]
        coordinator.announced = self.announced
        if self._told and coordinator.settings.max_unavailable is None:
            _log.warning(
                "an update takes all replicas from the routers at once: set WEIGHTSYNC_MAX_UNAVAILABLE for rolling updates"
            )

    def settled(self) -> dict[str, bool]:
        """For each router, whether it knows the newest state."""
        return {entry.name: entry.settled.is_set() for entry in self._told}

    async def announced(self) -> None:
        """Return when every router knows the state of now, or after the drain's time."""
        self._stale()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                for entry in self._told:
                    await entry.settled.wait()

    def _stale(self) -> None:
        for entry in self._told:
            entry.stale()

    async def _follow(self) -> None:
        async for event in self._coordinator.subscribe():
            if not isinstance(event, ReplicaBytes | Audited):  # what serves no longer after an audit has a phase
                self._stale()

    async def _keep(self, entry: _Router) -> None:
        again = Backoff(0.02, 1.0)
        while True:
            entry.changed.clear()
            try:
                # A replica that has come back under another URL is withdrawn under its earlier one.
                routes = {url: (name, None) for url, name in entry.known.items()} | self._coordinator.routes()
                serving = {url: name for url, (name, version) in routes.items() if version is not None}
                entry.known |= serving
                async with asyncio.timeout(_ATTEMPT_SECONDS):
                    done = await entry.tell(routes)
                entry.known = serving if done else entry.known
            except TimeoutError:
                entry.failed(f"no answer within {_ATTEMPT_SECONDS:g} s")
            except Exception as error:  # noqa: BLE001 - logged: whatever a router does, it must be told again
                entry.failed(reason(error))
            else:
                entry.answered()
                if done and not entry.changed.is_set():
                    entry.settled.set()
                    again.reset()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._heartbeat):
                            await entry.changed.wait()
                    continue
            entry.settled.clear()
            # Not a poll: this is a router being told again, less and less often, while it is not where it should be.
            await again.rest()

    async def aclose(self) -> None:
        """Stop. Routers keep what they were told: replicas serve on without a coordinator."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
