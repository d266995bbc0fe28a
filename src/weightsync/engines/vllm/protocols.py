"""Protocols of the objects of vLLM that users pass to weightsync, reduced to the methods that it calls."""

from __future__ import annotations

from typing import Any, Protocol

from weightsync.model import PauseMode


class OfflineLLM(Protocol):
    """``vllm.LLM``."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values. Returns whether all were dropped."""


class AsyncEngine(Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause generation."""

    async def resume_generation(self) -> None:
        """Resume generation."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values. Returns whether all were dropped."""
