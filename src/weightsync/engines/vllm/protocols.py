"""Protocols of vLLM's objects, reduced to the methods that weightsync calls."""

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


class UpdatedWorker(Protocol):
    """The part of vLLM's worker that updates weights, called by the routes of the same names."""

    def start_weight_update(self) -> None:
        """Open a session.

        Raises:
            RuntimeError: A session is already open.
        """

    def start_draft_weight_update(self) -> None:
        """Open a session for the draft model."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights. If this fails, the session has ended."""

    def finish_weight_update(self) -> None:
        """Close the session.

        Raises:
            RuntimeError: No session is open.
        """


class ModelConfig(Protocol):
    """``vllm.config.ModelConfig``."""

    @property
    def quantization(self) -> str | None:
        """Name of the quantization method; ``None`` if the model is not quantized."""
