"""How the server's front reaches its engine ranks, and one error for all that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from weightsync.errors import DeadlineExceeded, ProtocolError, WeightSyncError, from_wire
from weightsync.protocol.messages import Answer, Body, Call, Failure, decode, encode
from weightsync_disaggregated.rank import DisaggregatedRank

_GRACE = 2.0
"""Seconds beyond an order's own timeout in which a rank says that it was late, before the front says it instead."""
_AT_ONCE = 256
"""More orders than a front has under way at a rank: two for each group, and one. Buckets that hang must not hold up the others."""

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of one engine. An engine with workers in other processes carries the bytes with its own executor.

    For vLLM's ``collective_rpc``, or Ray: send ``message`` to every worker, where a
    :class:`~weightsync_disaggregated.rank.DisaggregatedRank` handles it, and return the answers in the order of ranks.
    """

    @property
    def count(self) -> int:
        """How many ranks."""

    async def send(self, message: bytes, timeout: float) -> Sequence[bytes | None]:
        """The answer of each rank, in order; ``None`` for one that did not answer within ``timeout`` seconds."""


class LocalRanks:
    """Ranks that live in this process, each order on a separate thread."""

    def __init__(self, *ranks: DisaggregatedRank) -> None:
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(len(ranks) * _AT_ONCE, thread_name_prefix="weightsync-rank")

    @property
    def count(self) -> int:
        """How many ranks."""
        return len(self._ranks)

    async def send(self, message: bytes, timeout: float) -> Sequence[bytes | None]:
        """The answer of each rank; a thread that is still busy then ends at its own deadline."""
        loop = asyncio.get_running_loop()
        running = [loop.run_in_executor(self._threads, rank.handle, message) for rank in self._ranks]
        await asyncio.wait(running, timeout=timeout)
        return [future.result() if future.done() else None for future in running]

    def close(self) -> None:
        """Leave all groups, and let the threads end."""
        for rank in self._ranks:
            rank.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


async def ask_all(ranks: Ranks, body: Body, timeout: float, kind: type[T], update: int = 0) -> list[T]:
    """Every rank's answer to ``body``, all of type ``kind``.

    Raises one error that gathers every rank's failure, ``rank0: ... | rank1: ...``, of their common class if they have one.
    """
    answers = await ranks.send(encode(Call(0, timeout, body, update=update)), timeout + _GRACE)
    if len(answers) != ranks.count:
        raise ProtocolError(f"{ranks.count} engine ranks, but {len(answers)} answers")
    failures: dict[int, WeightSyncError] = {}
    good: list[T] = []
    for rank, data in enumerate(answers):
        match None if data is None else decode(data):
            case Answer(body=answer) if isinstance(answer, kind):
                good.append(answer)
            case Failure(kind=name, message=text):
                failures[rank] = from_wire(name, text)
            case None:
                failures[rank] = DeadlineExceeded(f"no answer within {timeout:g} s")
            case frame:
                failures[rank] = ProtocolError(f"answered {type(frame.body if isinstance(frame, Answer) else frame).__name__}")
    if failures:
        kinds = {type(error) for error in failures.values()}
        raised = kinds.pop() if len(kinds) == 1 else WeightSyncError
        raise raised(" | ".join(f"rank{rank}: {error}" for rank, error in failures.items()))
    return good
