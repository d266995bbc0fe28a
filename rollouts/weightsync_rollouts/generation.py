"""Generation over HTTP: one client class for each kind of server. Each returns a stream of :class:`Chunk`.

================== ============================= ==========================================================================
class              route                         source of the versions
================== ============================= ==========================================================================
``VllmTokens``     POST /inference/v1/generate   vLLM's version spans in the last message, also of an aborted request
``Completions``    POST /v1/completions          ``weightsync.token_versions`` in a message, as the demo's server sends it;
                                                 otherwise ``GET /weight_info`` before and after, if both are equal
================== ============================= ==========================================================================

Closing the connection of a request cancels the request on the server. Only the server reports the version of a token. Tokens that
it did not report before it disconnected are dropped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self, get_args

import httpx
import msgspec

from weightsync.config import Secret
from weightsync.errors import ConfigurationError, LoadError, PeerLost, ProtocolError
from weightsync.model import parse_label
from weightsync.protocol.messages import decoding
from weightsync.protocol.tokens import bearer
from weightsync.server.http_client import event_data
from weightsync_rollouts.samples import Chunk, FinishReason, Sampling

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 120.0  # between two messages of a stream; the task's deadline bounds the whole
_REFUSAL_BYTES = 64 << 10
_MESSAGE_BYTES = 4 << 20
_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses after which another attempt, or another replica, may succeed


def _order(label: str) -> tuple[int, int] | None:
    parsed = parse_label(label)
    return None if parsed is None else parsed[1:]


class Generation(Protocol):
    """Client for one kind of server, used by the controller."""

    def stream(self, url: str, prompt: Sequence[int], budget: int, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Generate and yield chunks as they arrive. Closing the iterator cancels the request on the server.

        Args:
            url: URL of the server.
            prompt: Token ids.
            budget: Most tokens of this request.
            sampling: Sampling parameters.

        Raises:
            PeerLost: The server disconnected or is temporarily unavailable.
            LoadError: The server rejects the request permanently.
            ProtocolError: The server sent an unreadable message.
        """

    async def aclose(self) -> None:
        """Close connections."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _ServedVersion(msgspec.Struct):
    token_versions: list[int] | None = None
    tokens: list[int] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _CompletionBody(msgspec.Struct):
    choices: list[_Choice] = []
    weightsync: _ServedVersion | None = None


class _Token(msgspec.Struct):
    logprob: float


class _Contents(msgspec.Struct):
    content: list[_Token] | None = None


class _GeneratedSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _TokensChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Contents | None = None
    finish_reason: str | None = None
    weight_versions: list[_GeneratedSpan] | None = None


class _Tokens(msgspec.Struct):
    choices: list[_TokensChoice] = []


class _Info(msgspec.Struct):
    weight_version: str | None = None


def _reason(finish_reason: str | None) -> FinishReason | None:
    for known in get_args(FinishReason):
        if finish_reason == known:
            reason: FinishReason = known
            return reason
    return None if finish_reason is None else "abort"


class _Http:
    """Connection pool for all replicas."""

    def __init__(self, token: Secret | None = None) -> None:
        self._http = httpx.AsyncClient(
            headers=bearer(token),
            timeout=httpx.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS),
            # No bound on idle ones: with more connections than that, httpcore may close one that a request is about to use.
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _post(self, url: str, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream("POST", url.rstrip("/") + path, json=body) as answer:
                if not answer.is_success:
                    beginning = (await _read(answer, _REFUSAL_BYTES))[:2000].decode("utf-8", "replace")
                    text = f"{url} answered {path} with HTTP {answer.status_code}: {beginning}"
                    raise PeerLost(text) if answer.status_code in _AGAIN else LoadError(text)
                yield answer
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"{url!r} is not the URL of a server: {error}") from None
        except httpx.HTTPError as error:
            raise PeerLost(f"the connection to {url} failed during {path}: {type(error).__name__} {error}") from None


async def _read(answer: httpx.Response, most: int) -> bytes:
    """Read an answer to its end, or until it is longer than ``most`` bytes."""
    held = bytearray()
    async for part in answer.aiter_bytes():
        held += part
        if len(held) > most:
            break
    return bytes(held)


async def _messages(answer: httpx.Response, url: str) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events until ``[DONE]``.

    Raises:
        PeerLost: The stream ended without ``[DONE]``.
        ProtocolError: A message is too long.
    """
    async for data in event_data(answer, url, _MESSAGE_BYTES):
        if data == b"[DONE]":
            return
        yield data
    raise PeerLost(f"{url} ended its response before [DONE]")


