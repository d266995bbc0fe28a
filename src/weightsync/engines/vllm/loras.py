"""LoRA adapters in a vLLM worker: built from memory, and taken by vLLM's own manager under a name, path and id of each version.

vLLM keeps what it takes in an LRU cache, and asks for it again when a request needs it: after an eviction, and after a base update,
which drops all adapters. It then gets the same object, whose scaling is folded into B already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from weightsync.daemon_threads import in_daemon_thread
from weightsync.engine.lora_memory import LoraMemory, stacked_layout
from weightsync.engines.module_loras import check_range
from weightsync.engines.staged_adapter import COMMIT_SECONDS
from weightsync.engines.vllm.controls import LORA_PATH, LoraControls
from weightsync.engines.vllm.lora_slots import LoraSlotLayout
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import ConfigurationError, LoadError, WeightSyncError
from weightsync.model import Layout, Manifest, TensorSpec, Version
from weightsync.model.lora import AdapterSpec, LoraModule, LoraSlots, adapter_label, check_extents, lora_modules
from weightsync.tensors.memory_views import bytes_at
from weightsync.tensors.shards import torch_dtype

_OWN = "_weightsync_loras"
_EXPERT_PARTS = 3  # gate, down and up, in vLLM's order
_PIECE = 1 << 28
"""Bytes in a piece of pinned memory that matrices share, because torch rounds it up to a power of two, and pinning takes long."""
_DIGEST_SECONDS = 60.0


@dataclass
class _Arrangement:
    """How the matrices of an adapter lie in the memory that vLLM keeps. Each stack is of one shape."""

    manifest: Manifest
    modules: Mapping[str, str]
    """Module of each matrix B."""
    single: Sequence[Sequence[TensorSpec]]
    """Stacks of one matrix, which vLLM takes by its name."""
    experts: Mapping[str, Sequence[Sequence[TensorSpec]]]
    """For a module of experts: A of gate, down and up, each of all experts, then B."""
    layout: Layout | None = None
    """Where a version is received that vLLM keeps. ``None`` where it takes copies in another dtype."""
    slots: LoraSlotLayout | str | None = None
    """Where vLLM copies them, or why that is not known. ``None`` until one was staged."""

    @property
    def stacks(self) -> dict[str, Sequence[TensorSpec]]:
        """All stacks by the name of their first matrix."""
        return {stack[0].name: stack for stack in (*self.single, *(stack for stacks in self.experts.values() for stack in stacks))}


@dataclass
class _HeldModel:
    """A version: vLLM's object, and what compares a slot with it; ``None`` when that was done, or cannot be."""

    model: LoRAModel
    unread: Callable[[int], None] | None


