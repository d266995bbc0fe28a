"""Every change that weightsync makes to vLLM's own classes. Made only if they have the methods that it needs.

* ``Worker`` gets a method that rank 0 has all workers call: load what is staged. vLLM has a place for one class with more methods
  of workers, which is its user's to name.
* ``AsyncLLM`` (which the HTTP server uses too) and ``LLMEngine`` (which ``vllm.LLM`` uses) join the coordinator when they are made,
  and an ``LLMEngine`` keeps rounds away while it has requests. Only if ``WEIGHTSYNC_COORDINATOR`` is set when vLLM loads its
  plugins. vLLM has no hook for the process that owns its engine, and only that process can pause it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from weightsync.engines.vllm.attaching import attach, attach_async
from weightsync.engines.vllm.controls import INSTALL
from weightsync.engines.vllm.plugin import BACKEND
from weightsync.engines.vllm.releases import installed_release, require
from weightsync.errors import Aborted, ConfigurationError

__all__ = ["add_install_method", "follow_engines", "replica_name"]

_OWN = "_weightsync"
_PATIENCE = 300.0  # seconds that a request waits for an update to end

_OF_ASYNC = ("collective_rpc", "pause_generation", "resume_generation", "reset_prefix_cache")
_OF_OFFLINE = ("collective_rpc", "add_request", "step", "abort_request", "has_unfinished_requests", "reset_prefix_cache")

_log = logging.getLogger(__name__)


def replica_name() -> str:
    """``WEIGHTSYNC_REPLICA``, or a name of this host's and process's own."""
    return os.environ.get("WEIGHTSYNC_REPLICA") or f"vllm-{socket.gethostname()}-{os.getpid()}"


def add_install_method(worker_kind: type[Any], backend: type[Any]) -> None:
    """Give vLLM's workers the method :data:`INSTALL`, which calls ``install`` of their engine of class ``backend``."""

    def install(worker: Any) -> None:  # noqa: ANN401 - vLLM's
        engine = worker.weight_transfer_engine
        if not isinstance(engine, backend):
            raise ConfigurationError("this vLLM worker has another backend than weightsync")
        engine.install(worker)

    setattr(worker_kind, INSTALL, install)


def _wanted(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's
    chosen = getattr(vllm_config, "weight_transfer_config", None)
    return chosen is not None and chosen.backend == BACKEND


class _Offline:
    """The part of ``vllm.LLM`` that joining needs, of an ``LLMEngine``, which it does not keep alive."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's
        self._engine = weakref.ref(engine)

    def _there(self) -> Any:  # noqa: ANN401 - vLLM's
        engine = self._engine()
        if engine is None:
            raise Aborted("this vLLM engine is gone")
        return engine

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return list(self._there().collective_rpc(method, timeout, args, kwargs))

    def update_weight_version(self, new_version: str) -> None:
        label = getattr(self._there(), "set_weight_version", None)  # vLLM 0.25 has no names for weights
        if label is not None:
            label(new_version)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return bool(self._there().reset_prefix_cache(reset_running_requests, reset_connector))


class _Turns:
    """Keeps rounds away from the first request that an ``LLMEngine`` takes until it has none left."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's
        self._attached = attach(_Offline(engine), replica_name())
        self._lock = threading.Lock()
        self._held: ExitStack | None = None

    def begin(self) -> None:
        with self._lock:
            if self._held is None:
                with ExitStack() as held:
                    held.enter_context(self._attached.in_use(_PATIENCE))
                    self._held = held.pop_all()

    def end(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held.close()


def _follow_offline(kind: Any) -> None:  # noqa: ANN401 - vLLM's class
    made, taken = kind.__init__, kind.add_request

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        made(self, *args, **kwargs)
        if _wanted(self.vllm_config):
            setattr(self, _OWN, _Turns(self))

    @functools.wraps(taken)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        turns = getattr(self, _OWN, None)
        if turns is not None:
            turns.begin()
        return taken(self, *args, **kwargs)

    def ending(work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            try:
                return work(self, *args, **kwargs)
            finally:
                turns = getattr(self, _OWN, None)
                if turns is not None and not self.has_unfinished_requests():
                    turns.end()

        return wrapped

    kind.__init__, kind.add_request = init, ending(add_request)
    kind.step, kind.abort_request = ending(kind.step), ending(kind.abort_request)


def _follow_async(kind: Any) -> None:  # noqa: ANN401 - vLLM's class
    made = kind.__init__

    async def join(engine: Any) -> None:  # noqa: ANN401 - vLLM's
        try:
            await attach_async(engine, replica_name())
        except Exception:  # noqa: BLE001 - the server goes on without us, and its log says so
            _log.exception(
                "weightsync: this vLLM did not join the coordinator at %s and gets no weights from it: see the error, and start "
                "vLLM again",
                os.environ.get("WEIGHTSYNC_COORDINATOR"),
            )
            return
        _log.info("weightsync: joined %s as %s", os.environ.get("WEIGHTSYNC_COORDINATOR"), replica_name())

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        made(self, *args, **kwargs)
        if not _wanted(self.vllm_config):
            return
        if self._client_count > 1:
            _log.error("weightsync: several API servers in front of one vLLM are not supported: use --api-server-count 1")
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            _log.error("weightsync: an AsyncLLM made outside an event loop does not join by itself: await attach_async(engine)")
            return
        setattr(self, _OWN, loop.create_task(join(self), name="weightsync-join"))

    kind.__init__ = init


def follow_engines() -> None:
    """From now on every engine of this process that asks for the backend joins by itself. Safe twice."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    for kind, follow, needed in ((AsyncLLM, _follow_async, _OF_ASYNC), (LLMEngine, _follow_offline, _OF_OFFLINE)):
        try:
            require(installed_release(), "joining by the environment", kind, needed)
        except ConfigurationError as error:
            _log.error("weightsync: %s", error)
            continue
        if not kind.__dict__.get("_weightsync_followed", False):
            follow(kind)
            kind._weightsync_followed = True
