"""vLLM as a weightsync engine: a plugin for its workers, and three ways to join a running vLLM to a coordinator.

``--weight-transfer-config '{"backend": "weightsync"}'`` adds a weightsync engine rank to every worker. Then

* :func:`~weightsync.engines.vllm.attaching.attach` joins a ``vllm.LLM``,
* :func:`~weightsync.engines.vllm.attaching.attach_async` joins an ``AsyncLLM``,
* :func:`~weightsync.engines.vllm.attaching.attach_server` joins a running HTTP server.

The coordinator sees one replica with as many ranks as vLLM has workers. A worker's parameters are written directly, or the worker
stages whole checkpoint tensors for vLLM's loader. Only rank 0 requests operations of the whole engine (pause, install, flush,
label, resume). It calls a server's HTTP routes, or the process that owns the ``LLM`` or ``AsyncLLM``, over a Unix socket if that
is another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.first_use import on_first_use

if TYPE_CHECKING:
    from weightsync.engines.vllm.attaching import Attached, attach, attach_async, attach_server

__all__ = ["BACKEND", "Attached", "attach", "attach_async", "attach_server"]

BACKEND = "weightsync"
"""Name of the weight-transfer backend in vLLM's configuration."""


if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, dict.fromkeys(__all__, "attaching"))
