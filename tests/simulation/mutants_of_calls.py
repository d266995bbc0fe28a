"""Bugs planted in how an engine rank receives, aborts and refuses calls, and in what it asks before it pauses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.simulation.installation import replaced

from weightsync import failpoints
from weightsync.coordinator.publications import Publications
from weightsync.coordinator.rank_handle import RankHandle
from weightsync.deadline import Deadline
from weightsync.engine import adapter_calls
from weightsync.engine.adapter_calls import AdapterCalls
from weightsync.engine.engine_role import EngineRole
from weightsync.model import PauseMode
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import Body, CheckSources, Done, Pause

__all__ = ["MUTANTS_OF_CALLS"]


def _abort_forgotten() -> AbstractContextManager[None]:
    """As it was: a flag that pausing clears, and pausing begins when memory has been followed."""
    answer = EngineRole._answer

    def renewed(role: EngineRole) -> None:
        session = role.session
        session._current = replace(session._current, aborts=session._aborts)

    def answering(role: EngineRole, body: Body, deadline: Deadline) -> Body:
        renewed(role)
        return answer(role, body, deadline)

    def pausing(role: EngineRole, body: Pause, deadline: Deadline) -> None:
        failpoints.reached("engine.pausing")
        renewed(role)
        role.session.state = "pausing"
        role.session._calls.pause(body.mode, deadline.remaining("pausing"))
        role.session.state = "paused"

    return replaced((EngineRole, "_answer", answering), (EngineRole, "_pause", pausing))


def _served_while_memory_is_followed() -> AbstractContextManager[None]:
    def pausing(role: EngineRole, body: Pause, deadline: Deadline) -> None:
        failpoints.reached("engine.pausing")
        role.session.state = "pausing"
        role.session._calls.pause(body.mode, deadline.remaining("pausing"))
        role.session.state = "paused"
        role.session.check_abort()

    return replaced((EngineRole, "_pause", pausing))


def _paused_twice() -> AbstractContextManager[None]:
    def pausing(calls: AdapterCalls, mode: PauseMode, timeout: float) -> None:
        for adapter in calls._adapters:
            adapter.pause(mode, timeout)
            vars(adapter)[adapter_calls._PAUSED] = True

    return replaced((AdapterCalls, "pause", pausing))


def _refused_for_ever() -> AbstractContextManager[None]:
    return replaced((CoordinatorConnection, "_connect_again_after", lambda link, worker: None))


def _seeded_from_withdrawn_memory() -> AbstractContextManager[None]:
    ask = RankHandle.ask

    async def unasked(link: RankHandle[Any], message: Body, answer: type[Any], timeout: float) -> Any:
        return Done() if isinstance(message, CheckSources) else await ask(link, message, answer, timeout)

    forgotten: Any = lambda regions: None  # noqa: E731
    return replaced((Publications, "publication_ended", forgotten), (RankHandle, "ask", unasked))


MUTANTS_OF_CALLS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "an abort before the pause is forgotten": _abort_forgotten,
    "version served while memory is followed": _served_while_memory_is_followed,
    "adapter paused twice": _paused_twice,
    "a refused rank is never looked at again": _refused_for_ever,
    "seeded from memory that was withdrawn": _seeded_from_withdrawn_memory,
}
