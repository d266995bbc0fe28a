"""SGLang plugin: the entry point ``weightsync`` in the group ``sglang.srt.plugins``, which SGLang calls in each process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from weightsync.config import variable
from weightsync.engines.sglang.loop import SchedulerLoop
from weightsync.engines.sglang.quantized import keep_formats
from weightsync.errors import ConfigurationError
from weightsync.external.versioned_requests import VersionedRequests
from weightsync.releases import check_interface

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
SERVER = "sglang.srt.entrypoints.http_server"
LOADER = "sglang.srt.model_loader.loader"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

_log = logging.getLogger(__name__)

_loops: dict[int, SchedulerLoop] = {}
"""Loops of this process by the id of their scheduler and of its request receiver, while they run."""


def register() -> None:
    """Hook SGLang's event loop, so that every scheduler of this process joins the coordinator.

    Without ``WEIGHTSYNC_COORDINATOR`` this does nothing. Under a release without the required parts it logs an error that names
    them, and SGLang serves without updates.
    """
    coordinator = variable("WEIGHTSYNC_COORDINATOR")
    if not coordinator:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        check_interface("sglang")
    except ConfigurationError as error:
        _log.error("weightsync: %s. It gets no weights from %s", error, coordinator)
        return
    HookRegistry.register(f"{SCHEDULER}.run_event_loop", _run_event_loop, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.process_input_requests", _process_input_requests, HookType.AROUND)
    HookRegistry.register(f"{RECEIVER}._pull_raw_reqs", _pulled, HookType.AFTER)
    HookRegistry.register(f"{LOADER}._initialize_model", keep_formats, HookType.AFTER)
    HookRegistry.register(f"{TOKENIZER}.init_request_dispatcher", _take_labels, HookType.AFTER)
    HookRegistry.register(f"{TOKENIZER}._validate_and_resolve_lora", _resolve_lora, HookType.AROUND)


def _run_event_loop(original: Callable[[Any], None], scheduler: Any) -> None:  # noqa: ANN401 - SGLang's
    from weightsync.engines.sglang.joining import JoinedScheduler

    try:
        joined = JoinedScheduler(scheduler, tells_tokenizer=_tokenizer_takes_labels(scheduler))
    except Exception:  # noqa: BLE001 - logged; SGLang continues without updates
        _log.exception(
            "weightsync: this SGLang could not join the coordinator at %s and gets no weights from it: correct the error, and "
            "restart SGLang",
            variable("WEIGHTSYNC_COORDINATOR"),
        )
        original(scheduler)
        return
    keys = id(scheduler), id(scheduler.request_receiver)
    _log.info("weightsync: joined %s as %s", variable("WEIGHTSYNC_COORDINATOR"), joined.engine.replica)
    with joined:
        _loops.update(dict.fromkeys(keys, joined.loop))
        try:
            original(scheduler)
        finally:
            for key in keys:
                del _loops[key]


def _process_input_requests(original: Callable[..., None], scheduler: Any, recv_reqs: list[object]) -> None:  # noqa: ANN401
    loop = _loops.get(id(scheduler))
    if loop is None:
        original(scheduler, recv_reqs)
    else:
        loop.pass_through(lambda requests: original(scheduler, requests), recv_reqs)


def _pulled(result: list[object] | None, receiver: Any) -> None:  # noqa: ANN401 - SGLang's
    loop = _loops.get(id(receiver))
    if loop is not None:
        loop.received(result)


def _take_labels(result: None, manager: Any) -> None:  # noqa: ANN401 - SGLang's TokenizerManager
    """Let the tokenizer's process, which answers requests, take the labels that rank 0 sends, and check what requests name."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput, UpdateWeightVersionReqInput
    from sglang.utils import TypeBasedDispatcher

    from weightsync.engines.sglang.served_loras import TokenizerLoras

    def take(request: Any) -> None:  # noqa: ANN401 - SGLang's
        manager._update_weight_version_if_provided(request.new_version)

    loras = manager._weightsync_loras = TokenizerLoras(manager)
    manager._result_dispatcher += TypeBasedDispatcher(
        [(UpdateWeightVersionReqInput, take), (LoadLoRAAdapterReqInput, loras.take), (UnloadLoRAAdapterReqInput, loras.take)]
    )
    server = sys.modules.get(SERVER)  # not in the other processes, nor around an Engine without HTTP
    if server is not None and server.app.middleware_stack is None:  # several tokenizers, which no label reaches, start after it
        server.app.add_middleware(
            VersionedRequests, served=lambda: manager.config_value("weight_version"), adapters=lambda: loras.live
        )


def _resolve_lora(original: Callable[..., Awaitable[None]], manager: Any, request: Any) -> Awaitable[None]:  # noqa: ANN401
    resolved: Awaitable[None] = manager._weightsync_loras.resolve(original, request)
    return resolved


def _tokenizer_takes_labels(scheduler: Any) -> bool:  # noqa: ANN401 - SGLang's
    """Return whether the one tokenizer process runs :func:`_take_labels`. Another one would end at an unknown request."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    hooked = hasattr(TokenizerManager.init_request_dispatcher, "__wrapped__")
    arguments = scheduler.server_args
    grpc = any(getattr(arguments, name, False) for name in ("smg_grpc_mode", "grpc_mode"))  # not in every release
    answers_http = scheduler.rust_server is None and not grpc
    return hooked and answers_http and arguments.tokenizer_worker_num == 1
