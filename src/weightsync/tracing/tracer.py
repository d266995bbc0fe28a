"""Loader tracing: find where an engine puts checkpoint elements by running its loader once on tensors without bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from weightsync.errors import LayoutError, LoadError, WeightSyncError, few
from weightsync.model import Box, Manifest
from weightsync.model.layout import padded_boxes
from weightsync.planning.box_index import BoxIndex
from weightsync.tensors.shards import Shard, torch_dtype
from weightsync.tracing.affine_map import AffineMap, Irregular, boxes, compose, contiguous
from weightsync.tracing.recorder import Piece, Recorder, ValueReads, map_of

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's weight loader. It takes checkpoint tensors by name and may consume the iterable in any number of steps."""

Parameters = nn.Module | Mapping[str, torch.Tensor]
"""Parameters by name. Those of a module, and its buffers, are looked up again after the load, as some loaders replace them."""

_MOST_BOXES = 4096
_SHOWN = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracedCopy:
    """Elements of one box of a checkpoint tensor, and where they lie in a parameter.

    ``offset`` and ``strides`` (one for each dimension of the box) count elements of the parameter in C order, whatever its memory
    layout.
    """

    tensor: int
    box: Box
    parameter: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Seen:
    """A parameter of the traced instance, with all of its names. ``dtype`` is the checkpoint's where the loader converts."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Traced:
    """Result of :func:`trace_loader`: what a loader does with a checkpoint.

    ==============  =========================================================================================================
    attribute       meaning
    ==============  =========================================================================================================
    ``copies``      all plain copies, by tensor
    ``fallback``    tensors that the loader transforms, and how; only the loader can deliver them
    ``unused``      tensors of which nothing reached a parameter, and why
    ``partial``     tensors that reached a parameter in part, and how many elements did; the rest is on other ranks or dropped
    ``unwritten``   parameters that the checkpoint does not fill, and how many elements are left, without the ``padding`` of
                    :func:`trace_loader`; never written directly
    ==============  =========================================================================================================
    """

    manifest: Manifest
    copies: tuple[TracedCopy, ...]
    fallback: dict[str, str]
    unused: dict[str, str]
    partial: dict[str, int]
    unwritten: dict[str, int]
    parameters: tuple[_Seen, ...]

    def reason(self, ranks: int = 1) -> str | None:
        """Return the reason on one line why direct delivery is impossible; ``None`` if it is possible.

        With several ranks a tensor may be on another rank. This rank cannot know that, so the coordinator checks all layouts
        together and refuses a hole before it pauses anything.
        """
        if self.fallback:
            return f"the loader does more than copy {_some(self.fallback)}"
        if not self.copies:
            return "the loader copied nothing to any parameter"
        if ranks == 1 and self.unused:
            return f"the loader has no place for {_some(self.unused)}"
        if ranks == 1 and self.partial:
            return f"the loader takes only a part of {_some(self.partial)}"
        return None

    def wanted(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the memory that the copies go to, by each name of each parameter with copies."""
        used = {copy.parameter for copy in self.copies}
        return {name: (seen.shape, seen.dtype) for seen in self.parameters if seen.names[0] in used for name in seen.names}

    def layers(self, names: set[str]) -> set[str]:
        """Return the layers whose parameters hold elements of these tensors."""
        return {copy.parameter.rpartition(".")[0] for copy in self.copies if self.manifest[copy.tensor].name in names}

    def shards(self, parameters: Parameters) -> list[Shard]:
        """Return the plain copies as shards over the memory of the serving engine's ``parameters``.

        Tensors in ``fallback`` are left out.

        Args:
            parameters: Parameters with the traced instance's names, shapes and dtypes. Strides may differ.

        Raises:
            LayoutError: A parameter differs. The message names the first one.
        """
        real = _named(parameters)
        used = {copy.parameter for copy in self.copies}
        targets = {seen.names[0]: self._memories(seen, real) for seen in self.parameters if seen.names[0] in used}
        traced: list[Shard] = []
        for copy in self.copies:
            spec = self.manifest[copy.tensor]
            for memory in targets[copy.parameter]:
                if memory.dtype.itemsize != torch_dtype(spec.dtype).itemsize:
                    raise LayoutError(
                        f"parameter {copy.parameter} is {memory.dtype}, but {spec.name} is {spec.dtype}: element sizes differ"
                    )
                view = memory.view(torch_dtype(spec.dtype))
                for box, tensor in _placed(copy, spec.shape, view):
                    traced.append(Shard(spec.name, spec.shape, box, tensor))
        return traced

    def _memories(self, seen: _Seen, real: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameter's memory: several tensors if its names share memory only in the traced instance."""
        different: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        for name in seen.names:
            tensor = real.get(name)
            if tensor is None:
                raise LayoutError(f"the engine has no parameter {name}, but the traced loader filled it")
            if tuple(tensor.shape) != seen.shape or tensor.dtype != seen.dtype:
                raise LayoutError(
                    f"parameter {name} is {tensor.dtype}{list(tensor.shape)}, but {seen.dtype}{list(seen.shape)} was traced: "
                    "the engine changed it after loading"
                )
            if tensor.layout is not torch.strided or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):  # such as a DTensor
                raise LayoutError(f"parameter {name} has no plain memory of its own ({type(tensor).__name__} on {tensor.device})")
            different.setdefault((tensor.data_ptr(), tensor.stride()), tensor.detach())
        return list(different.values())


