"""What weightsync calls of vLLM's engine objects, as protocols: a ``vllm.LLM`` is an :class:`OfflineLLM`, and so on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from weightsync.messages import PauseMode

__all__ = ["AsyncEngine", "GeneratingEngine", "ModelConfig", "OfflineLLM"]


class OfflineLLM(Protocol):
    """``vllm.LLM``."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""
        ...

    def start_weight_update(self) -> None:
        """Open a session."""
        ...

    def start_draft_weight_update(self) -> None:
        """Open a session for the speculative decoder's own model."""
        ...

    def update_weights(self, request: dict[str, Any]) -> None:
        """Load."""
        ...

    def finish_weight_update(self) -> None:
        """Close the session."""
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

    async def start_weight_update(self) -> None:
        """Open a session."""
        ...

    async def start_draft_weight_update(self) -> None:
        """Open a session for the speculative decoder's own model."""
        ...

    async def update_weights(self, request: Any) -> None:  # noqa: ANN401
        """Load."""
        ...

    async def finish_weight_update(self) -> None:
        """Close the session."""
        ...

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights."""
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values."""
        ...


class GeneratingEngine(Protocol):
    """The part of ``AsyncLLM`` that answers requests."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:  # noqa: ANN401
        """Outputs as they come."""
        ...


class ModelConfig(Protocol):
    """``vllm.config.ModelConfig``."""

    @property
    def quantization(self) -> str | None:
        """The method's name."""
        ...
