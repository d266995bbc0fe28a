"""Reading an adapter back from the slots of vLLM's LoRA layers, where vLLM computes with it.

Copies of the layers, with slots that have no bytes, take the adapter's matrices once by vLLM's own ``set_lora``. So they tell where
this rank has which part, however it slices and packs them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from weightsync.arrays import UInt64
from weightsync.deadline import Deadline
from weightsync.errors import LayoutError, LoadError, few
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.device_memory import digest_sums
from weightsync.tensors.shards import Shard, bits_of, dtype_name
from weightsync.tracing.tracer import Traced, trace_loader

_SECONDS = 60.0
T = TypeVar("T")


class LoraSlotLayout:
    """Where the slots of ``manager``'s layers have what ``model`` holds. It is the same for all adapters with these matrices.

    Args:
        manager: vLLM's.
        model: What vLLM takes, as it keeps it.
        stacks: By name, the memory of its matrices: several of one shape. No other memory is known.
        ranks: Number of ranks that slice an adapter among them.

    Raises:
        WeightSyncError: vLLM does more than copy these matrices. The message says why on one line.
    """

    def __init__(self, manager: Any, model: Any, stacks: Mapping[str, torch.Tensor], ranks: int) -> None:  # noqa: ANN401 - vLLM's
        self._manager = manager
        names = {stack.data_ptr(): name for name, stack in stacks.items()}
        layers = {name: _without_bytes(layer) for name, layer in manager.modules.items()}

        def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
            known = dict(given)

            def stand_in(matrix: torch.Tensor) -> torch.Tensor:
                name = names.get(matrix.data_ptr())
                if name is None or not matrix.is_contiguous():
                    raise LoadError(f"vLLM rearranges matrices of {list(matrix.shape)} before its layers take them")
                return known[name].view(matrix.shape)

            for name, layer in layers.items():
                held = manager._get_lora_layer_weights(model, name)
                if held:
                    type(layer).set_lora(layer, 0, *(_each(stand_in, side) for side in (held.lora_a, held.lora_b)))

        manifest = Manifest(TensorSpec(name, tuple(stack.shape), dtype_name(stack.dtype)) for name, stack in stacks.items())
        self._traced: Traced = trace_loader(load, _slots(layers), manifest)
        if (reason := self._traced.reason(ranks)) is not None:
            raise LayoutError(reason.replace("the loader", "vLLM"))
        held = {name: self._traced.partial.get(name, 0) for name in (*self._traced.unused, *self._traced.partial)}
        lacking = [spec.name for spec in manifest if held.get(spec.name, spec.size) * ranks < spec.size]
        if lacking:
            raise LayoutError(f"this rank has less than its share of {few(lacking)}")

    def digests(self, given: Mapping[str, torch.Tensor]) -> UInt64:
        """Digest this rank's parts of all stacks, which ``given`` has as vLLM computes with them."""
        manifest = self._traced.manifest
        parts = [(manifest[part.tensor], part.box) for part in self._traced.copies]
        shards = [Shard(spec.name, spec.shape, box, given[spec.name][box.slices]) for spec, box in parts]
        return digest_sums(manifest, shards, Deadline(_SECONDS))

    def check(self, index: int, digests: UInt64) -> None:
        """Read slot ``index`` back. On the worker's thread.

        Raises:
            LoadError: It does not hold exactly what has these ``digests``, and zeros.
        """
        slots = _slots(self._manager.modules, index)
        shards = self._traced.shards(slots)
        read = digest_sums(self._traced.manifest, shards, Deadline(_SECONDS))
        if not np.array_equal(read, digests):
            wrong = [self._traced.manifest[int(row)].name for row in np.flatnonzero(read != digests)]
            raise LoadError(f"vLLM's memory has other bytes than were published of {few(wrong)}")
        loose = self._traced.unwritten  # of what the adapter does not fill, nothing else may be other than zero
        filled = [shard.tensor for part, shard in zip(self._traced.copies, shards, strict=True) if part.parameter in loose]
        if _nonzero(slots[name] for name in loose) != _nonzero(filled):
            raise LoadError("vLLM's memory has more than was published: a part that the adapter does not fill is not zero")


def _slots(layers: Mapping[str, Any], index: int = 0) -> dict[str, torch.Tensor]:
    """Memory of slot ``index`` in all of vLLM's layers, by name."""
    stacked = {
        f"{name}.{key}": value if isinstance(value, tuple) else (value,)
        for name, layer in layers.items()
        for key, value in vars(layer).items()
        if key.endswith("_stacked") and isinstance(value, tuple | torch.Tensor)  # a list has parts of the others
    }
    return {f"{key}.{place}": slots[index : index + 1] for key, part in stacked.items() for place, slots in enumerate(part)}


def _without_bytes(layer: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return a copy of ``layer`` with a single slot in all that is its own: nothing is written to what serves."""
    twin = copy.copy(layer)
    for key, value in vars(layer).items():
        if isinstance(value, tuple | torch.Tensor):
            vars(twin)[key] = _each(lambda own: torch.empty_like(own[:1] if own.dim() else own, device="meta"), value)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            vars(twin)[key] = []  # views of the others, thousands for experts, which ``set_lora`` does not use
    return twin


def _each(change: Callable[[torch.Tensor], T], value: Any) -> Any:  # noqa: ANN401 - tensors, or lists of them and of others
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_each(change, inner) for inner in value) if type(value) in (list, tuple) else value


def _nonzero(tensors: Iterable[torch.Tensor]) -> int:
    return int(sum(torch.count_nonzero(bits_of(tensor)) for tensor in tensors))
