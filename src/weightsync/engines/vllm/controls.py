"""What concerns a whole vLLM engine, asked for by rank 0's worker; of a vLLM server, over its own HTTP routes."""

from __future__ import annotations

from typing import Protocol

from weightsync.deadline import Deadline
from weightsync.external.clients import vllm
from weightsync.external.clients.http import EngineHttp
from weightsync.model import PauseMode

__all__ = ["INSTALL", "Controls", "HttpControls"]

INSTALL = "weightsync_install"
"""The method of vLLM's workers in which each loads what its rank has staged."""


class Controls(Protocol):
    """A whole engine's controls. Every method ends within ``timeout`` seconds, with an error at the latest."""

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Return with no step running, and none starting until :meth:`resume`."""
        ...

    def install(self, timeout: float) -> None:
        """Every worker loads what its rank has staged; raises what any of them raised."""
        ...

    def flush(self, timeout: float) -> bool:
        """Drop every cached key and value. Returns ``False``, or raises, if that did not work."""
        ...

    def label(self, version: str, timeout: float) -> None:
        """Name the weights."""
        ...

    def resume(self, timeout: float) -> None:
        """Generate again."""
        ...


class HttpControls:
    """:class:`Controls` of the vLLM server at ``url``.

    Raises what :class:`~weightsync.external.clients.http.EngineHttp` raises: above all :class:`~weightsync.errors.LoadError` with
    what the server answered, and :class:`~weightsync.errors.PeerLost` if it does not answer.
    """

    def __init__(self, url: str) -> None:
        self._http = EngineHttp(url, missing_route=vllm.MISSING_ROUTE)

    def join(self, init_info: dict[str, object], timeout: float) -> None:
        """Have every worker join a coordinator."""
        self._http.call(vllm.init_engine(init_info), Deadline(timeout))

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating. Caches are kept here: whether dropping them worked is looked at in :meth:`flush`."""
        self._http.call(vllm.pause(mode, clear_cache=False), Deadline(timeout))

    def install(self, timeout: float) -> None:
        """One call of all workers."""
        self._http.call(vllm.collective_rpc(INSTALL), Deadline(timeout))

    def flush(self, timeout: float) -> bool:
        """Drop the prefix cache and the keys and values of requests that are held: these are read anew with the new weights."""
        answer = self._http.call(vllm.reset_prefix_cache(everything=True), Deadline(timeout))
        return isinstance(answer, dict) and answer.get("success") is True

    def label(self, version: str, timeout: float) -> None:
        """VLLM names it in ``/weight_info`` and in the version spans of its outputs."""
        self._http.call(vllm.update_weight_version(version), Deadline(timeout))

    def resume(self, timeout: float) -> None:
        """Generate again."""
        self._http.call(vllm.resume(), Deadline(timeout))
