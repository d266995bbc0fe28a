"""Changes of vLLM's classes by weightsync. They are made only if the classes have the required methods.

* ``Worker`` gets a method that loads the staged tensors. Rank 0 calls it on all workers. vLLM's setting for a class with further
  worker methods is reserved for its user.
* ``AsyncLLM`` (also used by the HTTP server) and ``LLMEngine`` (used by ``vllm.LLM``) join the coordinator when they are made, and
  an ``LLMEngine`` blocks rounds while it has requests. This needs ``WEIGHTSYNC_COORDINATOR`` when vLLM loads its plugins. Only the
  process that owns an engine can pause it, and vLLM has no hook for that process.
* HTTP servers check the versions that requests name (:mod:`~weightsync.engines.vllm.versioned_server`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from contextlib import ExitStack
from functools import partial
from typing import Any

from weightsync.config import variable
from weightsync.engines.vllm.attaching import attach, attach_async
from weightsync.engines.vllm.awaiting import coordinator_answers
from weightsync.engines.vllm.controls import DROP_LORA, INSTALL
from weightsync.engines.vllm.served_loras import follow_models, served_loras
from weightsync.engines.vllm.versioned_server import add_to_servers, keep_label, uses_backend
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import ConfigurationError
from weightsync.releases import JOINING_ASYNC, JOINING_OFFLINE, check_interface

_OWN = "_weightsync"
_WAIT_SECONDS = 300.0  # seconds for which a request waits for the end of an update

_log = logging.getLogger(__name__)


def _replica() -> str:
    return variable("WEIGHTSYNC_REPLICA") or f"vllm-{socket.gethostname()}-{os.getpid()}"


def add_install_method(worker_kind: type[Any], backend: type[Any]) -> None:
    """Add the method :data:`INSTALL` to vLLM's workers. It calls ``install`` of their engine of class ``backend``."""

    def install(worker: Any) -> None:  # noqa: ANN401 - vLLM's
        engine = worker.weight_transfer_engine
        if not isinstance(engine, backend):
            raise ConfigurationError("the weight-transfer backend of this vLLM worker is not weightsync")
        engine.install(worker)

    def drop_lora(worker: Any, label: str, number: int) -> None:  # noqa: ANN401 - vLLM's
        worker.weight_transfer_engine.drop_lora(label, number)

    setattr(worker_kind, INSTALL, install)
    setattr(worker_kind, DROP_LORA, drop_lora)


class _BusyGuard:
    """Blocks rounds while an ``LLMEngine`` has unfinished requests."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's
        self._attached = attach(weakref.proxy(engine), _replica())
        self._lock = threading.Lock()
        self._held: ExitStack | None = None

    def begin(self) -> None:
        with self._lock:
            if self._held is None:
                with ExitStack() as held:
                    held.enter_context(self._attached.in_use(_WAIT_SECONDS))
                    self._held = held.pop_all()

    def end(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held.close()


def _follow_offline(kind: Any) -> None:  # noqa: ANN401 - vLLM's class
    def init(made: Any, self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        made(self, *args, **kwargs)
        if uses_backend(self.vllm_config):
            setattr(self, _OWN, _BusyGuard(self))

    def ending(work: Any, self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        try:
            return work(self, *args, **kwargs)
        finally:
            guard = getattr(self, _OWN, None)
            if guard is not None and not self.has_unfinished_requests():
                guard.end()

    def beginning(work: Any, self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        guard = getattr(self, _OWN, None)
        if guard is not None:
            guard.begin()
        return work(self, *args, **kwargs)

    wrap_once(kind, "__init__", init)
    wrap_once(kind, "add_request", lambda work, *args, **kwargs: ending(partial(beginning, work), *args, **kwargs))
    wrap_once(kind, "step", ending)
    wrap_once(kind, "abort_request", ending)


def _follow_async(kind: Any) -> None:  # noqa: ANN401 - vLLM's class
    async def join(reference: weakref.ref[Any]) -> None:
        try:
            await coordinator_answers()
            engine = reference()
            if engine is None:
                return
            await attach_async(engine, _replica())
        except Exception:  # noqa: BLE001 - logged; the server continues without updates
            _log.exception(
                "weightsync: this vLLM could not join the coordinator at %s and gets no weights from it: correct the error, and "
                "restart vLLM",
                variable("WEIGHTSYNC_COORDINATOR"),
            )
            return
        _log.info("weightsync: joined %s as %s", variable("WEIGHTSYNC_COORDINATOR"), _replica())

    def init(made: Any, self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        made(self, *args, **kwargs)
        if not uses_backend(self.vllm_config):
            return
        if served_loras(self) is not None:
            follow_models()
        if self._client_count > 1:
            _log.error("weightsync: several API servers for one vLLM are not supported: use --api-server-count 1")
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            _log.error("weightsync: an AsyncLLM made outside an event loop cannot join automatically: await attach_async(engine)")
            return
        add_to_servers()
        setattr(self, _OWN, loop.create_task(join(weakref.ref(self)), name="weightsync-join"))

    wrap_once(kind, "__init__", init)
    keep_label(kind)


def follow_engines() -> None:
    """Make every later engine of this process that uses the backend join automatically. Idempotent."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    for kind, follow, purpose in ((AsyncLLM, _follow_async, JOINING_ASYNC), (LLMEngine, _follow_offline, JOINING_OFFLINE)):
        try:
            check_interface("vllm", purpose)
        except ConfigurationError as error:
            _log.error("weightsync: %s", error)
        else:
            follow(kind)
