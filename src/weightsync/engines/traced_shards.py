"""Direct delivery into an engine's parameters: where its loader puts what, learned once and tried against it; or why not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from weightsync.errors import LayoutError, LoadError
from weightsync.model import Manifest
from weightsync.tensors.shards import Shard
from weightsync.tracing.tracer import Traced, trace_loader
from weightsync.tracing.verify import Reload, try_against

__all__ = ["DirectShards", "find_direct"]

_log = logging.getLogger(__name__)


class DirectShards:
    """The parameters of an engine's model as shards of the checkpoint, followed where they move. Made by :func:`find_direct`."""

    def __init__(self, traced: Traced, model: nn.Module) -> None:
        self._traced, self._model = traced, model
        used = [name.rpartition(".") for name in dict.fromkeys(copy.parameter for copy in traced.copies)]
        self._used = [(model.get_submodule(layer), name) for layer, _, name in used]
        self._where, self._shards = self._look(), traced.shards(model)

    def _look(self) -> list[tuple[int, tuple[int, ...]]]:
        tensors: list[torch.Tensor] = [getattr(layer, name) for layer, name in self._used]
        return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]

    def now(self) -> Sequence[Shard]:
        """The shards where they are now; cheap while nothing has moved, as it is asked for while the engine stands still.

        Raises :class:`~weightsync.errors.LayoutError` if the engine has made something else of a parameter.
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
) -> DirectShards | str:
    """Shards over ``model``'s parameters, or in one line why weights have to be streamed through its loader.

    Its loader is traced, then tried with random weights (:func:`~weightsync.tracing.verify.try_against`, which says what ``engine``
    and ``package`` are): all layers, some at a time. On return the model holds the bits that it held before. Nothing may run it
    meanwhile. With several ``ranks`` each sees its own parts only; the coordinator compares all layouts.
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
        elsewhere = {str(shard.tensor.device) for shard in direct.now()} - {str(device)}
        if elsewhere:
            return f"some parameters are not on {device} but on {', '.join(sorted(elsewhere))}"
        with _parameters_kept(model):
            reason = try_against(model, traced, direct.now(), reload, engine=engine, package=package)
    except (LoadError, LayoutError) as error:
        return str(error)
    if reason is None:
        _log.info("weightsync: %d tensors go straight into the parameters of %s", len(manifest), engine)
        return direct
    return reason


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Put back parameters that the loader replaced, by some of the trace, which have no bytes, or of the trial."""
    before = [(layer, name, parameter) for layer in model.modules() for name, parameter in layer._parameters.items()]
    try:
        yield
    finally:
        for layer, name, parameter in before:
            layer._parameters[name] = parameter
