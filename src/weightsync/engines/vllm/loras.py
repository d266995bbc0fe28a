"""LoRA adapters in a vLLM worker: built from memory, and taken by vLLM's own manager under a name, path and id of each version.

vLLM keeps what it takes in an LRU cache, and asks for it again when a request needs it: after an eviction, and after a base update,
which drops all adapters. It then gets the same object, whose scaling is folded into B already.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from weightsync.engines.module_loras import manifest_of_tensors
from weightsync.engines.vllm.controls import LORA_PATH, LoraControls
from weightsync.errors import ConfigurationError, LoadError
from weightsync.model import Manifest
from weightsync.model.lora import AdapterSpec, LoraModule, LoraSlots, lora_modules

_OWN = "_weightsync_loras"


class WorkerLoras:
    """Versions of adapters in one worker, for any thread. ``manager`` is vLLM's; ``controls`` are rank 0's."""

    def __init__(self, manager: Any, vocabulary: int, controls: LoraControls | None) -> None:  # noqa: ANN401 - vLLM's
        self._manager, self._vocabulary = manager, vocabulary
        self._config = manager.lora_config
        self.slots = LoraSlots(manager.capacity, self._config.max_lora_rank)
        self._controls = controls
        self._models: dict[str, LoRAModel] = {}
        self._registered: set[str] = set()
        self._mapper = renames(getattr(manager.model, "hf_to_vllm_mapper", None))
        setattr(manager, _OWN, self)
        _follow_loading()

    def check(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """See :meth:`EngineAdapter.check_lora`."""
        modules = lora_modules(manifest)
        try:
            _helper(spec).validate_legal(self._config)
        except ValueError as error:
            raise ConfigurationError(f"vLLM does not serve {spec.name}: {error}") from None
        packed = {
            part: (whole, index, len(parts))
            for whole, parts in self._manager.packed_modules.items()
            for index, part in enumerate(parts)
        }
        for module in modules:
            name, _ = parse_fine_tuned_lora_name(module.a.name, self._mapper)
            whole, index, count = packed.get(name, (name.removesuffix(".base_layer"), 0, 1))
            layer = self._manager.modules.get(whole)
            if layer is None:
                raise ConfigurationError(f"{spec.name} changes {module.name}, and this vLLM has no LoRA layer for it")
            if ".experts" not in name:
                _check_extents(spec.name, module, layer.base_layer, index, count, self._config.max_lora_rank)

    def stage(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`EngineAdapter.stage_lora`."""
        copies = copied(tensors, self._config.lora_dtype)
        for module in lora_modules(manifest_of_tensors(tensors)):
            copies[module.b.name].mul_(spec.config.scaling(module.name))
        model = LoRAModel.from_lora_tensors(
            1, copies, _helper(spec), device="cpu", dtype=self._config.lora_dtype,
            model_vocab_size=self._vocabulary, weights_mapper=self._mapper,
            skip_prefixes=getattr(self._manager.model, "lora_skip_prefixes", None),
        )  # fmt: skip
        # As vLLM does on its own thread when it takes an adapter. Steps would wait for it; the second time it finds nothing to do.
        self._manager._create_merged_loras_inplace(model)
        self._models[label] = model

    def take(self, label: str, number: int) -> LoRAModel:
        """Return what vLLM registers under its id ``number``. On the worker's thread."""
        model = self._models.get(label)
        if model is None:
            raise LoadError(f"this vLLM worker does not hold {label}")
        model.id = number
        return model

    def forget(self, label: str, number: int) -> None:
        """Free a version that no request uses. On the worker's thread."""
        if number:
            self._manager.remove_adapter(number)
        self._registered.discard(label)
        self._models.pop(label, None)

    def register(self, label: str, timeout: float) -> None:
        """On rank 0, let every worker take a version that all have staged, and requests name it."""
        self._registered.add(label)
        if self._controls is not None:
            self._controls.add_lora(label, timeout)

    def drop(self, label: str, timeout: float) -> None:
        """Free a version that is only staged. One that was registered, rank 0 hides; :meth:`forget` comes when it is unused."""
        if label not in self._registered:
            self._models.pop(label, None)
        elif self._controls is not None:
            self._controls.drop_lora(label, timeout)

    def labels(self) -> Collection[str]:
        """Versions that are held."""
        return list(self._models)


def _helper(spec: AdapterSpec) -> PEFTHelper:
    """What vLLM knows of an adapter: a scaling of 1. B is scaled already, since releases before 0.32 know no scaling per module."""
    rank = spec.config.rank
    return PEFTHelper(r=rank, lora_alpha=rank, target_modules=[], use_dora=spec.config.dora)


def copied(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return copies in ``dtype``, in two pieces of memory that are pinned if there is a GPU: vLLM pins what is not, one by one.

    Matrices of experts, which vLLM stacks, do not share a piece with others: it is freed then.
    """
    copies: dict[str, torch.Tensor] = {}
    for experts in (False, True):
        chosen = {name: tensor for name, tensor in tensors.items() if (".experts." in name) == experts}
        flat = torch.empty(sum(tensor.numel() for tensor in chosen.values()), dtype=dtype, pin_memory=torch.cuda.is_available())
        start = 0
        for name, tensor in chosen.items():
            copies[name] = flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
    return copies


def renames(mapper: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return what a model's ``hf_to_vllm_mapper`` does to names of adapters: vLLM stacks their q, k and v itself, later."""
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # from vLLM 0.32 on; before
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def _check_extents(adapter: str, module: LoraModule, layer: Any, index: int, count: int, most: int) -> None:  # noqa: ANN401 - vLLM's
    """Raise ConfigurationError unless the matrices fit the layer: vLLM would copy smaller ones into a part of its own."""
    sizes = getattr(layer, "output_sizes", ())
    exact = count == 1 or len(sizes) == count
    output = sizes[index] if count > 1 and exact else getattr(layer, "output_size", module.b.shape[0])
    inputs = getattr(layer, "input_size", module.a.shape[1])
    fits = module.b.shape[0] == output if exact else module.b.shape[0] <= output
    if module.a.shape[1] != inputs or not fits or module.rank > most:
        raise ConfigurationError(
            f"{adapter} changes {module.name} by matrices of {module.b.shape} and {module.a.shape}; in this vLLM it is {output} x "
            f"{inputs}, and ranks are at most {most}"
        )


def _follow_loading() -> None:
    """Let vLLM's manager take our versions from memory. Idempotent."""
    made = WorkerLoRAManager._load_adapter
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def load(self: Any, lora_request: Any) -> LoRAModel:  # noqa: ANN401 - vLLM's
        own = getattr(self._adapter_manager, _OWN, None)
        if own is None or not lora_request.lora_path.startswith(LORA_PATH):
            return made(self, lora_request)
        return own.take(lora_request.lora_name, lora_request.lora_int_id)

    WorkerLoRAManager._load_adapter = load
