"""What concerns a whole vLLM engine, asked for by rank 0's worker over vLLM's own HTTP routes."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self

import httpx

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, LoadError, PeerLost, WeightSyncError
from weightsync.messages import PauseMode

__all__ = ["Controls", "HttpControls"]

_SHOWN = 500


class Controls(Protocol):
    """A whole engine's controls. Every method ends within ``timeout`` seconds, with an error at the latest."""

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Return with no step running, and none starting until :meth:`resume`."""
        ...

    def install(self, timeout: float, *, draft: bool = False) -> None:
        """Every worker loads what its rank has staged, ``draft`` too; raises what any of them raised."""
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
    """:class:`Controls` of the vLLM server at ``url``, or of the stand-in that :mod:`weightsync.adapters.vllm.front` serves.

    ``token`` is sent as a bearer token. Raises :class:`~weightsync.errors.PeerLost` if nobody answers,
    :class:`~weightsync.errors.DeadlineExceeded`, and :class:`~weightsync.errors.WeightSyncError` with what the server said.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_keepalive_connections=0)  # vLLM closes one after an error, which the next request would meet
        self._http = httpx.Client(base_url=self._url, headers=headers, trust_env=False, limits=limits)  # no proxy sees the token

    def join(self, init_info: dict[str, object], timeout: float) -> None:
        """Have every worker join a coordinator."""
        self._post("/init_weight_transfer_engine", timeout, body={"init_info": init_info})

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating. Caches are kept here: whether dropping them worked is looked at in :meth:`flush`."""
        self._post("/pause", timeout, mode=mode, clear_cache="false")

    def install(self, timeout: float, *, draft: bool = False) -> None:
        """One session of vLLM's, or two: start, update (every worker loads), finish.

        A session that a failure left open in some worker is closed first. Raises :class:`~weightsync.errors.LoadError`.
        """
        deadline = Deadline(timeout)
        for start in ("/start_weight_update", "/start_draft_weight_update")[: 1 + draft]:
            try:
                self._post(start, deadline.remaining("starting vLLM's update"))
            except (PeerLost, DeadlineExceeded):
                raise
            except WeightSyncError:
                self._close_session(deadline)
                self._post(start, deadline.remaining("starting vLLM's update"))
            try:
                self._post("/update_weights", deadline.remaining("loading into vLLM"), body={"update_info": {}})
            except (PeerLost, DeadlineExceeded):
                raise
            except WeightSyncError as error:
                self._close_session(deadline)
                raise LoadError(f"vLLM did not load what was staged: {error}") from error
            self._post("/finish_weight_update", deadline.remaining("finishing vLLM's update"), body={})

    def _close_session(self, deadline: Deadline) -> None:
        """Workers that have no session refuse this, and the others close theirs: both are what is wanted."""
        with contextlib.suppress(WeightSyncError):
            self._post("/finish_weight_update", deadline.remaining("closing vLLM's update"), body={})

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
        try:
            answer = self._http.post(route, params=query, json=body, timeout=timeout)
        except httpx.TimeoutException:
            raise DeadlineExceeded(f"vLLM at {self._url} did not answer {route} within {timeout:.3g} s") from None
        except httpx.HTTPError as error:
            raise PeerLost(f"vLLM at {self._url} does not answer {route}: {error}") from None
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise WeightSyncError(f"vLLM at {self._url} has no route {route}: start it with VLLM_SERVER_DEV_MODE=1")
        if answer.status_code != HTTPStatus.OK:
            raise WeightSyncError(f"{route} of vLLM at {self._url}: HTTP {answer.status_code}: {answer.text[:_SHOWN]}")
        try:
            found = answer.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