def trace_loader(
    load: Load,
    parameters: Parameters,
    manifest: Manifest,
    *,
    max_boxes: int = _MOST_BOXES,
    padding: Mapping[str, Sequence[slice]] | None = None,
    converts: bool = False,
) -> Traced:
    """Run ``load`` on a meta tensor for every tensor of ``manifest``, and follow each to the ``parameters`` that it reaches.

    What happens to a tensor depends on how the loader uses it:

    * Views of any kind are followed at no cost.
    * Copies of copies (``clone``, ``contiguous``, ``to`` a device, ``cat``, ``stack``, ``pad``, ``repeat``, rows by an index), the
      loader's own buffers and parameters that it replaces are followed.
    * Arithmetic, conversion, reads of values, overwritten elements, or more than ``max_boxes`` boxes put the tensor into
      ``fallback``.
    * Work in other threads is not seen: it shows as unused and unwritten.

    The result is deterministic.

    Args:
        load: The loader.
        parameters: Those that ``load`` fills: of an instance on the meta device, of a second instance, or of the serving engine
            itself. Their bytes are never written, but a loader that replaces parameters would leave meta tensors in a serving
            engine.
        manifest: The checkpoint.
        max_boxes: Most boxes of one tensor.
        padding: Rows of parameters, by name, for which no checkpoint has elements. They do not count as ``unwritten``.
        converts: Whether a conversion to float32 that is exact (from E8M0, bfloat16 or float16) counts as a copy. Then shards of
            such a parameter have the checkpoint's dtype (:meth:`Traced.wanted`), and the caller converts what was written there.

    Raises:
        LoadError: ``load`` raised. The message names the last tensor that it was given.
    """
    recorder = Recorder(converts=converts)
    for name, tensor in _named(parameters).items():
        recorder.parameter(name, tensor)
    requested: list[str] = []
    made = [torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta") for spec in manifest]

    def checkpoint() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (spec, tensor) in enumerate(zip(manifest, made, strict=True)):
            requested.append(spec.name)
            recorder.checkpoint(index, tensor)
            yield spec.name, tensor

    try:
        with torch.no_grad(), recorder, ValueReads(recorder):
            load(checkpoint())
    except WeightSyncError:
        raise
    except Exception as error:
        raise LoadError(_raised(recorder, manifest, requested, error)) from error
    return _concluded(recorder, parameters, manifest, set(requested), max_boxes, padding or {})


def _raised(recorder: Recorder, manifest: Manifest, requested: Sequence[str], error: Exception) -> str:
    last = f"after {requested[-1]}" if requested else "before the first tensor"
    stuck = ""
    if recorder.stuck is not None:
        names = few((manifest[index].name for index in sorted(recorder.stuck[1])), _SHOWN)
        stuck = f", in {recorder.stuck[0]}" + (f" of {names}" if names else "")
    return f"the loader raised an error during tracing, {last}{stuck}: {type(error).__name__}: {error}"


def _named(parameters: Parameters) -> dict[str, torch.Tensor]:
    if isinstance(parameters, nn.Module):
        named = dict(parameters.named_parameters(remove_duplicate=False))
        return named | dict(parameters.named_buffers(remove_duplicate=False))
    return dict(parameters)


def _concluded(
    recorder: Recorder,
    given: Parameters,
    manifest: Manifest,
    requested: set[str],
    max_boxes: int,
    padding: Mapping[str, Sequence[slice]],
) -> Traced:
    parameters = _named(given)
    # Buffers that no checkpoint tensor fills (rotary frequencies) belong to the engine alone.
    required = set(dict(given.named_parameters())) if isinstance(given, nn.Module) else set(parameters)
    seen: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in parameters.items():
        identity = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride(), tuple(tensor.shape), tensor.dtype)
        seen.setdefault(identity if tensor.numel() else (name,), []).append(name)
    copies: list[TracedCopy] = []
    unwritten: dict[str, int] = {}
    kinds: list[_Seen] = []
    for names in seen.values():
        name, tensor = names[0], parameters[names[0]]
        filled = 0
        pieces = recorder.pieces_of(tensor, map_of(tensor))
        plain = [torch_dtype(manifest[piece.tensor].dtype) for piece in pieces if piece.tensor >= 0]
        converted = {dtype for dtype in plain if dtype.itemsize != tensor.element_size()}
        kinds.append(_Seen(tuple(names), tuple(tensor.shape), next(iter(converted), tensor.dtype)))
        if converted and len(set(plain)) > 1:
            recorder.change(recorder.touched([tensor]), f"{name} takes it converted, and others as they are")
        for piece in pieces:
            filled += piece.map.size
            if piece.tensor < 0:
                recorder.change(piece.touched, f"{piece.reason} on its way to {name}")
                continue
            try:
                copies += _copies(piece, name, manifest, max_boxes)
            except Irregular:
                recorder.change(piece.touched, f"{name} holds it in more than {max_boxes} boxes")
        spare = next((padding[alias] for alias in names if alias in padding), ())
        left = tensor.numel() - filled - sum(_unfilled(recorder, tensor[rows]) for rows in spare)
        if left > 0 and (filled or name in required):
            unwritten[name] = left
    copies = _checked(recorder, manifest, copies, max_boxes)
    held = _held(manifest, copies)
    fallback = {manifest[index].name: reason for index, reason in sorted(recorder.changed.items())}
    unused = {
        spec.name: "no element of it reached a parameter" if spec.name in requested else "the loader did not read it"
        for index, spec in enumerate(manifest)
        if not held[index] and spec.size and spec.name not in fallback
    }
    partial = {spec.name: int(held[index]) for index, spec in enumerate(manifest) if 0 < held[index] < spec.size}
    return Traced(manifest, tuple(copies), fallback, unused, partial, unwritten, tuple(kinds))