class WorkerLoras:
    """Versions of adapters in one worker, for any thread. ``manager`` is vLLM's; ``controls`` are rank 0's.

    ``ranks`` slice an adapter among them.
    """

    def __init__(self, manager: Any, vocabulary: int, controls: LoraControls | None, ranks: int) -> None:  # noqa: ANN401 - vLLM's
        self._manager, self._vocabulary, self._ranks = manager, vocabulary, ranks
        self._config = manager.lora_config
        self.slots = LoraSlots(manager.capacity, self._config.max_lora_rank)
        self._controls = controls
        self._held: dict[str, _HeldModel] = {}
        self._taken: _HeldModel | None = None
        """What vLLM has just taken, and has not copied to its layers yet."""
        self._registered: set[str] = set()
        self._mapper = renames(getattr(manager.model, "hf_to_vllm_mapper", None))
        self._arranged = _Arrangement(Manifest(()), {}, (), {})
        """Of the adapter that was checked last, which is staged next."""
        setattr(manager, _OWN, self)
        manager.activate_adapter = self._activate
        wrap_once(WorkerLoRAManager, "_load_adapter", _load)

    def check(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """See :meth:`EngineAdapter.check_lora`."""
        try:
            _helper(spec).validate_legal(self._config)
        except ValueError as error:
            raise ConfigurationError(f"vLLM does not serve {spec.name}: {error}") from None
        if manifest == self._arranged.manifest:
            return
        packed = {
            part: (whole, index, len(parts))
            for whole, parts in self._manager.packed_modules.items()
            for index, part in enumerate(parts)
        }
        named = {parse_fine_tuned_lora_name(module.a.name, self._mapper)[0]: module for module in lora_modules(manifest)}
        for name, module in named.items():
            whole, index, count = packed.get(name, (name.removesuffix(".base_layer"), 0, 1))
            layer = self._manager.modules.get(whole)
            if layer is None:
                raise ConfigurationError(f"{spec.name} changes {module.name}, and this vLLM has no LoRA layer for it")
            if ".experts" not in name:
                _check_extents(spec.name, module, layer.base_layer, index, count, self._config.max_lora_rank)
        self._arranged = self._arrange(manifest, named)

    def _arrange(self, manifest: Manifest, named: Mapping[str, LoraModule]) -> _Arrangement:
        """``named`` has modules by vLLM's names."""
        experts = dict[str, list[list[TensorSpec]]]()
        for whole, parts in self._manager.packed_modules.items():
            if self._stacks_experts(whole) and all(part in named for part in parts):
                kinds = [[named[part] for part in parts[kind::_EXPERT_PARTS]] for kind in range(_EXPERT_PARTS)]
                stacks = [[module.a for module in kind] for kind in kinds] + [[module.b for module in kind] for kind in kinds]
                if all(len({given.shape for given in stack}) == 1 for stack in stacks):
                    experts[whole] = stacks
        stacked = {given.name for stacks in experts.values() for stack in stacks for given in stack}
        single = [[given] for given in manifest if given.name not in stacked]
        arranged = _Arrangement(manifest, {module.b.name: module.name for module in named.values()}, single, experts)
        if all(given.size and torch_dtype(given.dtype) == self._config.lora_dtype for given in manifest):
            names = [[given.name for given in stack] for stack in arranged.stacks.values()]
            arranged.layout = stacked_layout(manifest, names, _PIECE)
        return arranged

    def _stacks_experts(self, whole: str) -> bool:
        """Whether vLLM stacks the matrices of gate, of down and of up of all experts: it has other ways for other models."""
        layer = self._manager.modules.get(whole)
        other = any(getattr(self._manager, name, False) for name in ("_is_non_gated_moe", "_enable_moe_shared_loras"))
        return type(layer).__name__ == "FusedMoEWithLoRA" and not getattr(layer, "use_ep", True) and not other

    def memory(self) -> LoraMemory | None:
        """See :meth:`EngineAdapter.lora_memory`."""
        layout = self._arranged.layout
        if layout is None:
            return None
        pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for size in layout.regions]
        return LoraMemory(self._arranged.manifest, layout, pieces)

    def stage(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> str:
        """See :meth:`EngineAdapter.stage_lora`."""
        arranged, dtype, config = self._arranged, self._config.lora_dtype, spec.config
        if isinstance(tensors, LoraMemory):  # received where vLLM keeps it
            by_name = {name: tensors.stack(name, len(stack)) for name, stack in arranged.stacks.items()}
        else:
            given = {name: [tensors[matrix.name] for matrix in stack] for name, stack in arranged.stacks.items()}
            by_name = copied({name: _one_tensor(stack).to(dtype) for name, stack in given.items()})
        for name, stack in arranged.stacks.items():
            if name in arranged.modules:
                each = [config.scaling(arranged.modules[b.name]) for b in stack] if config.scalings else [config.scaling("")]
                for part, factor in zip(by_name[name], each, strict=True) if len(set(each)) > 1 else [(by_name[name], each[0])]:
                    if factor != 1.0:
                        part.mul_(factor)
        check_range(label, by_name.values())
        slots = arranged.slots
        expected = _Expected(slots, by_name) if isinstance(slots, LoraSlotLayout) else None
        model = self._model(arranged, spec, by_name)
        if slots is None:
            try:
                slots = LoraSlotLayout(self._manager, model, by_name, self._ranks)
                expected = _Expected(slots, by_name)
            except WeightSyncError as error:
                slots = str(error)
            arranged.slots = slots
        self._held[label] = _HeldModel(model, None if expected is None else expected.check)
        return slots if isinstance(slots, str) else ""

    def _model(self, arranged: _Arrangement, spec: AdapterSpec, by_name: Mapping[str, torch.Tensor]) -> LoRAModel:
        """What vLLM takes, over these copies."""
        rank = spec.config.rank
        single = {stack[0].name: by_name[stack[0].name][0] for stack in arranged.single}
        model = LoRAModel.from_lora_tensors(
            1, single, _helper(spec), device="cpu", dtype=self._config.lora_dtype,
            model_vocab_size=self._vocabulary, weights_mapper=self._mapper,
            skip_prefixes=getattr(self._manager.model, "lora_skip_prefixes", None),
        )  # fmt: skip
        for module, kinds in arranged.experts.items():  # as vLLM does, one by one, in PackedLoRALayerWeights.pack_moe
            given = [by_name[stack[0].name] for stack in kinds]
            a, b = given[:_EXPERT_PARTS], given[_EXPERT_PARTS:]
            model.loras[module] = PackedLoRALayerWeights(module, rank, [rank] * _EXPERT_PARTS, a, b, [1.0] * _EXPERT_PARTS)
        # As vLLM does on its own thread when it takes an adapter. Steps would wait for it; the second time it finds nothing to do.
        self._manager._create_merged_loras_inplace(model)
        return model

    def take(self, label: str, number: int) -> LoRAModel:
        """Return what vLLM registers under its id ``number``. On the worker's thread."""
        held = self._taken = self._held.get(label)
        if held is None:
            raise LoadError(f"this vLLM worker does not hold {label}")
        held.model.id = number
        return held.model

    def _activate(self, number: int) -> bool:
        """Let vLLM copy an adapter to a slot, and the first time read it back there. On the worker's thread."""
        done: bool = type(self._manager).activate_adapter(self._manager, number)
        held, self._taken = self._taken, None
        if held is not None and held.model.id == number and held.unread is not None:
            held.unread(self._manager.lora_index_to_id.index(number))
            held.unread = None
        return done

    def forget(self, label: str, number: int) -> None:
        """Free a version that no request uses. On the worker's thread."""
        if number:
            self._manager.remove_adapter(number)
        self._registered.discard(label)
        self._held.pop(label, None)

    def register(self, version: Version) -> None:
        """On rank 0, let every worker take a version that all have staged, and requests name it."""
        label = adapter_label(version.run, version.number)
        self._registered.add(label)
        if self._controls is not None:
            self._controls.add_lora(label, COMMIT_SECONDS)
            if self._held[label].unread is not None:
                raise LoadError(f"vLLM has not copied {label} to its layers, so it could not be read back")

    def drop(self, label: str) -> None:
        """Free a version that is only staged. One that was registered, rank 0 hides; :meth:`forget` comes when it is unused."""
        if label not in self._registered:
            self._held.pop(label, None)
        if self._controls is not None:  # also if it was not registered here: another rank may have heard of it
            self._controls.drop_lora(label, COMMIT_SECONDS)

    def labels(self) -> Collection[str]:
        """Versions that are held."""
        return list(self._held)


def _helper(spec: AdapterSpec) -> PEFTHelper:
    """What vLLM knows of an adapter: a scaling of 1. B is scaled already, since releases before 0.32 know no scaling per module."""
    rank = spec.config.rank
    return PEFTHelper(r=rank, lora_alpha=rank, target_modules=[], use_dora=spec.config.dora)


def copied(stacks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of each stack. It is pinned if there is a GPU: vLLM pins what is not, one by one."""
    copies, piece, left = dict[str, torch.Tensor](), torch.empty(0), sum(stack.numel() for stack in stacks.values())
    for name, stack in stacks.items():
        if piece.numel() < stack.numel():
            room = max(stack.numel(), min(left, _PIECE // stack.itemsize))
            piece = torch.empty(room, dtype=stack.dtype, pin_memory=torch.cuda.is_available())
        copies[name] = piece[: stack.numel()].view(stack.shape).copy_(stack)
        piece, left = piece[stack.numel() :], left - stack.numel()
    return copies


class _Expected:
    """Digests of what slots must hold, of ``stacks``, taken on another thread while vLLM copies them to its layers."""

    def __init__(self, slots: LoraSlotLayout, stacks: Mapping[str, torch.Tensor]) -> None:
        self._slots, self._stacks = slots, list(stacks.values())
        self._written = [stack._version for stack in self._stacks]
        self._digests = in_daemon_thread(partial(slots.digests, stacks), "weightsync-lora-digest")

    def check(self, index: int) -> None:
        """Read slot ``index`` back. On the worker's thread.

        Raises:
            LoadError: It holds something else than was published.
        """
        digests = self._digests.result(_DIGEST_SECONDS)  # which has a deadline of this length itself
        if [stack._version for stack in self._stacks] != self._written:
            raise LoadError("vLLM wrote to the matrices that it was given: its memory cannot be compared with what was published")
        self._slots.check(index, digests=digests)


def _one_tensor(stack: Sequence[torch.Tensor]) -> torch.Tensor:
    """All matrices as one tensor: a view where they lie evenly in memory, as experts do, which torch copies with all cores."""
    first, addresses = stack[0], [matrix.data_ptr() for matrix in stack]
    steps = {after - before for before, after in pairwise(addresses)}
    step = min(steps, default=first.nbytes)
    if len(steps) > 1 or step < first.nbytes or step % first.element_size() or not all(m.is_contiguous() for m in stack):
        return torch.stack(list(stack))
    memory = torch.from_numpy(bytes_at(addresses[0], addresses[-1] - addresses[0] + first.nbytes)).view(first.dtype)
    return memory.as_strided((len(stack), *first.shape), (step // first.element_size(), *first.stride()))


def renames(mapper: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return what a model's ``hf_to_vllm_mapper`` does to names of adapters: vLLM stacks their q, k and v itself, later."""
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # from vLLM 0.32 on; before
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def _check_extents(adapter: str, module: LoraModule, layer: Any, index: int, count: int, most: int) -> None:  # noqa: ANN401 - vLLM's
    """Raise ConfigurationError unless the matrices fit the layer."""
    sizes = getattr(layer, "output_sizes", ())
    exact = count == 1 or len(sizes) == count
    output = sizes[index] if count > 1 and exact else getattr(layer, "output_size", module.b.shape[0])
    inputs = getattr(layer, "input_size", module.a.shape[1])
    check_extents(adapter, module, output if exact else min(output, module.b.shape[0]), inputs, most)


def _load(load: Any, manager: Any, lora_request: Any) -> LoRAModel:  # noqa: ANN401 - vLLM's
    """Let vLLM's manager take our versions from memory."""
    own = getattr(manager._adapter_manager, _OWN, None)
    if own is None or not lora_request.lora_path.startswith(LORA_PATH):
        return load(manager, lora_request)
    return own.take(lora_request.lora_name, lora_request.lora_int_id)
