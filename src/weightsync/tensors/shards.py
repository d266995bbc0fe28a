"""Shards from state dicts: which boxes of which checkpoint tensors this rank's memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.model import ITEMSIZE, Box, Manifest, TensorSpec
from weightsync.tensors.byte_coverage import Coverage, LocalView

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "DTypes",
    "FollowedShards",
    "Shard",
    "Views",
    "checkpoint_name",
    "dtype_name",
    "manifest_of",
    "ordered",
    "shard",
    "shards_of",
    "torch_dtype",
]

DTypes = torch.dtype | Mapping[str, torch.dtype] | None
"""What to publish as: one dtype for all floating-point tensors of 16 bits and more, or one a name; ``None``: as they are."""

_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_COMPILED = "_orig_mod"  # the attribute in which torch.compile() keeps the module that it wraps


@dataclass(frozen=True, eq=False)
class Shard:
    """A box of one checkpoint tensor of global ``shape``, and the strided local memory that holds it.

    ``tensor`` has the box's shape and the dtype that the memory has, which may differ from the manifest's: it is converted when
    it is placed. It is live: a later step of the optimizer changes it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``. Raises :class:`~weightsync.errors.ConfigurationError` for one that cannot be moved."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ConfigurationError(f"{dtype} cannot be published; known: {', '.join(sorted(ITEMSIZE))}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``"bfloat16"``. Raises :class:`~weightsync.errors.ConfigurationError` for an unknown name."""
    if name not in ITEMSIZE:
        raise ConfigurationError(f"unknown dtype {name!r}; known: {', '.join(sorted(ITEMSIZE))}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def checkpoint_name(name: str) -> str:
    """``name`` without the parts that ``torch.compile`` adds: ``layers.0.w`` for ``_orig_mod.layers.0._orig_mod.w``."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


class Views:
    """Where ``tensors`` are, and how their memory is read: address, size, dtype, and of what is not contiguous shape and strides.

    Contiguous memory of the same size is read alike whatever its shape: its elements in order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kept = _look(tensors)
        self._strided = [index for index, contiguous in enumerate(self._kept[1]) if not contiguous]
        self._forms = [(tensors[index].shape, tensors[index].stride()) for index in self._strided]

    def are_at(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors`` are where they were, however they are read."""
        return list(map(torch.Tensor.data_ptr, tensors)) == self._kept[0]

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors`` are where they were, and read alike. Takes 0.2 microseconds each: it is asked in every round.

        It makes no lists of shapes, as ten thousands of new tuples begin a garbage collection, which takes 100 milliseconds.
        """
        return _look(tensors) == self._kept and all(
            (tensors[index].shape, tensors[index].stride()) == form for index, form in zip(self._strided, self._forms, strict=True)
        )


def _look(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[bool], list[int], list[torch.dtype]]:
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.is_contiguous, tensors)),
        list(map(torch.Tensor.numel, tensors)),
        list(map(_dtype, tensors)),
    )


def shard(name: str, tensor: torch.Tensor, global_shape: Sequence[int], starts: Sequence[int]) -> Shard:
    """Declare by hand that ``tensor`` holds the box of ``name`` (of ``global_shape``) that begins at ``starts``, in elements.

    Raises :class:`~weightsync.errors.LayoutError` if the box would be outside the tensor.
    """
    shape, first = tuple(map(int, global_shape)), tuple(map(int, starts))
    if not len(shape) == len(first) == tensor.dim():
        raise LayoutError(f"shard of {name}: memory of shape {list(tensor.shape)} at {list(first)} of {list(shape)}")
    box = Box(first, tuple(start + extent for start, extent in zip(first, tensor.shape, strict=True)))
    if not box.within(shape):
        raise LayoutError(f"shard of {name} at {list(box.starts)}:{list(box.stops)} is outside its shape {list(shape)}")
    return Shard(name, shape, box, tensor.detach())


def shards_of(
    state: Mapping[str, torch.Tensor] | nn.Module, *, dtype: DTypes = None, buffers: bool = False
) -> tuple[Manifest, list[Shard]]:
    """The manifest of the whole model (equal on every rank), and the shards that this rank holds, in manifest order.

    ``state`` is a module, or tensors by checkpoint name: plain ones are held whole, DTensors as their placements say (FSDP,
    HSDP, tensor parallel and combinations, uneven ones too). Names lose what ``torch.compile`` adds to them. Tensors that are the
    same memory under several names are listed once, under the first name, the others being aliases; in which order names come makes
    no difference to the manifest's order and fingerprint. Of a module, all parameters are taken under the names of its state dict,
    whose hooks may rename and split them, and persistent ``buffers`` only on request; of a mapping, everything. Empty shards are
    left out. No communication, and nothing is copied.

    Raises :class:`~weightsync.errors.LayoutError` for a tensor of which this rank does not hold one box, or that has no memory
    of its own (a tensor subclass that wraps others), and for a parameter that the state dict leaves out or copies;
    :class:`~weightsync.errors.ConfigurationError` for a dtype that cannot be published, a name that is not there, or two tensors
    of one name.
    """
    manifest, held = _survey(state, dtype, buffers)
    for name, (_, box, local) in held.items():
        if box is not None and box.size:
            _check_memory(name, local)
    shards = [Shard(name, shape, box, local) for name, (shape, box, local) in held.items() if box is not None]
    return manifest, ordered(manifest, shards)


def manifest_of(state: Mapping[str, torch.Tensor] | nn.Module, *, dtype: DTypes = None, buffers: bool = False) -> Manifest:
    """The manifest of the whole model; see :func:`shards_of`. Meta tensors and subclasses that wrap others will do."""
    return _survey(state, dtype, buffers)[0]


@torch.no_grad()
def _survey(
    state: Mapping[str, torch.Tensor] | nn.Module, dtype: DTypes, buffers: bool
) -> tuple[Manifest, dict[str, tuple[tuple[int, ...], Box | None, torch.Tensor]]]:
    """The manifest, and by canonical name the global shape, this rank's box, and its memory."""
    found: dict[str, torch.Tensor] = {}
    for given, value in _entries(state, buffers):
        name = checkpoint_name(given)
        if name in found:
            raise ConfigurationError(f"two tensors are named {name} when the parts that torch.compile adds are left out")
        found[name] = value
    canonical: dict[tuple[object, ...], str] = {}
    aliases: dict[str, list[str]] = {}
    held: dict[str, tuple[tuple[int, ...], Box | None, torch.Tensor]] = {}
    for name, value in found.items():
        box, local = _local(name, value)
        shape = tuple(value.shape)
        first = canonical.setdefault(_identity(name, shape, box, local), name)
        aliases.setdefault(first, [])
        if first != name:
            aliases[first].append(name)
        else:
            held[name] = (shape, box, local)
    published = _published(dtype, {name: local.dtype for name, (_, _, local) in held.items()}, aliases)
    manifest = Manifest(
        TensorSpec(name, shape, dtype_name(published[name]), tuple(aliases[name])) for name, (shape, _, _) in held.items()
    )
    return manifest, held


