"""A replica's process with an engine of one's own: a small server, and one ``weightsync.Engine``."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.demo.reports import Parent, Ready, die_with_parent
from examples.grpo.settings import ReplicaSettings

__all__ = ["main"]

_THREADS = 4
_BODY_BYTES = 64 << 10
_HOLD_SECONDS = 60.0
_CONTEXT = 64

Token = Annotated[int, msgspec.Meta(ge=0, lt=32)]


class Wish(msgspec.Struct, frozen=True):
    """What this server takes of OpenAI's completion request; other fields are ignored."""

    prompt: Annotated[list[Token], msgspec.Meta(min_length=1, max_length=_CONTEXT)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=_CONTEXT)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    stop_token_ids: list[int] = []


async def _wish(request: Request) -> Wish | None:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY_BYTES:
            return None
    try:
        wish = msgspec.json.decode(body, type=Wish)
    except msgspec.DecodeError:
        return None
    return wish if len(wish.prompt) + wish.max_tokens <= _CONTEXT else None


def main(argument: str) -> int:
    """Serve until a signal ends the process. ``argument`` is :class:`~examples.grpo.settings.ReplicaSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=ReplicaSettings)
    die_with_parent(mine.parent)
    parent = Parent()
    listener = socket.socket(fileno=mine.listen_fd)

    # Imported here so that the process is tied to its parent before the seconds that these take.
    import torch
    import uvicorn

    from examples.demo.completions_adapter import CompletionsAdapter
    from examples.demo.gate import NotSeeded
    from examples.grpo.policy import build_policy
    from examples.grpo.sampler import Sampler
    from weightsync.deadline import Deadline
    from weightsync.engine.engine import Engine
    from weightsync.errors import Aborted, DeadlineExceeded

    torch.set_num_threads(1)
    sampler = Sampler(build_policy(mine.settings.seed + 1 + mine.index), mine.settings.seed * 1009 + mine.index)
    slots = ThreadPoolExecutor(_THREADS, thread_name_prefix="sample")

    async def completions(request: Request) -> Response:
        wish = await _wish(request)
        if wish is None:
            return JSONResponse({"error": {"message": "give known tokens, few enough"}}, 400)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                slots,
                sampler.complete,
                wish.prompt,
                wish.max_tokens,
                wish.temperature,
                wish.stop_token_ids,
                Deadline(_HOLD_SECONDS),
            )
        except (NotSeeded, DeadlineExceeded, Aborted) as error:
            return JSONResponse({"error": {"message": str(error)}}, 503)
        choice = {
            "token_ids": answer.tokens,
            "logprobs": {"token_logprobs": answer.logprobs},
            "finish_reason": answer.finish_reason,
        }
        return JSONResponse({"choices": [choice], "weightsync": {"token_versions": answer.versions}})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        sampler.gate.end()
        slots.shutdown(wait=True, cancel_futures=True)

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])], lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    with Engine(CompletionsAdapter(sampler), mine.name, mine.coordinator):
        parent.tell(Ready(mine.name))
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
