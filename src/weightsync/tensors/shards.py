"""Shards of state dicts: the boxes of checkpoint tensors that this rank's memory holds."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress
from operator import attrgetter, eq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.model import ITEMSIZE, Box, Manifest, TensorSpec, itemsize
from weightsync.tensors.byte_coverage import ByteCoverage, LocalView
from weightsync.tensors.checkpoint_names import CheckpointPart, checkpoint_parts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DTypes = torch.dtype | Mapping[str, torch.dtype] | None
"""Published dtype: one for all floating-point tensors of 16 bits and more, or one for each name; ``None`` keeps their own."""

_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_shape: Callable[[torch.Tensor], torch.Size] = attrgetter("shape")
_address, _contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPILED = "_orig_mod"  # attribute in which torch.compile() keeps the wrapped module


class _Held(NamedTuple):
    """A tensor of the model: its global shape, the box that this rank holds of it, and the memory of that."""

    shape: tuple[int, ...]
    box: Box | None
    local: torch.Tensor
    owner: str
    """Name of the tensor of the state that has this memory."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A box of one checkpoint tensor of global ``shape``, and the strided local memory that holds it.

    ``tensor`` has the box's shape and the memory's dtype. If that differs from the manifest's dtype, the shard is converted when it
    is placed. The tensor is live: a later optimizer step changes it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    owner: str = ""
    """Name of the tensor of the state that this is, or is a part of; empty if that is :attr:`name`."""