def ordered(manifest: Manifest, shards: Iterable[Shard]) -> list[Shard]:
    """The shards that hold anything, in the order of a layout's rows: by tensor, then as they came.

    Raises :class:`~weightsync.errors.LayoutError` for a shard whose name, shape or box does not fit the manifest.
    """
    rows: list[tuple[int, Shard]] = []
    for one in shards:
        index = manifest.index.get(one.name)
        if index is None:
            raise LayoutError(f"shard of {one.name}, which the manifest does not name")
        if manifest[index].shape != one.shape or not one.box.within(one.shape) or tuple(one.tensor.shape) != one.box.shape:
            place = f"{list(one.box.starts)}:{list(one.box.stops)} of {list(one.shape)}"
            raise LayoutError(
                f"shard of {one.name}: memory of shape {list(one.tensor.shape)} for {place}; "
                f"the manifest says {list(manifest[index].shape)}"
            )
        if one.box.size:
            if not one.tensor.is_meta:
                _check_memory(one.name, one.tensor)
            rows.append((index, one))
    rows.sort(key=lambda row: row[0])
    return [one for _, one in rows]


def _entries(state: Mapping[str, torch.Tensor] | nn.Module, buffers: bool) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(state, nn.Module):
        return _module_entries(state, buffers)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(f"{name} is a {type(value).__name__}, not a tensor")
    return state.items()


def _module_entries(module: nn.Module, buffers: bool) -> list[tuple[str, torch.Tensor]]:
    """The parts of the state dict that are memory of a parameter, or of a buffer if these are asked for.

    State-dict hooks may hand out views of parameters as plain tensors, so the memory tells what belongs to a parameter. Raises
    :class:`~weightsync.errors.LayoutError` unless all of every parameter is there.
    """
    state = module.state_dict(keep_vars=True)  # first: FSDP then puts its shards in the place of parameters that it had gathered
    owned = {name: _view(parameter) for name, parameter in module.named_parameters()}
    others = dict(module.named_buffers(remove_duplicate=False))
    wanted = {_view(value).storage for value in (others.values() if buffers else ())} | {view.storage for view in owned.values()}
    entries: list[tuple[str, torch.Tensor]] = []
    seen: dict[int, set[LocalView]] = {}  # by storage
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or (name in others and not buffers):
            continue
        view = _view(value)
        if view.storage not in wanted and not isinstance(value, nn.Parameter):
            continue
        entries.append((name, value))
        seen.setdefault(view.storage, set()).add(view)
    coverage: dict[int, Coverage] = {}
    for name, view in owned.items():
        views = seen.get(view.storage, set())
        if view in views:
            continue
        if view.storage not in coverage:
            coverage[view.storage] = Coverage(views)
        left = coverage[view.storage].lacking(view)
        if left:
            raise LayoutError(
                f"parameter {name} of {type(module).__name__} would not be published whole: {left:,} bytes of its memory are in no "
                "tensor of the module's state_dict(). A state-dict hook leaves it out or copies it: give weightsync a dict of the "
                "live tensors by checkpoint name instead of the module"
            )
    return entries


