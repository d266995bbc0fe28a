"""LoRA adapters of a module: hooks add ``B @ A @ x`` to the output of its linear layers, whose weights stay as they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, TensorSpec, Version
from weightsync.model.lora import AdapterSpec, LoraSlots, adapter_label, check_extents, lora_modules, newest_label, served_label
from weightsync.tensors.shards import dtype_name


@dataclass
class _HeldMatrices:
    """A version: for each module, A, B and the scaling."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor, float]]
    version: Version | None = None
    """``None`` until it is registered."""
    users: int = 0
    dropped: bool = False


def manifest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Return the manifest of whole tensors."""
    return Manifest(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items())


def check_range(label: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ConfigurationError if numbers of an adapter became infinite in the dtype in which an engine computes with it.

    The trainer looks at those that it publishes. Of the dtypes of engines only float16 has a smaller range.
    """
    if any(tensor.dtype == torch.float16 and not tensor.isfinite().all() for tensor in tensors):
        raise ConfigurationError(f"{label} has numbers that are infinite in float16, in which this engine computes with adapters")


class ModuleLoras:
    """Versions of adapters for ``module``. Any thread may call it; one user at a time computes with the module."""

    def __init__(self, module: torch.nn.Module, slots: LoraSlots) -> None:
        self._module: torch.nn.Module = getattr(module, "_orig_mod", module)  # what torch.compile() wraps
        self.slots = slots
        self._held: dict[str, _HeldMatrices] = {}
        self._lock = threading.RLock()
        self._active: _HeldMatrices | None = None
        for name, layer in self._module.named_modules(remove_duplicate=False):
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(self._hook(name))
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled before looks for no hooks that came later

    def check(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """See :meth:`EngineAdapter.check_lora`."""
        if spec.config.dora:
            raise ConfigurationError(
                f"{spec.name} is a DoRA adapter, which this engine does not serve: train it with use_dora=False"
            )
        for module in lora_modules(manifest):
            layer = self._layer(spec.name, module.name)
            check_extents(spec.name, module, layer.out_features, layer.in_features, self.slots.max_rank)

    def _layer(self, adapter: str, name: str) -> torch.nn.Linear:
        try:
            layer = self._module.get_submodule(name)
        except AttributeError:
            raise ConfigurationError(f"{adapter} changes {name}, and this engine's model has no such module") from None
        if not isinstance(layer, torch.nn.Linear) or hasattr(layer.weight, "device_mesh"):
            raise ConfigurationError(f"{adapter} changes {name}, and only linear layers that are held whole can be changed here")
        return layer

    def stage(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See :meth:`EngineAdapter.stage_lora`."""
        copies: dict[str, torch.Tensor] = {}
        pairs = {}
        for module in lora_modules(manifest_of_tensors(tensors)):
            device = self._layer(spec.name, module.name).weight.device
            for matrix in (module.a, module.b):
                copies[matrix.name] = tensors[matrix.name].to(device, copy=True)
            pairs[module.name] = copies[module.a.name], copies[module.b.name], spec.config.scaling(module.name)
        with self._lock:
            self._held[label] = _HeldMatrices(pairs)
        return copies

    def register(self, version: Version) -> None:
        """See :meth:`EngineAdapter.register_lora`."""
        with self._lock:
            self._held[adapter_label(version.run, version.number)].version = version

    def drop(self, label: str) -> None:
        """See :meth:`EngineAdapter.drop_lora`."""
        with self._lock:
            held = self._held.get(label)
            if held is not None:
                held.dropped = True
                if not held.users:
                    del self._held[label]

    def labels(self) -> Collection[str]:
        """See :meth:`EngineAdapter.loras`."""
        with self._lock:
            return list(self._held)

    @contextmanager
    def using(self, adapter: str) -> Iterator[Version]:
        """Compute with ``adapter`` (a name: its newest version; or a label) in the block. The module is the caller's alone.

        Raises:
            VersionError: It is not served here.
        """
        label = ""
        try:  # around it all: a signal handler may raise right after it was counted
            with self._lock:
                label, held, version = self._find(adapter)
                held.users += 1
            self._active = held
            yield version
        finally:
            self._active = None
            with self._lock:
                if label:
                    held.users -= 1
                    if held.dropped and not held.users:
                        del self._held[label]

    def newest(self, adapter: str | None) -> int:
        """Return the number of the version that ``adapter`` is here, -1 if there is none, and 0 for no adapter."""
        with self._lock:
            label = None if adapter is None else newest_label(adapter, self._visible())
        return 0 if adapter is None else -1 if label is None else int(label.rpartition("@")[2])

    def _visible(self) -> dict[str, Version]:
        return {label: held.version for label, held in self._held.items() if held.version is not None and not held.dropped}

    def _find(self, adapter: str) -> tuple[str, _HeldMatrices, Version]:
        served = self._visible()
        label = served_label(adapter, served)
        return label, self._held[label], served[label]

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor | None]:
        def add(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            active = self._active
            if active is None or name not in active.pairs:
                return None
            a, b, scaling = active.pairs[name]
            return (output + linear(linear(inputs[0].to(a.dtype), a), b) * scaling).to(output.dtype)

        return add
