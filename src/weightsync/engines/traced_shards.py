"""Direct delivery into an engine's parameters: traces its loader once, and verifies the trace against the loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import nn

from weightsync.engines.processing import restored
from weightsync.errors import ConfigurationError, LayoutError, LoadError
from weightsync.model import Manifest
from weightsync.protocol.messages import Delivery
from weightsync.tensors.shards import Shard
from weightsync.tracing.tracer import Traced, trace_loader
from weightsync.tracing.verify import LayoutSteps, Reload, try_against

_log = logging.getLogger(__name__)


Process = Callable[[Collection[str], Mapping[str, torch.Tensor]], None]
"""Does to some layers, by name, what the engine does to them after loading: with what is in the tensors, by parameter, into the
memory that the engine computes with."""


class MovingParts(Protocol):
    """Parts of parameters, such as experts, that the engine exchanges with other ranks while it serves."""

    def key(self) -> object:
        """Return another value when parts are in other places."""

    def placed(self, traced: Traced, *, initial: bool = False) -> Traced:
        """Return where everything is now, or where the loader puts it; ``traced`` says it of a rank that holds every part."""


class DirectShards:
    """Shards over the parameters of an engine's model. Follows parameters that move. Made by :func:`find_direct`.

    With ``process`` the engine may keep parameters in other shapes and dtypes than its loader fills. Then shards are over the first
    bytes of their memory, or over separate memory where they have too few, and :meth:`process` makes them what the engine keeps.
    """

    def __init__(self, traced: Traced, model: nn.Module, process: Process | None = None, moving: MovingParts | None = None) -> None:
        self._whole, self._moving, self._model = traced, moving, model
        self._key = None if moving is None else moving.key()
        self._traced = traced if moving is None else moving.placed(traced)
        self.steps = None if process is None else LayoutSteps(partial(self._run, process))
        self._separate: dict[str, torch.Tensor] = {}
        self._forms: dict[str, object] = {}
        used = [name.rpartition(".") for name in dict.fromkeys(copy.parameter for copy in traced.copies)]
        self._used = [(model.get_submodule(layer), name) for layer, _, name in used]
        self._where, self._shards = self._look(), self._find()

    def _look(self) -> list[tuple[int, tuple[int, ...]]]:
        tensors: list[torch.Tensor | None] = [getattr(layer, name, None) for layer, name in self._used]
        return [(0, ()) if tensor is None else (tensor.data_ptr(), tensor.stride()) for tensor in tensors]

    def _find(self) -> list[Shard]:
        if self.steps is None:
            return self._traced.shards(self._model)
        self._places = {name: self._place(name, *wanted) for name, wanted in self._traced.wanted().items()}
        return self._traced.shards(self._places)

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        layer, _, key = name.rpartition(".")
        held: torch.Tensor | None = getattr(self._model.get_submodule(layer), key, None)
        form = None if held is None else (tuple(held.shape), held.dtype)
        if self._forms.setdefault(name, form) != form:
            raise LayoutError(f"the engine has changed parameter {name} to {form} since it joined")
        if held is not None and form == (shape, dtype):
            return held.detach()
        nbytes = prod(shape) * dtype.itemsize
        if held is None or held.nbytes < nbytes or held.storage_offset():
            device = next(self._model.parameters()).device
            return self._separate.setdefault(name, torch.empty(shape, dtype=dtype, device=device))
        if torch.empty_like(held, device="meta").stride() != held.stride():
            raise LayoutError(f"parameter {name} has gaps in memory, and is loaded in another form")
        return held.detach().as_strided((held.numel(),), (1,)).view(torch.uint8)[:nbytes].view(dtype).view(shape)

    def _run(self, process: Process, layers: Collection[str]) -> None:
        device = self._shards[0].tensor.device
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            process(layers, self._places)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @property
    def repacks(self) -> bool:
        """Whether :meth:`process` changes what was written to the shards."""
        return self.steps is not None and bool(self.steps.layers)

    def process(self) -> None:
        """Make what was written to the shards what the engine computes with, in the same memory. Blocks until that is done."""
        if self.steps is not None and self.steps.layers:
            self.steps.run(self.steps.layers)

    def now(self) -> Sequence[Shard]:
        """Return the shards at their current addresses. Fast if nothing has moved, because the engine is paused meanwhile.

        Raises:
            LayoutError: The engine changed the shape or dtype of a parameter.
        """
        where, moved = self._look(), False
        if self._moving is not None and (moved := (key := self._moving.key()) != self._key):
            self._traced, self._key = self._moving.placed(self._whole), key
        if moved or where != self._where:
            self._shards = self._find()
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
    process: Process | None = None,
    moving: MovingParts | None = None,
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
        process: What the engine does to its layers after loading them. It is used for layers in which the trial finds other bits
            than were loaded; ``None``: then weights are streamed.
        moving: Parts that move between ranks. Then ``to_load`` gives the model parameters that hold every part, and there is no
            ``process``.
    """
    load = getattr(model, "load_weights", None)
    if not callable(load):
        return f"{type(model).__name__} has no load_weights"
    try:
        with parameters_kept(model), to_load():
            whole = traced = trace_loader(load, model, manifest, converts=process is not None)
        reason = traced.reason(ranks)
        if reason is not None:
            return reason
        if moving is not None:
            traced = moving.placed(whole, initial=True)
        direct = DirectShards(traced, model, process)
        elsewhere = {str(shard.tensor.device) for shard in direct.now()} - {str(device)}
        if elsewhere:
            return f"some parameters are not on {device} but on {', '.join(sorted(elsewhere))}"
        with parameters_kept(model):
            reason = try_against(model, traced, direct.now(), reload, engine=engine, package=package, steps=direct.steps)
    except (LoadError, LayoutError) as error:
        return str(error)
    if reason is None:
        after = f", {len(direct.steps.layers)} layers are processed afterwards" if direct.steps and direct.repacks else ""
        _log.info("weightsync: %d tensors are delivered directly into the parameters of %s%s", len(manifest), engine, after)
        return direct if moving is None else DirectShards(whole, model, moving=moving)
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


def parameters_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Restore parameters that the loader replaces: by meta tensors during tracing, or by others during the trial."""
    return restored(layer._parameters for layer in model.modules())