class VllmTokens(_Http):
    """Client for vLLM's ``/inference/v1/generate``, which returns token ids and the version of each, also after an abort.

    vLLM 0.32 has this route if it was started with ``--tokens-only`` or ``--enable-scale-out``. vLLM reports versions in the last
    message, so the tokens of a server that dies before it are lost.
    """

    def __init__(self, token: Secret | None = None, *, model: str | None = None) -> None:
        super().__init__(token)
        self._model = model

    async def stream(self, url: str, prompt: Sequence[int], budget: int, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """See :meth:`Generation.stream`."""
        params: dict[str, Any] = {
            "max_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "detokenize": False,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        if sampling.logprobs:
            params["logprobs"] = 0
        body: dict[str, Any] = {"token_ids": list(prompt), "sampling_params": params, "stream": True}
        if self._model is not None:
            body["model"] = self._model
        async with self._post(url, "/inference/v1/generate", body) as answer:
            async for data in _messages(answer, url):
                yield self._chunk(data, url)

    def _chunk(self, data: bytes, url: str) -> Chunk:
        message = _decode(data, _Tokens, url)
        if not message.choices:
            return Chunk()
        choice = message.choices[0]
        logprobs = None if choice.logprobs is None or choice.logprobs.content is None else choice.logprobs.content
        versions: list[int] = []
        epochs: list[int] = []
        for span in choice.weight_versions or ():
            order = _order(span.version)
            if order is None or span.start != len(versions) or not 0 < span.end - span.start < 1 << 24:
                break  # unversioned weights: this token and all after it are dropped
            epochs += [order[0]] * (span.end - span.start)
            versions += [order[1]] * (span.end - span.start)
        return Chunk(
            tuple(choice.token_ids or ()),
            None if logprobs is None else tuple(logprob.logprob for logprob in logprobs),
            tuple(versions),
            _reason(choice.finish_reason),
            tuple(epochs),
        )


class Completions(_Http):
    """Client for OpenAI's ``/v1/completions``, with token ids as the prompt.

    Args:
        token: API key of the servers.
        model: Model name to send with each request.
        stream: Whether the server streams. The demo's server does not; it also needs ``temperature=0`` and ``logprobs=False``.
    """

    def __init__(self, token: Secret | None = None, *, model: str | None = None, stream: bool = True) -> None:
        super().__init__(token)
        self._model, self._stream = model, stream

    async def stream(self, url: str, prompt: Sequence[int], budget: int, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """See :meth:`Generation.stream`."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True,
            "stream": self._stream,
        }
        if self._model is not None:
            body["model"] = self._model
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.logprobs:
            body["logprobs"] = 1
        before = await self._reported_version(url)
        tokens = reported = 0
        last: FinishReason | None = None
        async with self._post(url, "/v1/completions", body) as answer:
            if self._stream:
                async for data in _messages(answer, url):
                    chunk = self._chunk(data, url)
                    tokens, reported = tokens + len(chunk.tokens), reported + len(chunk.versions)
                    last = chunk.finish_reason or last
                    yield msgspec.structs.replace(chunk, finish_reason=None)
            else:
                chunk = self._chunk(await _whole(answer, url), url)
                tokens, reported, last = len(chunk.tokens), len(chunk.versions), chunk.finish_reason
                yield msgspec.structs.replace(chunk, finish_reason=None)
        known = before if before is not None and reported == 0 and tokens and await self._reported_version(url) == before else None
        epochs, versions = ((known[0],) * tokens, (known[1],) * tokens) if known is not None else ((), ())
        yield Chunk(versions=versions, finish_reason=last, epochs=epochs)

    async def _reported_version(self, url: str) -> tuple[int, int] | None:
        """Return epoch and number of the server's version; ``None`` if it has no route for them."""
        try:
            answer = await self._http.get(url.rstrip("/") + "/weight_info")
        except httpx.HTTPError as error:
            raise PeerLost(f"{url} does not answer /weight_info: {type(error).__name__} {error}") from None
        if not answer.is_success:
            return None
        label = _decode(answer.content, _Info, url).weight_version
        return None if label is None else _order(label)

    def _chunk(self, data: bytes, url: str) -> Chunk:
        message = _decode(data, _CompletionBody, url)
        mine = message.weightsync
        versions = tuple(mine.token_versions or ()) if mine is not None else ()
        if not message.choices:
            return Chunk(versions=versions)
        choice = message.choices[0]
        tokens = choice.token_ids if choice.token_ids is not None else (mine.tokens if mine is not None else None)
        logprobs = None if choice.logprobs is None else choice.logprobs.token_logprobs
        if logprobs is not None and any(value is None for value in logprobs):
            raise ProtocolError(f"{url} returned a token without a log-probability")
        return Chunk(
            tuple(tokens or ()),
            None if logprobs is None else tuple(value for value in logprobs if value is not None),
            versions,
            _reason(choice.finish_reason),
        )


async def _whole(answer: httpx.Response, url: str) -> bytes:
    held = await _read(answer, _MESSAGE_BYTES)
    if len(held) > _MESSAGE_BYTES:
        raise ProtocolError(f"{url} answered with more than {_MESSAGE_BYTES} bytes")
    return held


def _decode(data: bytes, kind: type[Any], url: str) -> Any:  # noqa: ANN401 - an instance of ``kind``
    with decoding(f"{url} sent an unreadable message"):
        return msgspec.json.decode(data, type=kind)
