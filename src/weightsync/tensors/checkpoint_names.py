"""Where the tensors of a Transformers model's checkpoint lie in its parameters.

Transformers 5 holds all experts of a layer in one parameter. Checkpoints, and with them the engines, have one tensor for each
expert, and for some models other names. What ``save_pretrained`` does to the weights
(``transformers.core_model_loading.revert_weight_conversion``) is done here to tensors without memory: a result that is a view of
one parameter says where it lies.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.model import Box

_log = logging.getLogger(__name__)

_Key = tuple[object, tuple[tuple[str, tuple[int, ...]], ...]]
_known: WeakKeyDictionary[nn.Module, tuple[_Key, dict[str, tuple[CheckpointPart, ...]]]] = WeakKeyDictionary()
"""The last result for each model, by its conversions and its shapes."""


@dataclass(frozen=True)
class CheckpointPart:
    """A tensor of the checkpoint that is a part of one parameter."""

    name: str
    box: Box
    """Which part of the parameter."""
    dims: tuple[int, ...]
    """The parameter's dimension of each dimension of the tensor. In the others the part has one index, and the tensor none."""

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> CheckpointPart:
        """Return the part that is all of a parameter, as it is."""
        return cls(name, Box.whole(shape), tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return tuple(self.box.shape[dim] for dim in self.dims)

    def within(self, held: Box, local: torch.Tensor) -> tuple[Box | None, torch.Tensor]:
        """Return which box of the tensor a rank holds, and its memory, where ``local`` holds the box ``held`` of the parameter.

        ``None`` if it holds nothing of it.
        """
        starts = [max(pair) for pair in zip(self.box.starts, held.starts, strict=True)]
        stops = [min(pair) for pair in zip(self.box.stops, held.stops, strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None, local.new_empty(0)
        first = [start - origin for start, origin in zip(starts, held.starts, strict=True)]
        extents = [stop - start for start, stop in zip(starts, stops, strict=True)]
        strides, offset = local.stride(), local.storage_offset()
        offset += sum(index * stride for index, stride in zip(first, strides, strict=True))
        view = local.as_strided([extents[dim] for dim in self.dims], [strides[dim] for dim in self.dims], offset)
        own = tuple(starts[dim] - self.box.starts[dim] for dim in self.dims)
        return Box(own, tuple(start + extent for start, extent in zip(own, view.shape, strict=True))), view


def checkpoint_parts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[CheckpointPart, ...]]:
    """Return the parts of each parameter of ``module`` that is not in the checkpoint as it is, by the parameter's name.

    Args:
        module: Only for a Transformers model there is anything to return.
        shapes: Global shape of each tensor of the model, by name.

    A parameter that the checkpoint has in another form (computed, not cut out of it) is left out.
    """
    transformers: Any = sys.modules.get("transformers")
    module = getattr(module, "_orig_mod", module)  # of torch.compile()
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return {}
    key: _Key = getattr(module, "_weight_conversions", None), tuple(shapes.items())
    known = _known.get(module)
    if known is None or known[0][0] is not key[0] or known[0][1] != key[1]:
        _known[module] = known = key, _converted(module, shapes)
    return known[1]


def _converted(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[CheckpointPart, ...]]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return {}  # Transformers 4: parameters are as in the checkpoint
    whole = {name: torch.empty(shape, dtype=torch.uint8, device="meta") for name, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in whole.items()}
    try:
        with _OnlyViews():  # type: ignore[no-untyped-call]
            reverted: dict[str, torch.Tensor] = revert_weight_conversion(cast(Any, module), dict(whole))
    except Exception as error:  # noqa: BLE001 - a conversion that takes real memory, or another Transformers' interface
        what, kind = type(module).__name__, type(error).__name__
        _log.warning("the names in the checkpoint of %s are unknown, so its own are used: %s: %s", what, kind, error)
        return {}
    parts: dict[str, list[CheckpointPart]] = {}
    for name, tensor in reverted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        part = None if owner is None else _part(name, shapes[owner], tensor)
        if owner is not None and part is not None:
            parts.setdefault(owner, []).append(part)
    return {
        name: tuple(own)
        for name, own in parts.items()
        if own != [CheckpointPart.whole(name, shapes[name])] and sum(part.box.size for part in own) == Box.whole(shapes[name]).size
    }


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies made only for their layout stay views: tensors here have no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias(args[0])
        if func is torch.ops.aten._unsafe_view.default:  # the second half of a reshape, after its clone
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:
                return args[0].new_empty(args[1])  # no view: computed
        return func(*args, **(kwargs or {}))


def _part(name: str, shape: tuple[int, ...], view: torch.Tensor) -> CheckpointPart | None:
    """Return which part of a contiguous tensor of ``shape`` the ``view`` is, if it is a box of it."""
    strides = torch.empty(shape, device="meta").stride()
    starts, left = [], int(view.storage_offset())
    for extent, stride in zip(shape, strides, strict=True):
        starts.append(left // stride if extent > 1 else 0)
        left -= starts[-1] * stride
    dims: list[int] = []
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        own = next((dim for dim in range(len(shape)) if dim not in dims and strides[dim] == stride and extent <= shape[dim]), None)
        if own is None:
            return None
        dims.append(own)
    extents = [view.shape[dims.index(dim)] if dim in dims else 1 for dim in range(len(shape))]
    box = Box(tuple(starts), tuple(start + extent for start, extent in zip(starts, extents, strict=True)))
    return CheckpointPart(name, box, tuple(dims)) if left == 0 and box.within(shape) else None
