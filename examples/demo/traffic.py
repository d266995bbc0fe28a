"""The client: keeps requests in flight against every replica, asks probes, and records every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import httpx
import msgspec

from examples.demo.records import Order, Response
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.model.lora import adapter_label
from weightsync.protocol.messages import UNREADABLE

__all__ = ["Traffic", "replica_names"]

_IN_FLIGHT = 2
_PROBES = 10  # of adapters at the same time; a replica admits a few dozen requests
_BUDGET = 24  # tokens of one answer
_PROBE_BUDGET = 16
_HTTP_SECONDS = 90.0  # longer than a replica holds a request during a pause
_RETRY_SECONDS = 0.25
_DRAIN_SECONDS = 10.0
_OK = 200
_UNAVAILABLE = 503

Token = Annotated[int, msgspec.Meta(ge=0)]


class _Made(msgspec.Struct, frozen=True):
    replica: str
    prompt_tokens: list[Token]
    tokens: list[Token]
    token_versions: list[int]
    token_epochs: list[int]
    prefills: list[int]
    adapter: str


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: Literal["stop", "length", "abort"]


class _Answer(msgspec.Struct, frozen=True):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    weightsync: _Made


class Traffic:
    """Requests to the replicas at ``urls`` (by name), from a finite list of prompts, until :meth:`stop`.

    A replica gets requests from its first :meth:`seeded` on, and after :meth:`lost` from the next. An answer that was aborted is
    recorded, and gone on with from the tokens so far.
    """

    def __init__(self, urls: Mapping[str, str], prompts: Sequence[str], probes: Sequence[str]) -> None:
        self._urls = dict(urls)
        self._prompts, self._probes = list(prompts), list(probes)
        # Idle connections stay open on both sides: httpcore may close one that expires as a request is about to use it.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
        self._client = httpx.AsyncClient(timeout=_HTTP_SECONDS, trust_env=False, limits=limits)
        self._workers: dict[str, list[asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()
        self._lost: set[str] = set()
        self.interrupted = 0
        """Requests that were running in a replica when it was lost."""
        self._adapters: dict[str, int] = {}
        """The newest version that all replicas serve of each adapter, by name."""
        self._turns = itertools.count()
        self.responses: list[Response] = []
        self.served = 0
        """Requests answered with status 200."""
        self.refused: Counter[str] = Counter()
        """Requests answered otherwise, by the error's type; ``lost`` for those without an answer."""

    async def refused_unseeded(self) -> bool:
        """Whether every replica refuses to serve its scrambled weights, saying why."""
        asked = [self._client.post(f"{url}/v1/completions", json={"prompt": self._prompts[0]}) for url in self._urls.values()]
        answers = await asyncio.gather(*asked)
        return all(answer.status_code == _UNAVAILABLE and answer.json()["error"]["type"] == "not_seeded" for answer in answers)

    def add(self, replica: str, url: str) -> None:
        """There is another replica."""
        self._urls[replica] = url

    def seeded(self, replica: str) -> None:
        """This replica serves: send it requests from now on."""
        fresh = replica in self._lost or replica not in self._workers
        if replica in self._urls and fresh and not self._stopping.is_set():
            self._lost.discard(replica)
            workers = [asyncio.create_task(self._work(replica, worker)) for worker in range(_IN_FLIGHT)]
            self._workers[replica] = [*self._workers.get(replica, []), *workers]

    def adapter_published(self, name: str, number: int) -> None:
        """All replicas serve this version: name the adapter in requests from now on."""
        self._adapters[name] = number

    def _next_model(self) -> str:
        """The base weights, or an adapter, in turn by its name and by name and number."""
        named = [model for name, number in self._adapters.items() for model in (name, adapter_label(name, number))]
        return ["", *named][next(self._turns) % (1 + len(named))]

    def lost(self, replica: str) -> None:
        """This replica is about to be killed: what it runs now is no failure, and it gets no requests until it serves again."""
        self._lost.add(replica)

    async def _work(self, replica: str, worker: int) -> None:
        offset = worker * len(self._prompts) // _IN_FLIGHT  # workers ask different things at the same time
        for prompt in itertools.cycle(self._prompts[offset:] + self._prompts[:offset]):
            if self._stopping.is_set():
                return
            if not await self._ask(replica, prompt, _BUDGET, model=self._next_model()):
                if replica in self._lost:
                    return
                # Whatever was wrong, a client tries again a little later, unless this is the end.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _RETRY_SECONDS)

    async def probe(self, version: Order) -> None:
        """Ask every replica every probe, as the questions that follow this version's round."""
        await asyncio.gather(
            *(self._ask(replica, prompt, _PROBE_BUDGET, probe_of=version) for replica in self._urls for prompt in self._probes)
        )

    async def probe_adapters(self) -> None:
        """Ask every replica a probe with the newest version of every adapter."""
        labels = [adapter_label(name, number) for name, number in self._adapters.items()]
        for first in range(0, len(labels), _PROBES):
            some = labels[first : first + _PROBES]
            await asyncio.gather(
                *(self._ask(replica, self._probes[0], _PROBE_BUDGET, model=model) for replica in self._urls for model in some)
            )

    async def _ask(self, replica: str, prompt: str, budget: int, probe_of: Order | None = None, model: str = "") -> bool:
        wish: str | list[int] = prompt
        at_least = self._adapters.get(model, -1)
        url = f"{self._urls[replica]}/v1/completions"
        while True:
            try:
                body = {"prompt": wish, "max_tokens": budget, **({"model": model} if model else {})}
                answer = await self._client.post(url, json=body)
            except httpx.HTTPError as error:
                if not self._stopping.is_set():
                    self._refused(replica, f"lost: {type(error).__name__}")
                return False
            if answer.status_code != _OK:
                self._refused(replica, _kind(answer))
                return False
            self.served += 1
            try:
                found = msgspec.json.decode(answer.content, type=_Answer)
            except UNREADABLE as error:
                raise ProtocolError(f"{replica} gave an answer that is none: {error}") from None
            made = found.weightsync
            if made.replica != replica:
                raise ProtocolError(f"{made.replica} answered at {replica}'s address {self._urls[replica]}")
            self.responses.append(
                Response(
                    replica,
                    tuple(made.prompt_tokens),
                    tuple(made.tokens),
                    tuple(made.token_versions),
                    tuple(made.prefills),
                    probe_of,
                    tuple(made.token_epochs),
                    model,
                    made.adapter,
                    at_least,
                )
            )
            model = made.adapter  # what goes on with an aborted answer is made with the same version
            budget -= len(made.tokens)
            if found.choices[0].finish_reason != "abort" or budget <= 0 or self._stopping.is_set():
                return True
            wish = [*made.prompt_tokens, *made.tokens]

    def _refused(self, replica: str, kind: str) -> None:
        if replica in self._lost:
            self.interrupted += 1
        else:
            self.refused[kind] += 1

    async def stop(self) -> None:
        """Let the requests in flight come back (at most ten seconds), then send no more. Safe twice."""
        self._stopping.set()
        workers = [worker for group in self._workers.values() for worker in group]
        if workers:
            _, late = await asyncio.wait(workers, timeout=_DRAIN_SECONDS)
            for worker in late:
                worker.cancel()
            outcomes = await asyncio.gather(*workers, return_exceptions=True)
            self._workers.clear()
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome

    async def close(self) -> None:
        """Cancel everything and close the connections."""
        self._stopping.set()
        workers = [worker for group in self._workers.values() for worker in group]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await self._client.aclose()


def _kind(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["type"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


async def replica_names(urls: Sequence[str]) -> dict[str, str]:
    """The replicas' addresses by the names that they give themselves. Raises :class:`ConfigurationError` if one does not answer."""
    found: dict[str, str] = {}
    async with httpx.AsyncClient(timeout=_HTTP_SECONDS, trust_env=False) as client:
        for url in urls:
            try:
                name = (await client.get(f"{url.rstrip('/')}/health")).json()["replica"]
            except (httpx.HTTPError, ValueError, KeyError) as error:
                raise ConfigurationError(f"no replica of the demo answers at {url}: {error}") from None
            found[str(name)] = url.rstrip("/")
    return found
