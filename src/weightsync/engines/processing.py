"""Processing of layers by the engine's own code, as after loading them, into the memory that the engine computes with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from weightsync.errors import LoadError

Given = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Returns a tensor of this shape for a parameter by name; ``None`` if there is none."""
_UNSAVED = "_non_persistent_buffers_set"


@contextmanager
def restored(tables: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Put back what the tables held, in themselves. Of a layer also which buffers it does not save, a set that modules change."""
    before = [(table, {key: set(held) if key == _UNSAVED else held for key, held in table.items()}) for table in tables]
    try:
        yield
    finally:
        for table, held in before:
            table.clear()
            table.update(held)


def methods_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Put back what layers' methods hold. Loading makes other kernels for quantized experts, over tensors of that loading."""
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    return restored(vars(method) for method in methods if method is not None)


def load_every(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], engine: str) -> Any:  # noqa: ANN401 - the engine's
    """Let the engine's ``model`` load all ``tensors``, and return what its loader returns.

    Raises:
        LoadError: The loader did not consume all of them.
        Exception: The loader raised it.
    """
    left = iter(tensors)
    loaded: Any = model.load_weights(left)  # type: ignore[operator]
    if (untaken := next(left, None)) is not None:
        raise LoadError(f"{engine}'s loader stopped before {untaken[0]} and did not load it and the tensors after it")
    return loaded


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the parameters and buffers of ``layer`` itself."""
    return {**layer._parameters, **layer._buffers}


def given(tensors: Mapping[str, torch.Tensor]) -> Given:
    """Return ``tensors`` by name, converted to the dtype that is wanted."""

    def of(name: str, wanted: torch.Tensor) -> torch.Tensor | None:
        tensor = tensors.get(name)
        return tensor if tensor is None else tensor.detach().to(wanted.dtype)

    return of


def process_layers(
    model: nn.Module,
    layers: Collection[str],
    to_load: Callable[[nn.Module], AbstractContextManager[None]],
    give: Given,
    *,
    load: Callable[[], None] = lambda: None,
) -> None:
    """Process ``layers`` of ``model`` as the engine does after loading, and put the results where the layers' tensors are now.

    Kernels and CUDA graphs keep their addresses.

    Args:
        model: The serving model.
        layers: Names of layers.
        to_load: Gives a layer the parameters that the loader expects, on the meta device where processing replaces them.
        give: What to process from, for each of these.
        load: Called before processing.

    Raises:
        LoadError: There is nothing to process a parameter from, or the result has another form.
    """
    chosen = [(name, model.get_submodule(name)) for name in layers]
    held = {name: tensors_of(layer) for name, layer in chosen}
    parts = nn.ModuleList(layer for _, layer in chosen)
    with methods_kept(parts), to_load(parts):
        for name, layer in chosen:
            for key, wanted in tensors_of(layer).items():
                if wanted is not None and wanted.is_meta:
                    tensor: Any = give(f"{name}.{key}", wanted)
                    if tensor is None:
                        raise LoadError(f"{name} is processed from {key}, which no tensor of the checkpoint fills")
                    tensor.__class__, tensor.__dict__ = wanted.__class__, dict(vars(wanted))
                    setattr(layer, key, tensor)
        load()
        made: dict[str, dict[str, torch.Tensor | None]] = {}
        for name, layer in chosen:
            method: Any = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
            made[name] = {key: getattr(layer, key, None) for key, tensor in held[name].items() if tensor is not None}
    for name in layers:
        _put(name, made[name], held[name])


def _put(name: str, made: Mapping[str, torch.Tensor | None], held: Mapping[str, torch.Tensor | None]) -> None:
    """Copy what a layer was processed to where it belongs."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in held.values() if tensor is not None}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for key, result in made.items():
        target = held[key]
        if result is None or target is None or (result.shape, result.dtype) != (target.shape, target.dtype):
            raise LoadError(f"{name}.{key} was processed to another form than the engine has")
        if (result.data_ptr(), result.stride()) != (target.data_ptr(), target.stride()):
            shared = result.untyped_storage().data_ptr() in memories
            copies.append((target.detach(), result.clone() if shared else result))
    for target, result in copies:
        target.copy_(result)
