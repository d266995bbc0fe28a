"""What weightsync calls of vLLM's engine objects, as protocols: a ``vllm.LLM`` is an :class:`OfflineLLM`, and so on."""

from __future__ import annotations

from typing import Any, Protocol

from weightsync.model import PauseMode

__all__ = ["AsyncEngine", "ModelConfig", "OfflineLLM", "UpdatedWorker"]


class OfflineLLM(Protocol):
    """``vllm.LLM``."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        ...

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values."""
        ...


class AsyncEngine(Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        ...

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop."""
        ...

    async def resume_generation(self) -> None:
        """Go on."""
        ...

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights."""
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values."""
        ...


class UpdatedWorker(Protocol):
    """The part of vLLM's worker that brings new weights: what its routes of the same names call."""

    def start_weight_update(self) -> None:
        """Open a session. Raises ``RuntimeError`` if one is open."""
        ...

    def start_draft_weight_update(self) -> None:
        """Open a session for the speculative decoder's own model."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load. If that fails, the session has ended."""
        ...

    def finish_weight_update(self) -> None:
        """Close the session. Raises ``RuntimeError`` if none is open."""
        ...


class ModelConfig(Protocol):
    """``vllm.config.ModelConfig``."""

    @property
    def quantization(self) -> str | None:
        """The method's name."""
        ...
