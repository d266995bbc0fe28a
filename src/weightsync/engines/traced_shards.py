"""Direct delivery into an engine's parameters: traces its loader once, and verifies the trace against the loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from weightsync.errors import ConfigurationError, LayoutError, LoadError
from weightsync.model import Manifest
from weightsync.protocol.messages import Delivery
from weightsync.tensors.shards import Shard
from weightsync.tracing.tracer import Traced, trace_loader
from weightsync.tracing.verify import Reload, try_against

_log = logging.getLogger(__name__)


class DirectShards:
    """Shards over the parameters of an engine's model. Follows parameters that move. Made by :func:`find_direct`."""

    def __init__(self, traced: Traced, model: nn.Module) -> None:
        self._traced, self._model = traced, model
        used = [name.rpartition(".") for name in dict.fromkeys(copy.parameter for copy in traced.copies)]
        self._used = [(model.get_submodule(layer), name) for layer, _, name in used]
        self._where, self._shards = self._look(), traced.shards(model)

    def _look(self) -> list[tuple[int, tuple[int, ...]]]:
        tensors: list[torch.Tensor] = [getattr(layer, name) for layer, name in self._used]
        return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]

    def now(self) -> Sequence[Shard]:
        """Return the shards at their current addresses. Fast if nothing has moved, because the engine is paused meanwhile.

        Raises:
            LayoutError: The engine changed the shape or dtype of a parameter.
        """
        where = self._look()
        if where != self._where:
            self._shards = self._traced.shards(self._model)
            self._where = where
        return self._shards


def find_direct(
    model: nn.Module,
    manifest: Manifest,
    reload: Reload,
    device: torch.device,
    ranks: int = 1,
    *,
    engine: str = "the engine",
    package: str | None = None,
    to_load: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> DirectShards | str:
    """Return shards over ``model``'s parameters, or the reason on one line why weights must be streamed through its loader.

    Traces the loader, and then compares the trace with the loader's results for random weights, some layers at a time
    (:func:`~weightsync.tracing.verify.try_against`). Afterwards the model holds its original bits. The model must not run
    meanwhile.

    Args:
        model: The serving model.
        manifest: The checkpoint.
        reload: The engine's loading.
        device: Device on which all parameters must be.
        ranks: Number of ranks of the replica. With several, a rank sees only its own parts, and the coordinator compares all
            layouts.
        engine: Name of the engine in messages.
        package: Python package of the engine.
        to_load: Gives the model the parameters that its loader expects, if processing has replaced them since; only while it is
            traced.
    """
    load = getattr(model, "load_weights", None)
    if not callable(load):
        return f"{type(model).__name__} has no load_weights"
    try:
        with parameters_kept(model), to_load():
            traced = trace_loader(load, model, manifest)
        reason = traced.reason(ranks)
        if reason is not None:
            return reason
        direct = DirectShards(traced, model)
        elsewhere = {str(shard.tensor.device) for shard in direct.now()} - {str(device)}
        if elsewhere:
            return f"some parameters are not on {device} but on {', '.join(sorted(elsewhere))}"
        with parameters_kept(model):
            reason = try_against(model, traced, direct.now(), reload, engine=engine, package=package)
    except (LoadError, LayoutError) as error:
        return str(error)
    if reason is None:
        _log.info("weightsync: %d tensors are delivered directly into the parameters of %s", len(manifest), engine)
        return direct
    return reason


def chosen_shards(
    delivery: Delivery, find: Callable[[], DirectShards | str], rank: str, engine: str
) -> tuple[DirectShards | None, str]:
    """Return what ``find`` returns, as ``delivery`` has it: the shards, or ``None`` and the reason to stream (empty: it was asked).

    Raises:
        ConfigurationError: ``delivery`` is ``direct``, and there are no shards. The message names the ``rank``.
    """
    if delivery == "streamed":
        return None, ""
    direct = find()
    if isinstance(direct, DirectShards):
        return direct, ""
    if delivery == "direct":
        raise ConfigurationError(f"{rank} cannot be written directly: {direct}")
    _log.warning("weightsync: weights are streamed through %s's loader: %s", engine, direct)
    return None, direct


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Restore parameters that the loader replaces: by meta tensors during tracing, or by others during the trial."""
    before = [(layer, name, parameter) for layer in model.modules() for name, parameter in layer._parameters.items()]
    try:
        yield
    finally:
        for layer, name, parameter in before:
            layer._parameters[name] = parameter
