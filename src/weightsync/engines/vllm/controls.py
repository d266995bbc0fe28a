"""Controls of a whole vLLM engine for rank 0's worker, and their implementation over the HTTP routes of a vLLM server."""

from __future__ import annotations

from typing import Protocol

from weightsync.deadline import Deadline
from weightsync.external.clients import vllm
from weightsync.external.clients.http import EngineHttp
from weightsync.model import PauseMode

INSTALL = "weightsync_install"
"""Name of the worker method that loads the staged tensors."""

DROP_LORA = "weightsync_drop_lora"
"""Name of the worker method that frees a version of an adapter."""

LORA_PATH = "weightsync:"
"""Begins the paths of our adapters, which are no files."""


class Controls(Protocol):
    """Controls of a whole engine. Every method returns or raises within ``timeout`` seconds."""

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Pause: return when no step is running. None starts until :meth:`resume`."""

    def install(self, timeout: float) -> None:
        """Let every worker load its staged tensors. Raises the error of any worker."""

    def flush(self, timeout: float) -> bool:
        """Drop all cached keys and values. Returns ``False`` or raises if that failed."""

    def label(self, version: str, timeout: float) -> None:
        """Set the label of the weights."""

    def resume(self, timeout: float) -> None:
        """Resume generation."""


class LoraControls(Protocol):
    """Controls of an engine that serves LoRA adapters, for rank 0. Methods return or raise as those of :class:`Controls`."""

    def add_lora(self, label: str, timeout: float) -> None:
        """Let every worker take the adapter that it has staged as ``label``, then let requests name it."""

    def drop_lora(self, label: str, timeout: float) -> None:
        """Let no new request name ``label``, and free it when none uses it."""


class HttpControls:
    """:class:`Controls` of the vLLM server at ``url``.

    Raises:
        LoadError: The server returned an error, which the message quotes. Like the next, methods raise it.
        PeerLost: The server does not answer.
        WeightSyncError: :class:`~weightsync.external.clients.http.EngineHttp` raised it.
    """

    def __init__(self, url: str) -> None:
        self._http = EngineHttp(url, missing_route=vllm.MISSING_ROUTE)

    def join(self, init_info: dict[str, object], timeout: float) -> None:
        """Let every worker join a coordinator."""
        self._http.call(vllm.init_engine(init_info), Deadline(timeout))

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Pause generation. Keeps the caches, because :meth:`flush` drops them and checks the result."""
        self._http.call(vllm.pause(mode, clear_cache=False), Deadline(timeout))

    def install(self, timeout: float) -> None:
        """Let every worker load its staged tensors, with one request."""
        self._http.call(vllm.collective_rpc(INSTALL), Deadline(timeout))

    def flush(self, timeout: float) -> bool:
        """Drop the prefix cache, and the keys and values of suspended requests, which are recomputed with the new weights."""
        answer = self._http.call(vllm.reset_prefix_cache(everything=True), Deadline(timeout))
        return isinstance(answer, dict) and answer.get("success") is True

    def label(self, version: str, timeout: float) -> None:
        """Set the label, which vLLM reports in ``/weight_info`` and in the version spans of its outputs."""
        self._http.call(vllm.update_weight_version(version), Deadline(timeout))

    def resume(self, timeout: float) -> None:
        """Resume generation."""
        self._http.call(vllm.RESUME, Deadline(timeout))
