"""Bugs planted in publications of adapters. They are hunted in the schedules in which adapters are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tests.simulation.installation import replaced

from weightsync.coordinator import lora_round, loras
from weightsync.coordinator.rank_handle import RoundDeadline, on_all
from weightsync.coordinator.round import verify
from weightsync.coordinator.round_context import Engines
from weightsync.engine.lora_role import LoraRole
from weightsync.errors import WeightSyncError
from weightsync.protocol.lora_messages import DropLora
from weightsync.protocol.messages import Done

__all__ = ["LORA_MUTANTS"]


def _any_base() -> AbstractContextManager[None]:
    """Either the coordinator's or the rank's look would do alone."""
    return replaced(
        (lora_round, "takes", lambda replica, spec, late: replica.version is not None),
        (LoraRole, "_check_base", lambda role, label, spec: None),
    )


def _registered_before_verified() -> AbstractContextManager[None]:
    put_off: dict[Any, Any] = {}

    async def later(agreed: Any, *rest: Any) -> None:
        put_off[rest[-1], *sorted(agreed.slices)] = agreed, *rest

    async def broken(what: str, limit: RoundDeadline, links: Any, *rest: Any) -> Any:
        answers = await on_all(what, limit, links, *rest)
        if what == "register":
            await verify(*put_off.pop((limit, *sorted(links))))
        return answers

    return replaced((lora_round, "verify", later), (lora_round, "on_all", broken))


def _late_on_an_older_base() -> AbstractContextManager[None]:
    def broken(replica: Any, spec: Any, *, late: bool) -> bool:
        kept = late and spec.on_base_update == "keep" and replica.version is not None
        return kept or (replica.version is not None and replica.version == spec.base)

    return replaced((lora_round, "takes", broken), (loras, "takes", broken))


def _refusal_unheard() -> AbstractContextManager[None]:
    return replaced((loras.Loras, "refused", lambda control, rank, body: Done()))


def _drop_withdrawn() -> AbstractContextManager[None]:
    async def broken(engines: Engines, name: str, numbers: Sequence[int], seconds: float) -> list[str]:
        try:
            await on_all("drop", RoundDeadline(seconds), engines, DropLora(name, tuple(numbers)), Done)
        except WeightSyncError as error:
            return [str(error)]
        return []

    return replaced((lora_round, "drop", broken), (loras, "drop", broken))


LORA_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "an adapter's base is not compared": _any_base,
    "an adapter is registered before it is verified": _registered_before_verified,
    "a late adapter comes to an older base": _late_on_an_older_base,
    "adapters that a rank refuses are said to be served": _refusal_unheard,
    "a call to drop an adapter is withdrawn": _drop_withdrawn,
}
"""Name to what plants it for as long as a ``with`` block runs."""
