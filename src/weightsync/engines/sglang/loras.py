"""LoRA adapters in one SGLang scheduler: SGLang's own objects, made from memory, with a separate name and id for each version.

The id is part of SGLang's keys for cached keys and values, so no version finds those of another one.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from weightsync.deadline import Deadline
from weightsync.engines.module_loras import check_range, manifest_of_tensors
from weightsync.engines.sglang.loop import SchedulerLoop
from weightsync.errors import ConfigurationError, DeadlineExceeded, LoadError
from weightsync.model import Manifest, Version
from weightsync.model.lora import PREFIX, AdapterSpec, LoraSlots, adapter_label, check_extents, lora_modules

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 30.0
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_WHOLES = {part: whole for whole, parts in _PARTS.items() for part in parts}


@dataclass(frozen=True)
class LoraStep:
    """Request that every rank takes what it has staged as ``label``, or, from the tokenizer's process, that none may name it."""

    label: str
    lora_id: str
    take: bool


class SchedulerLoras:
    """Versions of adapters in one scheduler process.

    The tokenizer's process resolves names and counts requests. On rank 0 ``tell`` sends it messages, on SGLang's thread. It answers
    each with an ``LoRAUpdateOutput``, and sends another one that is not a success when no request uses a version any more.

    Args:
        scheduler: SGLang's ``Scheduler``, started with ``--enable-lora``.
        loop: Its event loop.
        tell: Sends a request to the tokenizer's process.
    """

    def __init__(self, scheduler: Any, loop: SchedulerLoop, tell: Callable[[object], None]) -> None:  # noqa: ANN401 - SGLang's
        self._manager, self._loop, self._tell = scheduler.tp_worker.model_runner.lora_manager, loop, tell
        self._group = scheduler.tp_cpu_group if scheduler.server_args.tp_size > 1 else None
        arguments = scheduler.server_args
        self.slots = LoraSlots(arguments.max_loaded_loras or arguments.max_loras_per_batch, self._manager.max_lora_rank)
        self._staged: dict[str, LoRAAdapter] = {}
        self._ids: dict[str, str] = {}
        self._answers: dict[str, Future[str]] = {}
        self._taking = threading.Lock()
        """Held while a version moves from those that are staged to those that have an id."""
        loop.handlers |= {LoraStep: self._step, LoRAUpdateOutput: self._answered}

    # On weightsync's thread.

    def check(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """See :meth:`EngineAdapter.check_lora`."""
        if spec.config.dora:
            raise ConfigurationError(f"{spec.name} is a DoRA adapter, which SGLang does not serve: train it with use_dora=False")
        for module in lora_modules(manifest):
            check_extents(spec.name, module, *self._extents(spec.name, module.name), self.slots.max_rank)

    def _extents(self, adapter: str, name: str) -> tuple[int, int]:
        """Return the output and input size of a module of the checkpoint."""
        parent, _, leaf = name.rpartition(".")
        whole, layer = _WHOLES.get(leaf, leaf), get_layer_id(name)
        modules = self._manager.lora_modules[layer] if layer is not None and layer < len(self._manager.lora_modules) else {}
        wrapped = modules.get(f"{parent}.{whole}")
        if wrapped is None:
            raise ConfigurationError(
                f"{adapter} changes {name}, and this SGLang has no LoRA layer for it (--lora-target-modules). Embeddings, output "
                "layers and experts cannot be changed here"
            )
        base = wrapped.base_layer
        sizes = getattr(base, "output_sizes", [base.output_size])
        if hasattr(base, "total_num_kv_heads"):  # its own sizes repeat heads that ranks share
            sizes = [heads * base.head_size for heads in (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)]
        output = sum(sizes) if leaf == whole else sizes[_PARTS[whole].index(leaf)]
        return output, base.input_size

    def stage(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> str:
        """See :meth:`EngineAdapter.stage_lora`.

        SGLang has one rank and one scaling for a whole adapter, and needs all of q, k and v, and of gate and up. So matrices are
        padded with zeros, and scalings of modules are multiplied into B.
        """
        manager, rank, config = self._manager, spec.config.rank, spec.config
        modules = {module.name: module for module in lora_modules(manifest_of_tensors(tensors))}
        held = dict[str, torch.Tensor]()
        for module in modules.values():
            parent, _, leaf = module.name.rpartition(".")
            for part in _PARTS.get(_WHOLES.get(leaf, ""), (leaf,)):
                name = f"{parent}.{part}"
                output, inputs = self._extents(spec.name, name)
                a, b = (torch.zeros(shape, dtype=manager.dtype, device="cpu") for shape in ((rank, inputs), (output, rank)))
                own = modules.get(name)
                if own is not None:
                    a[: own.rank].copy_(tensors[own.a.name])
                    given = tensors[own.b.name]
                    b[:, : own.rank].copy_(given * config.scaling(name) if config.scalings else given)  # rounded once
                held |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        check_range(label, held.values())
        targets = sorted({name.split(".")[-3] for name in held})
        theirs = LoRAConfig.from_dict({"peft_type": "LORA", "target_modules": targets, "r": rank, "lora_alpha": rank})
        adapter = LoRAAdapter(
            label, theirs, manager.base_hf_config, manager.load_config, manager.lora_backend, base_model=manager.base_model
        )
        adapter.initialize_weights_from_tensors(held)
        adapter.scaling = 1.0 if config.scalings else config.scaling("")
        self._staged[label] = adapter
        return "SGLang stacks and slices the matrices"

    def register(self, version: Version) -> None:
        """On rank 0, let every rank take a version that all have staged, and requests name it."""
        if self._loop.leads:
            label = adapter_label(version.run, version.number)
            self._ask(LoraStep(label, f"weightsync-{uuid.uuid4().hex}", take=True))

    def drop(self, label: str) -> None:
        """Free a version that is only staged. One that was registered, rank 0 hides from requests; it is freed when unused."""
        with self._taking:
            self._staged.pop(label, None)
            lora_id = self._ids.get(label)
        if self._loop.leads and lora_id is not None:
            self._ask(LoraStep(label, lora_id, take=False))

    def _ask(self, step: LoraStep) -> None:
        deadline, answer = Deadline(_ANSWER_SECONDS), Future[str]()
        self._answers[step.lora_id] = answer
        try:
            self._loop.send(deadline, f"for {step.label}", step)
            refused = answer.result(deadline.left)
        except TimeoutError:
            raise DeadlineExceeded(
                f"SGLang's tokenizer did not answer for {step.label} within {deadline.seconds:g} s. It reads messages from its "
                "first request on; that of an Engine without a server only while a request runs"
            ) from None
        finally:
            self._answers.pop(step.lora_id, None)
        if refused:
            raise LoadError(f"SGLang did not take {step.label}: {refused}")

    def labels(self) -> Collection[str]:
        """Versions that are held."""
        return [*self._staged, *self._ids]

    # On SGLang's thread, on every rank in the same pass.

    def _step(self, step: LoraStep) -> None:
        label, lora_id, manager = step.label, step.lora_id, self._manager
        if not step.take:
            self._tell(UnloadLoRAAdapterReqInput(lora_name=label, lora_id=lora_id))
            return
        with self._taking:
            adapter = self._staged.pop(label, None)
            taken = self._on_all_ranks(adapter is not None)
            if taken and adapter is not None:
                manager.configs[lora_id], manager.loras[lora_id] = adapter.config, adapter
                manager.lora_refs[lora_id] = LoRARef(lora_id=lora_id, lora_name=label, lora_path="weightsync", pinned=False)
                self._ids[label], adapter.uid = lora_id, lora_id
        if taken:
            self._tell(LoadLoRAAdapterReqInput(lora_name=label, lora_path="weightsync", lora_id=lora_id))
        else:
            self._resolve(lora_id, "a rank does not hold it any more")

    def _on_all_ranks(self, held: bool) -> bool:
        """Return whether it is ``held`` on all ranks: a request for an adapter that one of them lacks would end SGLang."""
        votes = torch.tensor([int(held)])
        if self._group is not None:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    def _answered(self, answer: LoRAUpdateOutput) -> None:
        for label, lora_id in (answer.loaded_adapters or {}).items():
            if not answer.success and self._ids.get(label) == lora_id:
                unloaded = self._manager.unload_lora_adapter(LoRARef(lora_id=lora_id, lora_name=label))
                if not unloaded.success:
                    _log.error("weightsync: SGLang did not free %s: %s", label, unloaded.error_message)
                del self._ids[label]
            self._resolve(str(lora_id), answer.error_message or "")

    def _resolve(self, lora_id: str, refused: str) -> None:
        answer = self._answers.pop(lora_id, None)
        if answer is not None:
            answer.set_result(refused)