def _unfilled(recorder: Recorder, part: torch.Tensor) -> int:
    return part.numel() - sum(piece.map.size for piece in recorder.pieces_of(part, map_of(part)))


def _copies(piece: Piece, name: str, manifest: Manifest, max_boxes: int) -> list[TracedCopy]:
    size = piece.itemsize
    return [
        TracedCopy(piece.tensor, Box(box.starts, box.stops), name, box.dst // size, tuple(step // size for step in box.steps))
        for box in boxes(piece.map.swapped(), manifest[piece.tensor].shape, size, max_boxes)
    ]


def _checked(recorder: Recorder, manifest: Manifest, copies: list[TracedCopy], max_boxes: int) -> list[TracedCopy]:
    """Drop tensors that need too many boxes, or boxes that overlap without being equal, because a plan cannot hold them."""
    counts = np.bincount([copy.tensor for copy in copies], minlength=len(manifest))
    for index in np.flatnonzero(counts > max_boxes).tolist():
        recorder.change([index], f"parameters hold it in more than {max_boxes} boxes")
    kept = [copy for copy in sorted(copies, key=lambda copy: copy.tensor) if copy.tensor not in recorder.changed]
    if kept:
        recorder.change(_index(manifest, kept).collisions(), "parameters hold parts of it twice, in boxes that overlap but differ")
    return [copy for copy in kept if copy.tensor not in recorder.changed]


def _index(manifest: Manifest, copies: Sequence[TracedCopy]) -> BoxIndex:
    boxes = padded_boxes([copy.box for copy in copies], manifest.dims)
    return BoxIndex(np.array([copy.tensor for copy in copies], np.int64), *boxes)


def _held(manifest: Manifest, copies: Sequence[TracedCopy]) -> list[int]:
    """Number of elements of each tensor that are in a parameter, each counted once."""
    held = [0] * len(manifest)
    for tensor, box in {(copy.tensor, copy.box) for copy in copies}:
        held[tensor] += box.size
    return held


def _placed(copy: TracedCopy, shape: tuple[int, ...], memory: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Boxes of a copy and their memory in the actual parameter: one, unless the parameter's strides split the box."""
    if memory.is_contiguous():
        offset = memory.storage_offset() + copy.offset
        return [(copy.box, memory.as_strided(copy.box.shape, copy.strides, offset))]
    size = memory.element_size()
    steps = contiguous(shape, size)
    first = sum(start * step for start, step in zip(copy.box.starts, steps, strict=True))
    extents = copy.box.shape
    placement = AffineMap(
        copy.offset * size,
        first,
        tuple((extent, stride * size, step) for extent, stride, step in zip(extents, copy.strides, steps, strict=True)),
    )
    try:
        # From the checkpoint's positions to those in this memory.
        maps = compose(placement, map_of(memory).swapped(), size)
        placed = [part for mapping in maps for part in boxes(mapping, shape, size, _MOST_BOXES)]
    except Irregular:
        raise LayoutError(f"parameter {copy.parameter} is strided in memory so that filling it takes too many boxes") from None
    return [
        (box := Box(part.starts, part.stops), memory.as_strided(box.shape, [step // size for step in part.steps], part.dst // size))
        for part in placed
    ]


def _some(reasons: Mapping[str, object]) -> str:
    listed = [f"{name} ({reason})" if isinstance(reason, str) else name for name, reason in reasons.items()]
    return few(listed, _SHOWN, "; ")


class ShardsByTracing:
    """Tracing for an adapter: traces the loader once, when shards are first requested.

    ``load`` and ``twin`` are passed to :func:`trace_loader`. ``ranks`` is the number of ranks of the replica
    (:meth:`Traced.reason`).
    """

    def __init__(self, load: Load, twin: Parameters, manifest: Manifest, *, ranks: int = 1) -> None:
        self.reason: str | None = None
        """Reason why :meth:`of` last returned ``None``."""
        self.traced: Traced | None = None
        self._load, self._twin, self._manifest, self._ranks = load, twin, manifest, ranks
        self._failed: str | None = None

    def of(self, parameters: Parameters) -> list[Shard] | None:
        """Return shards over ``parameters``, as an adapter's ``shards()`` does, or ``None`` to stream. Logs a new reason."""
        before, self.reason = self.reason, None
        try:
            if self.traced is None and self._failed is None:
                self.traced = trace_loader(self._load, self._twin, self._manifest)
            if self.traced is not None:
                self.reason = self.traced.reason(self._ranks)
                if self.reason is None:
                    return self.traced.shards(parameters)
        except LoadError as error:
            self._failed = str(error)
        except LayoutError as error:
            self.reason = str(error)
        self.reason = self.reason or self._failed
        if self.reason != before:
            _log.warning("weights are streamed through the engine's loader: %s", self.reason)
        return None
