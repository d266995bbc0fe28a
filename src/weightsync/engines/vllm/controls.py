"""What concerns a whole vLLM engine, asked for by rank 0's worker; of a vLLM server, over its own HTTP routes."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Protocol
from urllib.parse import urlencode, urlsplit

import msgspec

from weightsync.errors import ConfigurationError, DeadlineExceeded, LoadError, PeerLost, WeightSyncError
from weightsync.model import PauseMode
from weightsync.protocol.messages import UNREADABLE

__all__ = ["INSTALL", "Controls", "HttpControls"]

_SHOWN = 500
_LONGEST = 1 << 20  # bytes of an answer

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
        """Drop every cached key and value; whether that worked."""
        ...

    def label(self, version: str, timeout: float) -> None:
        """Name the weights."""
        ...

    def resume(self, timeout: float) -> None:
        """Generate again."""
        ...


class HttpControls:
    """:class:`Controls` of the vLLM server at ``url``.

    Raises :class:`~weightsync.errors.PeerLost` if nobody answers,
    :class:`~weightsync.errors.DeadlineExceeded`, and :class:`~weightsync.errors.WeightSyncError` with what the server said;
    :class:`~weightsync.errors.ConfigurationError` if ``url`` is none of HTTP.
    """

    # Not httpx: an engine stands still meanwhile, and that takes twice as long for a small request.

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{url!r} is not the URL of a vLLM server; write it as http://host:port")
        self._host, self._path = parts.netloc.rpartition("@")[2], parts.path
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection

    def join(self, init_info: dict[str, object], timeout: float) -> None:
        """Have every worker join a coordinator."""
        self._post("/init_weight_transfer_engine", timeout, body={"init_info": init_info})

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating. Caches are kept here: whether dropping them worked is looked at in :meth:`flush`."""
        self._post("/pause", timeout, mode=mode, clear_cache="false")

    def install(self, timeout: float) -> None:
        """One call of all workers. Raises :class:`~weightsync.errors.LoadError`."""
        try:
            self._post("/collective_rpc", timeout, body={"method": INSTALL})
        except (PeerLost, DeadlineExceeded):
            raise
        except WeightSyncError as error:
            raise LoadError(f"vLLM did not load what was staged: {error}") from error

    def flush(self, timeout: float) -> bool:
        """Drop the prefix cache and the keys and values of requests that are held: these are read anew with the new weights."""
        answer = self._post("/reset_prefix_cache", timeout, reset_running_requests="true", reset_external="true")
        return answer.get("success") is True

    def label(self, version: str, timeout: float) -> None:
        """VLLM names it in ``/weight_info`` and in the version spans of its outputs."""
        self._post("/update_weight_version", timeout, body={"new_version": version})

    def resume(self, timeout: float) -> None:
        """Generate again."""
        self._post("/resume", timeout)

    def _post(self, route: str, timeout: float, body: dict[str, object] | None = None, **query: str) -> dict[str, object]:
        asked = f"{self._path}{route}?{urlencode(query)}" if query else self._path + route
        try:
            # A connection for each: vLLM closes one after an error, which the next request would meet.
            with contextlib.closing(self._kind(self._host, timeout=timeout)) as connection:
                connection.request("POST", asked, None if body is None else msgspec.json.encode(body), self._headers)
                answer = connection.getresponse()
                status, content = answer.status, answer.read(_LONGEST)
        except TimeoutError:
            raise DeadlineExceeded(f"vLLM at {self._url} did not answer {route} within {timeout:.3g} s") from None
        except (OSError, HTTPException) as error:
            raise PeerLost(f"vLLM at {self._url} does not answer {route}: {error}") from None
        if status == HTTPStatus.NOT_FOUND:
            raise WeightSyncError(f"vLLM at {self._url} has no route {route}: start it with VLLM_SERVER_DEV_MODE=1")
        if status != HTTPStatus.OK:
            text = content.decode(errors="replace")[:_SHOWN]
            raise WeightSyncError(f"{route} of vLLM at {self._url}: HTTP {status}: {text}")
        try:
            decoded = msgspec.json.decode(content)
        except UNREADABLE:
            return {}
        return decoded if isinstance(decoded, dict) else {}
