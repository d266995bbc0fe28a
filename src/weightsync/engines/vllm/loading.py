"""Whole checkpoint tensors into a running vLLM model, through vLLM's own loader and layerwise reload; again after a failure too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from weightsync.engines.vllm.engines import ModelConfig, UpdatedWorker
from weightsync.errors import LoadError

__all__ = ["install", "install_some", "load_in_sessions"]

_SHOWN = 5


def install(
    model: torch.nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], *, whole: bool = True
) -> None:
    """Load every tensor of a checkpoint into ``model``, in place, on the thread that runs the model.

    Not ``whole``: those of some layers; the others stay as they are.

    The reload is opened and closed here, in one go: left open, the model cannot run, and a second one would count what the first
    one kept. The tensors' memory may be used again when this returns. Raises what the loader raises, and
    :class:`~weightsync.errors.LoadError` for tensors that it did not take and for parameters that it never filled; the model then
    runs, with weights of several versions, until a later call succeeds.
    """
    with _packing_experts_anew(model):
        _reload(model, model_config, tensors, whole)


def _reload(model: torch.nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], whole: bool) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    tied = _tied(model)
    before = {name for name, _ in model.named_parameters()}  # of tied ones the first alone; the reload unties them for a while
    initialize_layerwise_reload(model)
    try:
        wanted = before & {name for name, _ in model.named_parameters()}
        left = iter(tensors)
        loaded = model.load_weights(left)  # type: ignore[operator]
        if (untaken := next(left, None)) is not None:
            raise LoadError(f"vLLM's loader stopped before {untaken[0]}, and left it and what comes after it untaken")
        # A quantized model makes parameters of its own, under names that no checkpoint has.
        if whole and model_config.quantization is None and loaded is not None and wanted - set(loaded):
            missing = sorted(wanted - set(loaded))
            raise LoadError(
                f"vLLM's loader left {len(missing)} parameters as they were: {', '.join(missing[:_SHOWN])}"
                f"{', ...' if len(missing) > _SHOWN else ''}"
            )
    except BaseException:
        _forget(model)
        finalize_layerwise_reload(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)
    for layer in tied:
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)


def install_some(model: torch.nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As :func:`install`, some layers whole; vLLM does not warn of all those that stay as they are."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        install(model, model_config, tensors, whole=False)
    finally:
        log.setLevel(level)


def load_in_sessions(worker: UpdatedWorker, *, draft: bool) -> None:
    """Have ``worker`` load in a session of its own, and its draft model in another before it; none is open afterwards.

    The draft first, so that layers that vLLM lets both use (an embedding that was equal when it started) end as the model's. A
    session that somebody left open is closed first. Raises what the worker raises.
    """
    for start in [*([worker.start_draft_weight_update] if draft else []), worker.start_weight_update]:
        with suppress(RuntimeError):  # most times there is none
            worker.finish_weight_update()
        start()
        worker.update_weights({})
        worker.finish_weight_update()


@contextmanager
def _packing_experts_anew(model: torch.nn.Module) -> Iterator[None]:
    """Have vLLM's CPU build pack experts in a reload, too.

    It packs them only when it makes their kernel, and not in a reload, after which it would read plain weights as packed ones.
    Without a kernel it makes one.
    """
    kernels: list[tuple[Any, object]] = []
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
        kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing was loaded there
                method.moe_kernel = kernel


def _tied(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that share a parameter with an earlier one, as a head with its embedding.

    No loader is called for them, so the reload does not process them again. vLLM's CPU build serves a head from a packed copy of
    its weight, made while processing: left alone, it would answer with the old head for ever.
    """
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


def _forget(model: torch.nn.Module) -> None:
    """Drop what an unfinished reload has buffered, so that finalizing puts back the old tensors of the layers not yet done."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights = []
