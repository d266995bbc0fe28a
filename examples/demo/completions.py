"""The OpenAI-compatible face of a replica: ``POST /v1/completions``, ``GET /v1/models``, ``GET /health``."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from transformers import PreTrainedTokenizerFast

from examples.demo.gate import Gate, NotSeeded
from examples.demo.generation import Completion
from examples.demo.models import CONTEXT
from examples.demo.tokenizer import encode
from weightsync.deadline import Deadline
from weightsync.errors import Aborted, DeadlineExceeded, VersionError, WeightSyncError
from weightsync.protocol.messages import UNREADABLE

__all__ = ["SLOTS", "Answering", "completions_app"]

SLOTS = 2
"""Requests that generate at one time."""
_ADMITTED = 64
_BODY_BYTES = 64 << 10
_HOLD_SECONDS = 60.0
_BASE = "weightsync-demo"

Token = Annotated[int, msgspec.Meta(ge=0)]


class CompletionRequest(msgspec.Struct, frozen=True):
    """What this server takes of OpenAI's request; other fields are ignored."""

    prompt: str | Annotated[list[Token], msgspec.Meta(min_length=1, max_length=CONTEXT)]
    """Text, or token numbers, with which an aborted answer is gone on with."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=CONTEXT)] = 16
    temperature: float = 0.0
    n: int = 1
    stream: bool = False
    model: Annotated[str, msgspec.Meta(max_length=200)] = _BASE
    """The base weights, or an adapter by its name or by name and number."""


class Answering(Protocol):
    """What the server asks of its engine."""

    @property
    def gate(self) -> Gate:
        """What the engine serves now."""
        ...

    def complete(self, prompt: Sequence[int], budget: int, deadline: Deadline, adapter: str = "") -> Completion:
        """See :meth:`examples.demo.generation.Generator.complete`."""
        ...


class _Refused(Exception):
    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    status, kind = (error.status, error.kind) if isinstance(error, _Refused) else (500, "internal")
    return _json({"error": {"message": str(error), "type": kind}}, status)


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_BYTES:
            raise _Refused(413, "invalid_request_error", f"a request has at most {_BODY_BYTES} bytes")
    return body


class _Server:
    def __init__(self, replica: str, generator: Answering, tokenizer: PreTrainedTokenizerFast) -> None:
        self.replica = replica
        self.generator = generator
        self.tokenizer = tokenizer
        self.slots = ThreadPoolExecutor(SLOTS, thread_name_prefix="generate")
        self.admitted = 0
        self.numbers = itertools.count(1)

    def parse(self, body: bytes) -> tuple[CompletionRequest, list[int]]:
        try:
            wish = msgspec.json.decode(body, type=CompletionRequest)
        except UNREADABLE as error:
            raise _Refused(400, "invalid_request_error", str(error)) from None
        if wish.temperature != 0 or wish.n != 1 or wish.stream:
            raise _Refused(400, "invalid_request_error", "this server answers greedily and whole: temperature 0, n 1, no stream")
        prompt = encode(self.tokenizer, wish.prompt) if isinstance(wish.prompt, str) else list(wish.prompt)
        if not prompt or max(prompt) >= len(self.tokenizer) or len(prompt) + wish.max_tokens > CONTEXT:
            raise _Refused(
                400,
                "invalid_request_error",
                f"a prompt has known tokens, at least one, and with max_tokens at most {CONTEXT}; this one has {len(prompt)}",
            )
        return wish, prompt

    async def complete(self, request: Request) -> Response:
        wish, prompt = self.parse(await _body(request))
        if self.admitted >= _ADMITTED:
            raise _Refused(429, "overloaded", f"{_ADMITTED} requests are waiting already")
        self.admitted += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                self.slots, self.generator.complete, prompt, wish.max_tokens, Deadline(_HOLD_SECONDS),
                "" if wish.model == _BASE else wish.model,
            )  # fmt: skip
        except VersionError as error:
            raise _Refused(404, "model_not_found", str(error)) from None
        except NotSeeded as error:
            raise _Refused(503, "not_seeded", str(error)) from None
        except DeadlineExceeded as error:
            raise _Refused(503, "paused", str(error)) from None
        except Aborted as error:
            raise _Refused(503, "ending", str(error)) from None
        except WeightSyncError as error:
            raise _Refused(500, "internal", str(error)) from error
        finally:
            self.admitted -= 1
        return _json(
            {
                "id": f"cmpl-{self.replica}-{next(self.numbers)}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": answer.adapter or _BASE,
                "choices": [
                    {
                        "index": 0,
                        "text": self.tokenizer.decode(answer.tokens, skip_special_tokens=True),
                        "logprobs": None,
                        "finish_reason": answer.finish_reason,
                    }
                ],
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(answer.tokens),
                    "total_tokens": len(prompt) + len(answer.tokens),
                },
                "weightsync": {
                    "replica": self.replica,
                    "prompt_tokens": prompt,
                    "tokens": answer.tokens,
                    "token_versions": answer.token_versions,
                    "token_epochs": answer.token_epochs,
                    "prefills": answer.prefills,
                    "adapter": answer.adapter,
                },
            }
        )

    async def models(self, request: Request) -> Response:
        version = self.generator.gate.version
        entry = {"id": _BASE, "object": "model", "created": 0, "owned_by": "weightsync"}
        return _json({"object": "list", "data": [entry | {"version": None if version is None else version.number}]})

    async def health(self, request: Request) -> Response:
        gate = self.generator.gate
        version = gate.version
        state = "serving" if version is not None else "paused" if gate.seeded else "not seeded"
        found = {"replica": self.replica, "state": state, "version": None if version is None else version.number}
        return _json(found, 200 if version is not None else 503)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.generator.gate.end()
        self.slots.shutdown(wait=True, cancel_futures=True)


def completions_app(
    replica: str, generator: Answering, tokenizer: PreTrainedTokenizerFast, more: Sequence[BaseRoute] = ()
) -> Starlette:
    """The ASGI application of one replica. Every answer says which version made each of its tokens.

    ``weightsync`` in an answer holds ``tokens``, ``token_versions`` and ``token_epochs`` (one a token), ``prompt_tokens``,
    ``prefills``: the positions in ``tokens`` at which the prompt and all earlier tokens were read anew, and ``adapter``. Errors are
    ``{"error": {"message", "type"}}``: 400 for a request that makes no sense, 404 for an adapter that is not served, 413 and 429
    for too much, 503 ``not_seeded``
    before the first version and 503 ``paused`` when a pause outlasts the request's minute. ``more`` are routes beside these.
    """
    server = _Server(replica, generator, tokenizer)
    return Starlette(
        routes=[
            Route("/v1/completions", server.complete, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            *more,
        ],
        exception_handlers={_Refused: _refuse},
        lifespan=server.lifespan,
    )
