"""Recording of a loader's operators on meta tensors: the checkpoint element behind each element of each memory.

Views need no rules: they are other strides over the same storage. Copies compose maps. Every other operator makes its results
*mixed*: they remember which checkpoint tensors went in, and why they are not plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from weightsync.tracing.affine_map import AffineMap, Irregular, compose, contiguous
from weightsync.tracing.aten_ops import COPYING

aten = torch.ops.aten

_RESHAPING = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "detach_", "as_strided_", "set_", "rename_"}
_FILLING = {
    "fill_", "zero_",
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
}  # fmt: skip
_EXACT = {torch.float8_e8m0fnu, torch.bfloat16, torch.float16}
_READING = {"_local_scalar_dense", "equal", "is_nonzero"}


@dataclass(frozen=True)
class Piece:
    """Elements of one memory (``map.src``, bytes) that came from a checkpoint.

    A plain piece maps to checkpoint tensor ``tensor`` element by element (``map.dst``). A mixed piece (``tensor`` is -1) was
    computed from tensors ``touched`` in another way, for the ``reason``. ``stale`` means that unknown parts were overwritten since.
    """

    map: AffineMap
    itemsize: int
    tensor: int
    touched: frozenset[int]
    reason: str = ""
    stale: bool = False


@dataclass
class _TracedMemory:
    """One storage. The reference prevents reuse of its address but does not keep its bytes."""

    alive: StorageWeakRef
    parameter: str | None = None
    pieces: list[Piece] = field(default_factory=list)

    def near(self, mapping: AffineMap) -> list[Piece]:
        last = mapping.last
        return [piece for piece in self.pieces if piece.map.src <= last and mapping.src <= piece.map.last]


def map_of(tensor: torch.Tensor, dst: int = 0, steps: Sequence[int] | None = None) -> AffineMap:
    """Map of ``tensor``'s elements from the bytes of its storage to positions by ``steps`` (default: C order)."""
    size = tensor.element_size()
    others = contiguous(tensor.shape, size) if steps is None else steps
    strides = [stride * size for stride in tensor.stride()]
    return AffineMap(int(tensor.storage_offset()) * size, dst, tuple(zip(tensor.shape, strides, others, strict=True)))


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor) and value.layout is torch.strided]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows checkpoint tensors through all operators that run inside it. Never writes to parameters.

    With ``converts`` a conversion to float32 that is exact counts as a copy: of the tensor as float32.

    ``changed`` gives, by tensor index, why a tensor cannot be delivered as plain copies. ``stuck`` is the operator that ran when a
    loader raised.
    """

    def __init__(self, *, converts: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._converts = converts
        self.changed: dict[int, str] = {}
        self.stuck: tuple[str, frozenset[int]] | None = None
        self._memories: dict[int, _TracedMemory] = {}

    def checkpoint(self, index: int, tensor: torch.Tensor) -> None:
        """Declare ``tensor`` (contiguous, with its own memory) as checkpoint tensor ``index``."""
        piece = Piece(map_of(tensor).folded(), tensor.element_size(), index, frozenset([index]))
        self._own(tensor).pieces.append(piece)

    def parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Declare ``tensor`` as a parameter. Writes to it are recorded."""
        self._own(tensor).parameter = name

    def change(self, tensors: Iterable[int], reason: str) -> None:
        """Mark tensors that are not plain copies. The first reason of each is kept."""
        for index in sorted(tensors):
            self.changed.setdefault(index, reason)

    def _own(self, tensor: torch.Tensor) -> _TracedMemory:
        storage = tensor.untyped_storage()
        return self._memories.setdefault(storage._cdata, _TracedMemory(StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def _known(self, tensor: torch.Tensor) -> _TracedMemory | None:
        return self._memories.get(tensor.untyped_storage()._cdata)

    def pieces_of(self, tensor: torch.Tensor, mapping: AffineMap) -> list[Piece]:
        """Origin of ``tensor``'s elements, at the positions to which ``map`` maps them. Other elements are left out."""
        memory = self._known(tensor)
        if memory is None or not mapping.size:
            return []
        size = tensor.element_size()
        near = memory.near(mapping)
        late = [old for old in near if old.stale]
        pieces: list[Piece] = []
        try:
            for old in near:
                if old.itemsize != size:
                    return [_mixed(mapping, size, old.touched, "its bytes are read as elements of another size")]
                if not old.stale:
                    pieces += [replace(old, map=part) for part in compose(mapping, old.map, size)]
            # Plain pieces never overlap but mixed ones may, so only plain ones prove that nothing stale is left.
            if late and sum(piece.map.size for piece in pieces if piece.tensor >= 0) < mapping.size:
                for old in late:
                    if compose(mapping, old.map, size):
                        pieces.append(_mixed(mapping, size, old.touched, "it is partly overwritten in a buffer, then read from it"))
        except Irregular:
            return [_mixed(mapping, size, _union(near), "it is rearranged in too many small parts")]
        return pieces

    def touched(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Checkpoint tensors that contributed an element to any of these tensors."""
        every: set[int] = set()
        for tensor in tensors:
            every |= _union(self.pieces_of(tensor, map_of(tensor)))
        return frozenset(every)

    def _put(self, target: torch.Tensor, pieces: list[Piece], cause: str) -> None:
        """Record that ``target``'s elements are exactly ``pieces`` now."""
        memory = self._own(target)
        region = map_of(target, steps=[0] * target.dim()).folded()
        kept: list[Piece] = []
        near = {id(piece) for piece in memory.near(region)}
        for old in memory.pieces:
            shared = _overlap(region, old, target.element_size()) if id(old) in near else 0
            if not shared:
                kept.append(old)
                continue
            if any(old == new for new in pieces):
                continue
            if memory.parameter is not None:
                self.change(old.touched, f"{cause} overwrites it in {memory.parameter}")
                self.change(_union(pieces), f"it overwrites another checkpoint tensor in {memory.parameter}")
            if shared < old.map.size:
                kept.append(replace(old, stale=True))
        memory.pieces = [*kept, *pieces]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record ``target.copy_(source)``."""
        if not target.numel():
            return
        size = target.element_size()
        source = source.expand(target.shape)
        dst = int(target.storage_offset()) * size
        steps = [stride * size for stride in target.stride()]
        pieces = self.pieces_of(source, map_of(source, dst, steps))
        exact = self._converts and source.dtype in _EXACT and target.dtype is torch.float32
        if exact and all(piece.tensor >= 0 and not piece.stale for piece in pieces):
            times = size // source.element_size()
            pieces = [replace(piece, map=_widened(piece.map, times), itemsize=size) for piece in pieces]
        elif source.dtype != target.dtype and pieces:
            before = [piece.reason for piece in pieces if piece.tensor < 0]
            reason = before[0] if before else f"it is converted from {source.dtype} to {target.dtype}"
            pieces = [_mixed(map_of(source, dst, steps), size, _union(pieces), reason)]
        self._put(target, [replace(piece, map=piece.map.folded()) for piece in pieces], "a later copy")

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Record one operator. Run it unless it would write to a parameter or needs bytes that do not exist."""
        del types
        keywords = dict(kwargs or {})
        if func.is_view:
            return func(*args, **keywords)
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return self._copied(func, args, keywords)
        if name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self._copied(aten.copy_.default, (target, source), {})
            return args[0] if func._schema.returns else None
        written = _written(func, args, keywords)
        if written and name not in _RESHAPING:
            return self._changed(func, name, args, keywords, written)
        inputs = _tensors((args, keywords))
        touched = self.touched(inputs) if self._tracked(inputs) else frozenset()
        if name in _READING and touched:
            self.change(touched, f"the loader reads its values ({name.strip('_')})")
            return _plausible(name, args)
        result = self._run(func, args, keywords, touched)
        if touched:
            self._made(name, args, keywords, result, touched, inputs)
        return result

    def _tracked(self, inputs: Iterable[torch.Tensor]) -> bool:
        return any(self._known(tensor) is not None for tensor in inputs)

    def _copied(self, func: OpOverload[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
        target: torch.Tensor = args[0]
        source: torch.Tensor = args[1]
        memory = self._known(target)
        self.copy(target, source)
        if not (source.is_meta or target.is_meta or self._tracked([source]) or (memory and memory.parameter)):
            func(*args, **keywords)
        return target

    def _changed(
        self, func: OpOverload[..., Any], name: str, args: tuple[Any, ...], keywords: dict[str, Any], written: list[torch.Tensor]
    ) -> object:
        """Record an operator, other than a copy, that writes to its arguments."""
        inputs = _tensors((args, keywords))
        others = [tensor for tensor in inputs if not (name in _FILLING and any(tensor is target for target in written))]
        touched = self.touched(others) if self._tracked(inputs) else frozenset()
        for target in written:
            if touched or self._known(target) is not None:
                cause = f"it goes through {name}"
                pieces = [_mixed(map_of(target).swapped(), target.element_size(), touched, cause)] if touched else []
                self._put(target, pieces, name)
        kept = any((memory := self._known(target)) is not None and memory.parameter is not None for target in written)
        if not kept and all(tensor.is_meta == written[0].is_meta or not tensor.dim() for tensor in inputs):
            return func(*args, **keywords)
        returns = len(func._schema.returns)
        return None if not returns else written[0] if returns == 1 else tuple(written)

    def _run(self, func: OpOverload[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], touched: frozenset[int]) -> object:
        """Run an operator for its shapes. If one tensor has no bytes, no other tensor keeps its bytes, except indices."""
        inputs = _tensors((args, keywords))
        if any(tensor.is_meta for tensor in inputs):
            if "device" in keywords and func._schema.name == "aten::_to_copy":
                keywords |= {"device": torch.device("meta"), "non_blocking": False}
                keywords.pop("pin_memory", None)
            if not func._schema.name.startswith("aten::index") and not all(tensor.is_meta for tensor in inputs):
                args, keywords = tree_map(_without_bytes, (args, keywords))
        try:
            return func(*args, **keywords)
        except Exception:  # any operator may raise anything: record which one, and raise again
            self.stuck = (func._schema.name.removeprefix("aten::"), touched)
            raise

    def _made(
        self,
        name: str,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        result: object,
        touched: frozenset[int],
        inputs: list[torch.Tensor],
    ) -> None:
        """Record the new tensors that an operator returned."""
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in before]
        copies = COPYING.get(name)
        pairs = copies(result, *args, **keywords) if copies is not None and new else None
        if pairs is not None:
            for target, source in pairs:
                self.copy(target, source)
            return
        for tensor in new:
            if tensor.numel():
                reason = f"it goes through {name.strip('_')}"
                self._own(tensor).pieces.append(_mixed(map_of(tensor).swapped(), tensor.element_size(), touched, reason))


def _mixed(mapping: AffineMap, itemsize: int, touched: frozenset[int], reason: str) -> Piece:
    """Mixed piece at all targets of ``map``."""
    return Piece(mapping.swapped().folded(), itemsize, -1, touched, reason)


def _widened(mapping: AffineMap, times: int) -> AffineMap:
    """The map to positions among elements that are ``times`` as large."""
    return AffineMap(mapping.src, mapping.dst * times, tuple((extent, src, dst * times) for extent, src, dst in mapping.dims))


def _union(pieces: Iterable[Piece]) -> frozenset[int]:
    return frozenset[int]().union(*(piece.touched for piece in pieces))


def _overlap(region: AffineMap, old: Piece, itemsize: int) -> int:
    """Number of elements of ``old`` in ``region``; 1, meaning some, if that cannot be determined."""
    if old.itemsize != itemsize:
        return 1
    try:
        return sum(part.size for part in compose(region, old.map, itemsize))
    except Irregular:
        return 1


def _without_bytes(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta and value.dim():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _written(func: OpOverload[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[torch.Tensor]:
    named = [
        args[place] if place < len(args) else keywords.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(named)


def _plausible(name: str, args: tuple[Any, ...]) -> bool | int | float:
    """Return an arbitrary answer so that the loader continues. The tensor is already marked as changed."""
    if name != "_local_scalar_dense":
        return True
    return torch.ones((), dtype=args[0].dtype).item()


class ValueReads(TorchFunctionMode):
    """Intercepts reads of values that are not operators: marks the tensor as changed and returns ones."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Answer ``tolist`` and ``numpy`` for tensors without bytes."""
        del types
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__) and args[0].is_meta:
            self._recorder.change(self._recorder.touched([args[0]]), f"the loader reads its values ({func.__name__})")
            args = (torch.ones(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **(kwargs or {}))
