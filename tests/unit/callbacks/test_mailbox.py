"""Holds the mailbox: one number a message, nothing lost over a broken connection, bounds, a new epoch begins anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from weightsync.errors import ConfigurationError, MembershipError
from weightsync_callbacks.mailbox import Full, Mailbox, Post, Signal


def posts(*names: str) -> list[Post]:
    return [Post(name, msgspec.Raw(b'"' + name.encode() + b'"')) for name in names]


async def take(stream: AsyncIterator[list[Signal]]) -> list[int]:
    async with asyncio.timeout(10):
        return [signal.number for signal in await anext(stream)]


async def test_posted_twice_is_one_message() -> None:
    box = Mailbox()
    assert box.put(posts("a", "b")) == [1, 2]
    assert box.put(posts("b", "c", "c")) == [2, 3, 3]
    box.acknowledge(box.epoch, 3)
    assert box.put(posts("a")) == [1]  # known, though it was taken already
    stream = box.follow("", 0)
    coming = asyncio.ensure_future(take(stream))
    await asyncio.sleep(0)
    assert not coming.done()
    box.put(posts("d"))
    assert await coming == [4]


async def test_a_follower_goes_on_where_it_was() -> None:
    box = Mailbox()
    box.put(posts("a", "b", "c"))
    assert await take(box.follow("", 0)) == [1, 2, 3]
    assert await take(box.follow(box.epoch, 1)) == [2, 3]
    assert await take(box.follow("of an earlier life", 3)) == [1, 2, 3]
    box.acknowledge(box.epoch, 2)
    assert await take(box.follow("", 0)) == [3]
    box.withdraw(3)
    box.withdraw(3)
    box.put(posts("d"))
    assert await take(box.follow("", 0)) == [4]


async def test_content_and_acknowledgement() -> None:
    box = Mailbox()
    box.put(posts("a", "b"))
    assert box.content(1, box.epoch) == b'"a"'
    box.acknowledge("of an earlier life", 2)
    assert box.content(2, box.epoch) == b'"b"'
    for wrong in (-1, 3):
        with pytest.raises(ConfigurationError):
            box.acknowledge(box.epoch, wrong)
    box.acknowledge(box.epoch, 1)
    for number, epoch in [(1, box.epoch), (3, box.epoch), (2, "of an earlier life")]:
        with pytest.raises(MembershipError):
            box.content(number, epoch)


def test_bounds() -> None:
    box = Mailbox(entries=2, nbytes=7)
    with pytest.raises(Full):
        box.put(posts("a", "b", "c"))
    assert box.put(posts("a", "b")) == [1, 2]
    assert box.put(posts("a")) == [1]
    box.acknowledge(box.epoch, 1)
    with pytest.raises(Full):
        box.put(posts("long"))
    box.acknowledge(box.epoch, 2)
    assert box.put(posts("long")) == [3]
    box.withdraw(3)
    assert box.put(posts("x", "y")) == [4, 5]


async def test_closing_ends_followers() -> None:
    box = Mailbox()
    coming = asyncio.ensure_future(take(box.follow("", 0)))
    await asyncio.sleep(0)
    box.close()
    with contextlib.suppress(StopAsyncIteration):
        await coming
    assert coming.done()


async def test_a_new_follower_looks_at_what_is_held_and_not_at_all_numbers_that_ever_were() -> None:
    box = Mailbox()
    for name in map(str, range(5000)):
        (number,) = box.put(posts(name))
        box.withdraw(number)
    box.put(posts("last"))
    looked = 0

    class Counted(dict[int, tuple[Signal, bytes]]):
        def __contains__(self, number: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(number)

    box._held = Counted(box._held)
    for _ in range(10):
        stream = box.follow("", 0)
        assert await take(stream) == [5001]
        await stream.aclose()  # type: ignore[attr-defined]
    assert looked <= 20