class ShardedState(ABC):
    """Weights that declare their own shards, for frameworks whose modules do not describe their sharding."""

    @abstractmethod
    def declare(self) -> tuple[Manifest, Sequence[Shard]]:
        """Return the manifest of the whole model (equal on every rank) and this rank's shards, perhaps several of one tensor.

        The shards are in the order of :func:`ordered`. Called before every publication. Returns the same objects until a shard has
        other memory. Needs no communication.
        """


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``.

    Raises:
        ConfigurationError: The dtype cannot be published.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ConfigurationError(f"{dtype} cannot be published; known: {', '.join(sorted(ITEMSIZE))}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for ``"bfloat16"``.

    Raises:
        ConfigurationError: The name is unknown.
    """
    itemsize(name)  # which refuses what is unknown
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the same size, which compare and copy every bit."""
    kind = _INTEGERS.get(tensor.element_size())
    return tensor if kind is None else tensor.view(kind)


def checkpoint_name(name: str) -> str:
    """Remove the parts that ``torch.compile`` adds: ``layers.0.w`` for ``_orig_mod.layers.0._orig_mod.w``."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


class Views:
    """Snapshot of the addresses of ``tensors`` and of how they are read: dtype, shape, and strides if not contiguous."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kept = _look(tensors)
        self._shapes = list(map(_shape, tensors))
        self._strided = [index for index, contiguous in enumerate(self._kept[1]) if not contiguous]
        self._strides = [tensors[index].stride() for index in self._strided]

    def are_at(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if ``tensors`` have the same addresses as before, and the same of them are contiguous.

        Takes half as long as :meth:`are_of`. Enough if the memory of before is still alive: no other can have its addresses.
        """
        addresses, contiguous, *_ = self._kept
        return (
            list(map(_address, tensors)) == addresses
            and list(map(_contiguous, tensors)) == contiguous
            and self._as_strided(tensors)
        )

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if ``tensors`` have the same addresses as before and are read alike. Takes 0.2 microseconds for each tensor.

        Every round calls this. It makes no lists of shapes, because tens of thousands of new tuples trigger a garbage collection of
        100 milliseconds: each is compared and dropped.
        """
        return _look(tensors) == self._kept and all(map(eq, map(_shape, tensors), self._shapes)) and self._as_strided(tensors)

    def _as_strided(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(
            tensors[index].shape == self._shapes[index] and tensors[index].stride() == strides
            for index, strides in zip(self._strided, self._strides, strict=True)
        )


def _look(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[bool], list[torch.dtype]]:
    return (
        list(map(_address, tensors)),
        list(map(_contiguous, tensors)),
        list(map(_dtype, tensors)),
    )


def shard(name: str, tensor: torch.Tensor, global_shape: Sequence[int], starts: Sequence[int]) -> Shard:
    """Declare that ``tensor`` holds the box of checkpoint tensor ``name`` that starts at ``starts``.

    Args:
        name: Checkpoint name.
        tensor: Local memory, with the box's shape.
        global_shape: Shape of the whole checkpoint tensor, in elements.
        starts: First index of the box in each dimension, in elements.

    Raises:
        LayoutError: The box lies outside the tensor.
    """
    shape, first = tuple(map(int, global_shape)), tuple(map(int, starts))
    if not len(shape) == len(first) == tensor.dim():
        raise LayoutError(f"shard of {name}: memory of shape {list(tensor.shape)} at {list(first)} of {list(shape)}")
    box = Box(first, tuple(start + extent for start, extent in zip(first, tensor.shape, strict=True)))
    if not box.within(shape):
        raise LayoutError(f"shard of {name} at {list(box.starts)}:{list(box.stops)} is outside its shape {list(shape)}")
    return Shard(name, shape, box, tensor.detach())


def shards_of(
    state: Mapping[str, torch.Tensor] | nn.Module | ShardedState, *, dtype: DTypes = None, include_buffers: bool = False
) -> tuple[Manifest, list[Shard]]:
    """Return the manifest of the whole model (equal on every rank) and the shards that this rank holds, in manifest order.

    Plain tensors are held whole, DTensors according to their placements (FSDP, HSDP, tensor parallel and combinations, uneven
    ones too). Parts of names that ``torch.compile`` adds are removed. Tensors that share the same memory under several names are
    listed once, under the first name, with the others as aliases; the order of names affects neither the manifest's order nor its
    fingerprint. Empty shards are left out. This needs no communication and copies nothing.

    Args:
        state: A module, tensors by checkpoint name, or a :class:`ShardedState`. A module publishes all parameters under the names
            of its state dict, whose hooks may rename and split them; a Transformers model under those of its checkpoint, one
            tensor for each expert. A mapping publishes all of its tensors.
        dtype: See :data:`DTypes`.
        include_buffers: Whether to include a module's persistent buffers.

    Raises:
        LayoutError: This rank does not hold one box of a tensor, a tensor has no memory of its own (a subclass that wraps others),
            or the state dict omits or copies a parameter.
        ConfigurationError: A dtype cannot be published, a name in ``dtype`` does not exist, or two tensors have one name.
    """
    if isinstance(state, ShardedState):
        manifest, declared = state.declare()
        return _converted(manifest, dtype), ordered(manifest, declared)
    manifest, held = _survey(state, dtype, include_buffers)
    for name, (_, box, local, _) in held.items():
        if box is not None and box.size:
            _check_memory(name, local)
    shards = [Shard(name, shape, box, local, owner) for name, (shape, box, local, owner) in held.items() if box is not None]
    return manifest, ordered(manifest, shards)


def manifest_of(state: Mapping[str, torch.Tensor] | nn.Module, *, dtype: DTypes = None, include_buffers: bool = False) -> Manifest:
    """Return the manifest of the whole model, as :func:`shards_of` does. Meta tensors and wrapping subclasses are accepted too."""
    return _survey(state, dtype, include_buffers)[0]


@torch.no_grad()
def _survey(
    state: Mapping[str, torch.Tensor] | nn.Module, dtype: DTypes, include_buffers: bool
) -> tuple[Manifest, dict[str, _Held]]:
    """Return the manifest and, by canonical name, the global shape, this rank's box, and its memory."""
    tensors: dict[str, torch.Tensor] = {}
    for given, value in _entries(state, include_buffers):
        name = checkpoint_name(given)
        if name in tensors:
            raise ConfigurationError(f"two tensors are named {name} once the parts that torch.compile adds are removed")
        tensors[name] = value
    canonical: dict[tuple[object, ...], str] = {}
    aliases: dict[str, list[str]] = {}
    held: dict[str, _Held] = {}
    for name, value in tensors.items():
        box, local = _local(name, value)
        shape = tuple(value.shape)
        first = canonical.setdefault(_identity(name, value, shape, box, local), name)
        aliases.setdefault(first, [])
        if first != name:
            aliases[first].append(name)
        else:
            held[name] = _Held(shape, box, local, name)
    if isinstance(state, nn.Module):
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        held, aliases = _as_in_checkpoint(checkpoint_parts(state, shapes), held, aliases)
    published = _published(dtype, {name: tensor.local.dtype for name, tensor in held.items()}, aliases)
    manifest = Manifest(
        TensorSpec(name, shape, dtype_name(published[name]), tuple(aliases[name])) for name, (shape, *_) in held.items()
    )
    return manifest, held


def _as_in_checkpoint(
    parts: Mapping[str, Sequence[CheckpointPart]], held: dict[str, _Held], aliases: dict[str, list[str]]
) -> tuple[dict[str, _Held], dict[str, list[str]]]:
    """Return what is held, and the aliases, as the tensors of the model's checkpoint. Ties that it cuts differently stay whole."""
    if not parts:
        return held, aliases
    result: dict[str, _Held] = {}
    names: dict[str, list[str]] = {}
    for name, (shape, box, local, _) in held.items():
        whole = [(CheckpointPart.whole(tied, shape),) for tied in (name, *aliases[name])]
        cut = [parts.get(part.name, (part,)) for (part,) in whole]
        alike = all([(part.box, part.dims) for part in tied] == [(part.box, part.dims) for part in cut[0]] for tied in cut)
        for part, *others in zip(*(cut if alike else whole), strict=True):
            if part.name in result:
                raise ConfigurationError(
                    f"{result[part.name].owner} and {name} of this model are both {part.name} in its checkpoint: give one of them "
                    "another name, or pass a dict of the live tensors by checkpoint name"
                )
            as_it_is = part == CheckpointPart.whole(part.name, shape)
            own, memory = (box, local) if as_it_is or box is None else part.within(box, local)
            result[part.name] = _Held(part.shape, own, memory, name)
            names[part.name] = [other.name for other in others]
    return result, names


def _converted(manifest: Manifest, dtype: DTypes) -> Manifest:
    """Return the manifest with the dtypes that are to be published."""
    if dtype is None:
        return manifest
    held = {spec.name: torch_dtype(spec.dtype) for spec in manifest}
    published = _published(dtype, held, {spec.name: list(spec.aliases) for spec in manifest})
    return Manifest(TensorSpec(spec.name, spec.shape, dtype_name(published[spec.name]), spec.aliases) for spec in manifest)


def ordered(manifest: Manifest, shards: Iterable[Shard]) -> list[Shard]:
    """Sort the nonempty shards in the order of a layout's rows: by tensor, then as given.

    Raises:
        LayoutError: A shard's name, shape or box does not fit the manifest.
    """
    rows: list[tuple[int, Shard]] = []
    for shard in shards:
        index = manifest.index.get(shard.name)
        if index is None:
            raise LayoutError(f"{shard.name} has a shard but is not in the manifest")
        if (
            manifest[index].shape != shard.shape
            or not shard.box.within(shard.shape)
            or tuple(shard.tensor.shape) != shard.box.shape
        ):
            place = f"{list(shard.box.starts)}:{list(shard.box.stops)} of {list(shard.shape)}"
            raise LayoutError(
                f"shard of {shard.name}: memory of shape {list(shard.tensor.shape)} for {place}; "
                f"the manifest's shape is {list(manifest[index].shape)}"
            )
        if shard.box.size:
            if not shard.tensor.is_meta:
                _check_memory(shard.name, shard.tensor)
            rows.append((index, shard))
    rows.sort(key=lambda row: row[0])
    return [shard for _, shard in rows]


def _entries(state: Mapping[str, torch.Tensor] | nn.Module, include_buffers: bool) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(state, nn.Module):
        return _module_entries(state, include_buffers)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(f"{name} is a {type(value).__name__}, not a tensor")
    return state.items()


def _module_entries(module: nn.Module, include_buffers: bool) -> list[tuple[str, torch.Tensor]]:
    """Entries of the state dict that are memory of a parameter or, on request, of a buffer.

    State-dict hooks may return views of parameters as plain tensors, so the memory decides what belongs to a parameter.

    Raises:
        LayoutError: The state dict does not hold all of every parameter.
    """
    state = module.state_dict(keep_vars=True)  # first, because FSDP then replaces gathered parameters with its shards
    owned = {name: _view(parameter) for name, parameter in module.named_parameters()}
    others = dict(module.named_buffers(remove_duplicate=False))
    wanted = {_view(value).storage for value in (others.values() if include_buffers else ())} | {
        view.storage for view in owned.values()
    }
    entries: list[tuple[str, torch.Tensor]] = []
    seen: dict[int, set[LocalView]] = {}  # by storage
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or (name in others and not include_buffers):
            continue
        view = _view(value)
        if view.storage not in wanted and not isinstance(value, nn.Parameter):
            continue
        entries.append((name, value))
        seen.setdefault(view.storage, set()).add(view)
    coverage: dict[int, ByteCoverage] = {}
    for name, view in owned.items():
        views = seen.get(view.storage, set())
        if view in views:
            continue
        if view.storage not in coverage:
            coverage[view.storage] = ByteCoverage(views)
        left = coverage[view.storage].lacking(view)
        if left:
            raise LayoutError(
                f"parameter {name} of {type(module).__name__} would not be published whole: {left:,} bytes of its memory are in no "
                "tensor of the module's state_dict(). A state-dict hook omits or copies it: pass a dict of the live tensors by "
                "checkpoint name instead of the module"
            )
    return entries


@torch.no_grad()
def _view(value: torch.Tensor) -> LocalView:
    local = local_part(value)
    if local.layout is not torch.strided:  # only its parts have storages
        return LocalView(-id(value), 0, (1,), (local.numel(),), local.dtype)
    return LocalView(local.untyped_storage()._cdata, int(local.storage_offset()), local.stride(), tuple(local.shape), local.dtype)


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor; any other tensor unchanged."""
    return value.to_local() if isinstance(value, _dtensor()) else value


@cache
def _dtensor() -> type[DTensor] | tuple[()]:
    """Return the DTensor class for isinstance(), imported on first use: the import is slow, and some builds of torch lack it."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return DTensor


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Reject a tensor whose elements are not at its address, because kernels would read unrelated memory or opposite signs."""
    if tensor.is_meta:
        raise LayoutError(f"{name} is a meta tensor: it has no memory")
    if tensor.is_neg() or tensor.is_conj():
        raise LayoutError(
            f"{name} is lazily {'negated' if tensor.is_neg() else 'conjugated'}: its memory holds the opposite signs. Pass "
            "tensor.resolve_conj().resolve_neg(), which copies it"
        )
    if hasattr(tensor, "__tensor_flatten__") or not tensor.data_ptr():
        raise LayoutError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, which has no memory of its own (it wraps other "
            "tensors, as quantized weights do): pass a dict with the tensors inside it, or dequantize it first"
        )


def _local(name: str, value: torch.Tensor) -> tuple[Box | None, torch.Tensor]:
    """Return the box that this rank holds, and its memory."""
    if value.layout is not torch.strided or value.is_quantized:
        raise LayoutError(f"{name} is not a plain strided tensor ({value.layout}, {value.dtype}); publish its parts instead")
    if isinstance(value, _dtensor()):
        from weightsync.tensors.placements import local_box

        box = local_box(name, value)
        local = value.to_local().detach()
        if box is not None and tuple(local.shape) != box.shape:
            if box.size or local.numel():
                raise LayoutError(
                    f"{name} has local shape {list(local.shape)}, but its placements {value.placements} of {list(value.shape)} "
                    f"give {list(box.shape)}. Megatron-FSDP says where a part lies in state_dict(keep_vars=True) of what "
                    "fully_shard_model() returned: pass that"
                )
            local = local.new_empty(box.shape)
        return box, local
    return Box.whole(tuple(value.shape)), value.detach()


def _identity(name: str, value: torch.Tensor, shape: tuple[int, ...], box: Box | None, local: torch.Tensor) -> tuple[object, ...]:
    """Key that is equal for two names of the same memory.

    It uses the storage object instead of its address: ranks with an empty local shard must find the same ties as the others, and
    all empty tensors have the same address. Where all tensors are slices of one buffer, empty ones may be at the same place in it,
    so there the tensor object itself counts.
    """
    if 0 in shape or box is None:
        return (name,)
    if hasattr(getattr(value, "_local_tensor", None), "__create_chunk_list__"):
        return (id(value._local_tensor),)  # type: ignore[attr-defined]
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), local.stride(), local.dtype, shape, box.starts, box.stops)


def published_dtype(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor of dtype ``own`` is published where ``dtype`` is given for all.

    Integers, booleans and float8 are never converted: their values have no meaning without their scales.
    """
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > 1 else own


def _published(dtype: DTypes, held: Mapping[str, torch.dtype], aliases: Mapping[str, list[str]]) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor is published."""
    if not isinstance(dtype, Mapping):
        return {name: published_dtype(dtype, own) for name, own in held.items()}
    owner = {alias: name for name, others in aliases.items() for alias in (name, *others)}
    dtype = {checkpoint_name(name): kind for name, kind in dtype.items()}
    unknown = sorted(set(dtype) - set(owner))
    if unknown:
        raise ConfigurationError(f"dtype given for tensors that do not exist: {', '.join(unknown[:10])} ({len(unknown)} in all)")
    wanted = dict(held)
    chosen: dict[str, str] = {}
    for name, kind in dtype.items():
        other = chosen.setdefault(owner[name], name)
        if dtype[other] != kind:
            both = f"{dtype[other]} and {kind}"
            raise ConfigurationError(f"{other} and {name} are the same tensor, but dtype asks for {both}")
        wanted[owner[name]] = kind
    return wanted


_RELEASED = torch.empty(0)


class FollowedShards:
    """Manifest and shards of ``state``, recomputed whenever a tensor has other memory or is another view of the same memory.

    A check takes some microseconds for each tensor, recomputing tens. In a mapping the tensors themselves must be the live ones:
    the result of a module's ``state_dict()`` does not reflect a parameter that is replaced later.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        *,
        dtype: DTypes = None,
        include_buffers: bool = False,
    ) -> None:
        self._state, self._dtype, self._include_buffers = state, dtype, include_buffers
        self._released = False
        self._take()

    def _take(self) -> None:
        self._cuts: list[tuple[int, tuple[int, ...] | None, tuple[int, ...], int]] | None = None
        self._current = shards_of(self._state, dtype=self._dtype, include_buffers=self._include_buffers)
        # Afterwards, because hooks of a state dict may replace parameters: FSDP replaces gathered ones with its shards.
        self._names, tensors = self._look()
        self._views = Views(tensors)
        self._tree = _Tree(self._state, self._include_buffers) if isinstance(self._state, nn.Module) else None
        self._released = False

    @torch.no_grad()
    def _look(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return all names, including tied ones, and their tensors: two lists instead of pairs, as explained in :class:`Views`."""
        names, tensors = list[str](), list[torch.Tensor]()
        for name, value in self._named():
            names.append(name)
            tensors.append(local_part(value))
        return names, tensors

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        state = self._state
        if isinstance(state, ShardedState):
            return [(shard.name, shard.tensor) for shard in state.declare()[1]]
        if isinstance(state, Mapping):
            return state.items()
        buffers = state.named_buffers(remove_duplicate=False) if self._include_buffers else ()
        return chain(state.named_parameters(remove_duplicate=False), buffers)

    @property
    def last(self) -> tuple[Manifest, list[Shard]]:
        """What was found last. Its memory is alive, even if the state has other memory now."""
        return self._current

    def now(self) -> tuple[Manifest, list[Shard]]:
        """Return :func:`shards_of` for the current memory; the identical objects if nothing has moved."""
        names, tensors = self._look()
        if names != self._names or not self._views.are_of(tensors) or (self._released and self._cuts is None):
            self._take()
        elif self._released and self._cuts is not None:
            with torch.no_grad():
                for shard, (index, shape, strides, offset) in zip(self._current[1], self._cuts, strict=True):
                    part = tensors[index]  # itself: 18,000 new objects take 10 ms, and more if garbage is collected for them
                    part = part.detach() if part.requires_grad else part
                    if shape is not None:
                        part = part.as_strided(shape, strides, part.storage_offset() + offset)
                    object.__setattr__(shard, "tensor", part)
            self._released = False
        return self._current

    def release(self) -> None:
        """Keep no tensor alive until the next :meth:`now`: the program may offload them. Meanwhile the shards have no memory.

        Does nothing for shards that are no parts of the state's own tensors, such as copies that a hook of a state dict made.
        """
        if self._released or isinstance(self._state, ShardedState):
            return
        names, tensors = self._look() if self._cuts is None else ([], [])
        if self._cuts is None and names == self._names and self._views.are_of(tensors):
            index = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors) if tensor.numel()}
            held = [(index.get(part.tensor.untyped_storage()._cdata, -1), part.tensor) for part in self._current[1]]
            if any(number < 0 or part.dtype != tensors[number].dtype for number, part in held):
                return
            self._cuts = [
                (number, None, (), 0)
                if (part.data_ptr(), part.shape, part.stride()) == (whole.data_ptr(), whole.shape, whole.stride())
                else (number, tuple(part.shape), part.stride(), int(part.storage_offset() - whole.storage_offset()))
                for number, part in held
                for whole in (tensors[number],)
            ]
        self._released = True  # first: a signal handler may raise anywhere in here
        for shard in self._current[1]:
            object.__setattr__(shard, "tensor", _RELEASED)

    def now_quickly(self) -> tuple[Manifest, list[Shard]]:
        """Return what :meth:`now` does, in about a tenth of the time if nothing has moved.

        ``python -m benchmarks.second_look`` measures it. A contiguous tensor at the same address that now has another shape or
        dtype goes unnoticed.
        """
        return self._current if self.unchanged else self.now()

    @property
    def unchanged(self) -> bool:
        """Whether a module's memory is what was found last, as far as can be seen without its hooks, so also while it computes."""
        return not self._released and self._tree is not None and self._tree.unchanged()


class _Tree:
    """The modules and parameters of a module and their memory, as they were when this was made. It keeps them alive."""

    def __init__(self, module: nn.Module, include_buffers: bool) -> None:
        modules = list(module.modules())
        self._branches = [child._modules for child in modules if child._modules]
        self._leaves: list[Mapping[str, torch.Tensor | None]] = [child._parameters for child in modules if child._parameters]
        if include_buffers:
            self._leaves += [child._buffers for child in modules if child._buffers]
        # The values of all dictionaries come in one call: a loop takes ten times as long.
        self._children = gc.get_referents(*self._branches)
        leaves = gc.get_referents(*self._leaves)
        self._held = [leaf is not None for leaf in leaves]
        self._wrapped = any(isinstance(leaf, _dtensor()) for leaf in leaves)
        self._views = Views(self._memory(leaves))

    def _memory(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tensors = list(compress(leaves, self._held))
        return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors] if self._wrapped else tensors

    def unchanged(self) -> bool:
        """Return True if every module that had children has the same ones, and every parameter has the same memory."""
        if gc.get_referents(*self._branches) != self._children:
            return False
        leaves = gc.get_referents(*self._leaves)
        if len(leaves) != len(self._held):
            return False
        try:
            return self._views.are_at(self._memory(leaves))
        except TypeError:  # a parameter is None now
            return False
