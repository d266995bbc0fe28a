"""Clients over HTTP: server-sent events cut anywhere, messages without end, and pauses between attempts."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.virtual_time import virtual

from weightsync.errors import ProtocolError
from weightsync.server.http_client import Backoff, EventReader

_STREAM = b': sign of life\n\nevent: x\ndata: {"a": 1}\n\ndata:two\r\n\r\ndata: \xc3\xa9\n\n: end\ndata: unfinished'
_DATA = [b'{"a": 1}', b"two", "é".encode()]


def test_events_are_the_same_wherever_the_stream_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(_STREAM) + 1), k=rng.randrange(12)))
        parts = [_STREAM[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(_STREAM)], strict=True)]
        reader = EventReader("the server")
        assert [data for part in parts for data in reader.feed(part)] == _DATA


def test_a_message_without_end_is_refused_before_it_is_kept() -> None:
    reader = EventReader("the server", most=1000)
    assert list(reader.feed(b"data: " + b"x" * 5000 + b"\n")) == [b"x" * 5000]  # it was here already, whole
    with pytest.raises(ProtocolError, match="the server sent a message of more than 1000 bytes"):
        for _ in range(3):
            list(reader.feed(b"x" * 400))


@virtual
async def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    loop, backoff, taken = asyncio.get_running_loop(), Backoff(0.5, 3.0), []
    for number in range(6):
        if number == 5:
            backoff.reset()
        began = loop.time()
        await backoff.rest(*([0.75] if number == 1 else []))
        taken.append(round(loop.time() - began, 3))
    assert taken == [0.5, 0.75, 2.0, 3.0, 3.0, 0.5]
