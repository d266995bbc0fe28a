"""Direct delivery into vLLM's parameters: where its loader puts what, learned once and tried against that loader; or why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from weightsync.engines.vllm.engines import ModelConfig
from weightsync.engines.vllm.verify_trace import try_against
from weightsync.errors import LayoutError, LoadError
from weightsync.model import Manifest
from weightsync.tensors.shards import Shard
from weightsync.tracing.tracer import Traced, trace_loader

__all__ = ["DirectShards", "VllmConfig", "find_direct", "why_streamed"]

Reload = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""VLLM's own loading of some layers, whole, into the model that serves, with all that it does to weights afterwards."""

_log = logging.getLogger(__name__)


class _Parallel(Protocol):
    @property
    def enable_eplb(self) -> bool: ...


class VllmConfig(Protocol):
    """The part of ``vllm.config.VllmConfig`` that decides."""

    @property
    def model_config(self) -> ModelConfig:
        """Says whether the model is quantized."""
        ...

    @property
    def parallel_config(self) -> _Parallel:
        """Says whether experts move."""
        ...

    @property
    def lora_config(self) -> object | None:
        """Adapters, if there may be any."""
        ...


def why_streamed(config: VllmConfig, device: torch.device) -> str | None:
    """What rules direct delivery out before anything is tried, in one line; ``None``: nothing does."""
    if device.type != "cuda":
        return f"this worker's weights are on {device.type}, where vLLM repacks linear weights after loading them"
    if config.model_config.quantization is not None:
        return f"the model is quantized ({config.model_config.quantization})"
    if config.lora_config is not None:
        return "LoRA is enabled, and vLLM has to be told of new base weights"
    if config.parallel_config.enable_eplb:
        return "experts are rebalanced while serving (enable_eplb), so they do not stay where they are"
    return None


class DirectShards:
    """The parameters of a vLLM model as shards of the checkpoint, followed where they move. Made by :func:`find_direct`."""

    def __init__(self, traced: Traced, model: nn.Module) -> None:
        self._traced, self._model = traced, model
        used = [name.rpartition(".") for name in dict.fromkeys(copy.parameter for copy in traced.copies)]
        self._used = [(model.get_submodule(layer), name) for layer, _, name in used]
        self._where, self._shards = self._look(), traced.shards(model)

    def _look(self) -> list[tuple[int, tuple[int, ...]]]:
        found: list[torch.Tensor] = [getattr(layer, name) for layer, name in self._used]
        return [(one.data_ptr(), one.stride()) for one in found]

    def now(self) -> Sequence[Shard]:
        """The shards where they are now; cheap while nothing has moved, as it is asked for while the engine stands still.

        Raises :class:`~weightsync.errors.LayoutError` if vLLM has made something else of a parameter.
        """
        where = self._look()
        if where != self._where:
            self._shards = self._traced.shards(self._model)
            self._where = where
        return self._shards


def find_direct(model: nn.Module, manifest: Manifest, reload: Reload, device: torch.device, ranks: int = 1) -> DirectShards | str:
    """Shards over ``model``'s parameters, or in one line why weights have to be streamed through its loader.

    Its loader is traced, then tried with random weights (:func:`~weightsync.engines.vllm.verify_trace.try_against`): all layers,
    some at a time. On return the model holds the bits that it held before. Nothing may run it meanwhile. With several ``ranks``
    each sees its own parts only; the coordinator compares all layouts.
    """
    load = getattr(model, "load_weights", None)
    if not callable(load):
        return f"{type(model).__name__} has no load_weights"
    try:
        with _parameters_kept(model):
            traced = trace_loader(load, model, manifest)
        reason = traced.reason(ranks)
        if reason is not None:
            return reason
        direct = DirectShards(traced, model)
        elsewhere = {str(one.tensor.device) for one in direct.now()} - {str(device)}
        if elsewhere:
            return f"some parameters are not on {device} but on {', '.join(sorted(elsewhere))}"
        with _parameters_kept(model):
            reason = try_against(model, traced, direct.now(), reload)
    except (LoadError, LayoutError) as error:
        return str(error)
    if reason is None:
        _log.info("weightsync: %d tensors go straight into vLLM's parameters", len(manifest))
        return direct
    return reason


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Put back parameters that the loader replaced, by some of the trace, which have no bytes, or of the trial."""
    before = [(layer, name, one) for layer in model.modules() for name, one in layer._parameters.items()]
    try:
        yield
    finally:
        for layer, name, one in before:
            layer._parameters[name] = one
