"""Trial of a traced layout: checks that the engine's own loading of random weights gives the bits of direct delivery."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from weightsync.errors import LoadError, few
from weightsync.tensors.shards import Shard, bits_of, torch_dtype
from weightsync.tracing.tracer import Traced

_BATCH = 1 << 30
_MOST_OTHERS = 1 << 30
_SEED = 20_261_121
_CACHES = ("kv_cache", "kv_caches")

Reload = Callable[[Iterable[tuple[str, torch.Tensor]], Collection[str]], None]
"""Loads some whole layers, whose names are given, into the serving model with the engine's own code, including all processing after
loading."""


@dataclass
class LayoutSteps:
    """What an engine does to the layers that it does not keep as they were loaded.

    ``run`` takes names of layers. It turns what was written to their shards into what the engine computes with, in its memory.
    ``layers`` are those that the trial found to need it.
    """

    run: Callable[[Collection[str]], None]
    layers: set[str] = field(default_factory=set)


def try_against(
    model: nn.Module,
    traced: Traced,
    shards: Sequence[Shard],
    reload: Reload,
    *,
    engine: str = "the engine",
    package: str | None = None,
    steps: LayoutSteps | None = None,
    batch_bytes: int = _BATCH,
) -> str | None:
    """Load random weights through ``reload``, some layers at a time, and compare every traced box.

    Before each load the parameters are filled with other random values, so that stale bits cannot match. The model has its own bits
    back when this returns or raises. It needs memory for about three times ``batch_bytes`` or the largest layer (four times where
    ``steps`` are needed).

    A layer that loading changes is loaded again as direct delivery would: other random bits everywhere, then the weights, then the
    step. All parameters and buffers of that layer must be what the engine's loading made them.

    Args:
        model: The serving model.
        traced: The trace of its loader.
        shards: The traced shards over the model's parameters.
        reload: The engine's loading.
        engine: Name of the engine in messages.
        package: Python package of the engine. Its plain objects at layers are searched for tensors, too.
        steps: Used for the layers that need it, which are added to ``steps.layers``; ``None``: they are a difference.
        batch_bytes: Bytes of weights to load at a time.

    Returns:
        ``None`` if loading gives exactly the traced copies, and the results of the steps. Otherwise one line with the difference:
        loading repacks weights in place, keeps values computed from them, or moves parameters.

    Raises:
        LoadError: ``reload`` or ``steps.run`` raised.
    """
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    others = _others(model, shards, package)
    size = sum(other.tensor.nbytes for other in others)
    if size > _MOST_OTHERS:
        return f"the model holds {size:,} bytes besides its parameters and caches, which may depend on them"
    device = shards[0].tensor.device
    generator = torch.Generator(device).manual_seed(_SEED)
    reason: str | None = None
    try:
        with torch.no_grad():
            kept = [other.tensor.clone() for other in others]
            for names in batches(traced, batch_bytes):
                touched = _storages(shard.tensor for name in names for shard in by_name[name])
                backup = [tensor.clone() for tensor in touched]
                try:
                    trial = _Trial(model, traced, by_name, names, generator, engine)
                    reason = trial.run(reload, steps)
                    now = [other for other in _others(model, shards, package) if not trial.stepped(other)]
                    reason = reason or _changed(now, others, kept)
                finally:
                    for copied, bits in zip(touched, backup, strict=True):
                        copied.copy_(bits)
                    for other, bits in zip(others, kept, strict=True):
                        other.put_back(bits)
                if reason is not None:
                    break
    except torch.OutOfMemoryError:
        reason = "too little device memory is free to try direct delivery: reduce the engine's cache"
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the engine relies on the memory that it left free
    return reason


def batches(traced: Traced, nbytes: int) -> list[list[str]]:
    """Group the names of all tensors with traced copies into batches, in order, so that no layer has tensors in two batches."""
    layers: dict[int, set[str]] = {}
    for copy in traced.copies:
        layers.setdefault(copy.tensor, set()).add(copy.parameter.rpartition(".")[0])
    last = {layer: index for index in sorted(layers) for layer in layers[index]}
    groups: list[list[str]] = []
    names: list[str] = []
    size = end = 0
    for index in sorted(layers):
        spec = traced.manifest[index]
        names.append(spec.name)
        size += spec.size * torch_dtype(spec.dtype).itemsize
        end = max(end, *(last[layer] for layer in layers[index]))
        if index >= end and size >= nbytes:
            groups.append(names)
            names, size = [], 0
    return [*groups, names] if names else groups


@dataclass(eq=False)
class _Trial:
    """Loads some tensors with random bits, ``names``, as the engine does and as direct delivery does."""

    model: nn.Module
    traced: Traced
    by_name: dict[str, list[Shard]]
    names: Sequence[str]
    generator: torch.Generator
    engine: str
    changed: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        specs = [self.traced.manifest[self.traced.manifest.index[name]] for name in self.names]
        self.weights = {spec.name: _random(spec.shape, torch_dtype(spec.dtype), self.generator) for spec in specs}
        for shard in (shard for name in self.names for shard in self.by_name[name] if shard.tensor.dtype is torch.float32):
            part = self.weights[shard.name][shard.box.slices]
            part[(0,) * part.dim()] = 0.7  # few scales may all be powers of two by chance: then a step that is needed was not seen

    def stepped(self, other: _Other) -> bool:
        """Return whether ``other`` is a parameter or buffer of a layer whose step was compared as a whole."""
        owner, key = other.owner, other.name.rpartition(".")[2]
        return any(owner is layer and key in {**layer._parameters, **layer._buffers} for layer in self.changed)

    def run(self, reload: Reload, steps: LayoutSteps | None) -> str | None:
        """Return the difference on one line; ``None`` if there is none."""
        for name in self.names:
            for shard in self.by_name[name]:
                shard.tensor.copy_(_random(tuple(shard.tensor.shape), shard.tensor.dtype, self.generator))
        try:
            reload(self.weights.items(), sorted(self.traced.layers(set(self.names))))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            names = f"{self.names[0]} and others"
            raise LoadError(f"the loader of {self.engine} raised an error in a trial with {names}: {error!r}") from error
        wrong = [name for name in self.names if not all(_equal(shard.tensor, bits) for shard, bits in self._placed(name))]
        if not wrong:
            return None
        if steps is None:
            return f"{self.engine} does more than copy {few(wrong, 3)} when it loads them"
        return self._step(steps, sorted(self.traced.layers(set(wrong))))

    def _placed(self, name: str) -> Iterator[tuple[Shard, torch.Tensor]]:
        return ((shard, self.weights[name][shard.box.slices]) for shard in self.by_name[name])

    def _step(self, steps: LayoutSteps, names: list[str]) -> str | None:
        self.changed = [self.model.get_submodule(name) for name in names]
        hung = {
            f"{name}.{key}": tensor.detach()
            for name, layer in zip(names, self.changed, strict=True)
            for key, tensor in {**layer._parameters, **layer._buffers}.items()
            if tensor is not None
        }
        loaded = {name: tensor.clone() for name, tensor in hung.items()}
        filled = {f"{name}.{key}" for name, layer in zip(names, self.changed, strict=True) for key in layer._parameters}
        for tensor in map(hung.__getitem__, sorted(hung.keys() & filled - self.traced.unwritten.keys())):
            tensor.copy_(_random(tuple(tensor.shape), tensor.dtype, self.generator))
        for name in self.names:
            for shard, bits in self._placed(name):
                shard.tensor.copy_(bits)
        try:
            steps.run(names)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise LoadError(f"processing {few(names, 3)} after a move raised an error in a trial: {error!r}") from error
        wrong = [name for name, tensor in hung.items() if not _equal(tensor, loaded[name])]
        if wrong:
            return f"processing {few(wrong, 3)} after a move gives other bits than the loading of {self.engine}"
        steps.layers.update(names)
        return None


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=generator.device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        made.normal_(generator=generator)
        # Scales that are powers of two are processed in another way than others, so there are both.
        return torch.where(made > 0, made.round().exp2(), made) if dtype is torch.float32 else made
    if not dtype.is_floating_point and dtype is not torch.bool and len(shape) > 1:  # packed weights
        made.view(torch.uint8).random_(generator=generator)
        return made
    lowest, above = (112, 132) if dtype is torch.float8_e8m0fnu else (0, 256) if dtype.is_floating_point else (0, 2)
    bits = torch.randint(lowest, above, shape, dtype=torch.uint8, generator=generator, device=generator.device)
    if not dtype.is_floating_point:
        return made.copy_(bits)  # shapes and orders, which count and point
    if dtype is not torch.float8_e8m0fnu:
        if len(shape) > 1:
            bits[..., : shape[-2] // 3, :] &= 191  # small values: not all blocks have the largest one
        bits[(bits & 127) > bits_of(torch.tensor([torch.finfo(dtype).max], dtype=dtype)).item()] = 0  # no NaN
    return bits.view(dtype)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(bits_of(first), bits_of(second))


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each storage behind ``tensors`` once, as bytes, which includes padding between the boxes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages.values()]


@dataclass(frozen=True)
class _Other:
    """A tensor at a layer that is not a traced parameter, and the object that holds it."""

    name: str
    owner: object
    itself: torch.Tensor
    tensor: torch.Tensor

    def put_back(self, bits: torch.Tensor) -> None:
        """Restore the tensor with ``bits`` in its place."""
        if not _equal(self.tensor, bits):
            self.tensor.copy_(bits)
        key = self.name.rpartition(".")[2]
        if getattr(self.owner, key, None) is not self.itself:
            setattr(self.owner, key, self.itself)


def _others(model: nn.Module, shards: Sequence[Shard], package: str | None) -> list[_Other]:
    used = {shard.tensor.untyped_storage().data_ptr() for shard in shards}
    others: list[_Other] = []
    seen: set[int] = set()
    for name, owner, tensor in _held(model, package):
        if id(tensor) in seen or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            continue
        seen.add(id(tensor))
        if tensor.untyped_storage().data_ptr() not in used:
            others.append(_Other(name, owner, tensor, tensor.detach()))
    return others


def _held(model: nn.Module, package: str | None) -> Iterator[tuple[str, object, torch.Tensor]]:
    """Yield the tensors of all layers: parameters, buffers, attributes, and those of plain objects at a layer (say, a kernel)."""
    for prefix, layer in model.named_modules():
        hung = {**layer._parameters, **layer._buffers, **vars(layer)}
        for key, value in hung.items():
            if key in _CACHES:
                continue
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{key}", layer, value
            elif _is_of(package, value) and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
                for inner, inner_value in vars(value).items():
                    if isinstance(inner_value, torch.Tensor) and inner not in _CACHES:
                        yield f"{prefix}.{key}.{inner}", value, inner_value


def _is_of(package: str | None, value: object) -> bool:
    return package is not None and type(value).__module__.partition(".")[0] == package


def _changed(now: Sequence[_Other], others: Sequence[_Other], kept: Sequence[torch.Tensor]) -> str | None:
    before = {(other.name, id(other.owner)): bits for other, bits in zip(others, kept, strict=True)}
    for other in now:  # loading may recreate tensors with the same values, such as unused scales
        bits = before.get((other.name, id(other.owner)))
        if bits is None or bits.device != other.tensor.device or not _equal(other.tensor, bits):
            return f"loading computes {other.name} from weights, which direct delivery would not update"
    return None
