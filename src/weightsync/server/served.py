"""Tensors that the replicas hold, for trainers that publish what is served."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from weightsync.errors import Aborted
from weightsync.model import Manifest, TensorSpec

T = TypeVar("T")

SERVED_PATH, MOST_SECONDS = "/v1/served", 86400


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of one replica. All others hold the same."""

    replica: str
    tensors: tuple[TensorSpec, ...]


@lru_cache(1)
def encode_served(replica: str, manifest: Manifest) -> bytes:
    """Return the JSON of a :class:`Served`; made once for all trainer ranks that ask at the same time."""
    return msgspec.json.encode(Served(replica, manifest.tensors))


async def while_connected(request: Request, wanted: Coroutine[Any, Any, T]) -> T:
    """Return what ``wanted`` returns. It is cancelled as soon as the client ends the connection.

    Raises:
        Aborted: The client has gone.
    """
    tasks = working, gone = asyncio.ensure_future(wanted), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Aborted("the client has gone")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait(tasks)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