@torch.no_grad()
def _view(value: torch.Tensor) -> LocalView:
    local = _here(value)
    if local.layout is not torch.strided:  # its parts have storages, itself has none
        return LocalView(-id(value), 0, (1,), (local.numel(),), local.dtype)
    return LocalView(local.untyped_storage()._cdata, int(local.storage_offset()), local.stride(), tuple(local.shape), local.dtype)


def _here(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return value.to_local() if isinstance(value, _dtensor()) else value


@cache
def _dtensor() -> type[DTensor] | tuple[()]:
    """The class, for isinstance(), once it is needed: its module takes long to import, and is not in every build of torch."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return DTensor


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not at its address: kernels would read whatever is there."""
    if tensor.is_meta:
        raise LayoutError(f"{name} is a meta tensor: it has no memory")
    if hasattr(tensor, "__tensor_flatten__") or not tensor.data_ptr():
        raise LayoutError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, which has no memory of its own (it wraps other "
            "tensors, as quantized weights do): give weightsync a dict with the tensors inside it, or dequantize it first"
        )


def _local(name: str, value: torch.Tensor) -> tuple[Box | None, torch.Tensor]:
    """The box that this rank holds, and its memory."""
    if value.layout is not torch.strided or value.is_quantized:
        raise LayoutError(f"{name} is not a plain strided tensor ({value.layout}, {value.dtype}); publish its parts instead")
    if isinstance(value, _dtensor()):
        from weightsync.tensors.placements import local_box

        box = local_box(name, value)
        local = value.to_local().detach()
        if box is not None and tuple(local.shape) != box.shape:
            if box.size or local.numel():
                raise LayoutError(
                    f"{name} holds {list(local.shape)} here, but its placements {value.placements} of {list(value.shape)} "
                    f"say {list(box.shape)}"
                )
            local = local.new_empty(box.shape)
        return box, local
    return Box.whole(tuple(value.shape)), value.detach()


def _identity(name: str, shape: tuple[int, ...], box: Box | None, local: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of the same memory.

    By the storage object, not by its address: ranks whose local shard is empty must find the same ties as the others, and
    empty tensors all have the same address.
    """
    if 0 in shape or box is None:
        return (name,)
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), local.stride(), local.dtype, shape, box.starts, box.stops)


def _published(dtype: DTypes, held: Mapping[str, torch.dtype], aliases: Mapping[str, list[str]]) -> dict[str, torch.dtype]:
    """What each tensor is published as."""
    if dtype is None:
        return dict(held)
    if isinstance(dtype, torch.dtype):
        # Integers, booleans and float8 (whose values mean nothing without their scales) are never converted by a blanket wish.
        return {name: dtype if own.is_floating_point and own.itemsize > 1 else own for name, own in held.items()}
    owner = {alias: name for name, others in aliases.items() for alias in (name, *others)}
    dtype = {checkpoint_name(name): kind for name, kind in dtype.items()}
    unknown = sorted(set(dtype) - set(owner))
    if unknown:
        raise ConfigurationError(f"dtype given for tensors that are not there: {', '.join(unknown[:10])} ({len(unknown)} in all)")
    wanted = dict(held)
    chosen: dict[str, str] = {}
    for name, kind in dtype.items():
        other = chosen.setdefault(owner[name], name)
        if dtype[other] != kind:
            both = f"{dtype[other]} and {kind}"
            raise ConfigurationError(f"{other} and {name} are the same tensor, but are to be published as {both}")
        wanted[owner[name]] = kind
    return wanted


class FollowedShards:
    """The manifest and shards of ``state``, taken anew whenever a name has other memory, or is another view of the same.

    Looking costs some microseconds a tensor, taking them anew tens. For a mapping, its tensors themselves must be the live ones:
    what a module's ``state_dict()`` returned does not see that a parameter was replaced.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module,
        *,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        buffers: bool = False,
    ) -> None:
        self._state, self._dtype, self._buffers = state, dtype, buffers
        self._names, tensors = self._look()
        self._views = Views(tensors)
        self._found = shards_of(state, dtype=dtype, buffers=buffers)

    @torch.no_grad()
    def _look(self) -> tuple[list[str], list[torch.Tensor]]:
        """All names, tied ones too, and the tensor of each. Not a list of pairs, for the reason that :class:`Views` gives."""
        names, tensors = list[str](), list[torch.Tensor]()
        for name, value in self._named():
            names.append(name)
            tensors.append(_here(value))
        return names, tensors

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        state = self._state
        if isinstance(state, Mapping):
            return state.items()
        buffers = state.named_buffers(remove_duplicate=False) if self._buffers else ()
        return chain(state.named_parameters(remove_duplicate=False), buffers)

    def now(self) -> tuple[Manifest, list[Shard]]:
        """As :func:`shards_of`, of the memory that the state has now: the very same objects if nothing moved."""
        names, tensors = self._look()
        if names != self._names or not self._views.are_of(tensors):
            found = shards_of(self._state, dtype=self._dtype, buffers=self._buffers)
            self._names, self._views, self._found = names, Views(tensors), found
        return self._found
