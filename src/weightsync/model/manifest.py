"""Manifest of a checkpoint: names, global shapes, dtypes, ties. Both ends compare it before any byte moves."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Annotated

import msgspec
import numpy as np

from weightsync.arrays import Int64
from weightsync.errors import ConfigurationError, ManifestMismatch
from weightsync.model.dtypes import itemsize

MAX_BYTES = 1 << 60
"""Most bytes of a model, a tensor or a region. Real ones are far smaller; the bound prevents overflow by forged ones."""
_MAX_RANK = 16
MAX_NAME = 1024
"""Most characters of a tensor's name."""
_EXAMPLES = 3  # names in a line
_CONVERTIBLE = frozenset({"float16", "bfloat16", "float32", "float64"})
_SHOWN = 10
_ASTRAY = 5  # names in a message


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One checkpoint tensor: Hugging Face name, global shape in elements, dtype by torch's name, and the names tied to it.

    ``name`` is the tied name that this rank's loader or module uses. Another rank may use another one.
    """

    name: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_RANK)]
    dtype: str
    aliases: Annotated[tuple[str, ...], msgspec.Meta(max_length=1024)] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names in natural order. Equal on every rank that ties the same names."""
        return tuple(sorted((self.name, *self.aliases), key=_order)) if self.aliases else (self.name,)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * itemsize(self.dtype)


def _order(name: str) -> tuple[tuple[tuple[int, int | str], ...], str]:
    """Sort key that puts ``layers.2`` before ``layers.10``, so that layers are in order whatever the order of the state dict."""
    parts = (part for part in re.split(r"([0-9]+)", name) if part)
    return tuple((0, int(part)) if "0" <= part[0] <= "9" else (1, part) for part in parts), name


class Manifest:
    """Tensors of one model in their canonical order, with a fingerprint. Immutable.

    The order is natural by name (``layers.2`` before ``layers.10``), by the first of tied names. So trainer and engine agree on it
    without communication, and a tensor's index means the same everywhere. Manifests are equal if they hold the same tensors,
    whichever of the tied names is first in each.

    Raises:
        ConfigurationError: A name is a duplicate (aliases included) or unprintable, an extent is negative, a dtype is unknown, or a
            tensor has more than 16 dimensions or an impossible size.
    """

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        ordered = [msgspec.structs.replace(spec, aliases=tuple(sorted(spec.aliases))) for spec in tensors]
        seen: set[str] = set()
        total = 0
        for spec in ordered:
            possible = len(spec.shape) <= _MAX_RANK and all(0 <= extent <= MAX_BYTES for extent in spec.shape)
            total += spec.nbytes if possible else 0
            if not possible or total > MAX_BYTES:
                raise ConfigurationError(f"tensor {spec.name[:MAX_NAME]!r} has an impossible shape {spec.shape[:_MAX_RANK]}")
            for name in (spec.name, *spec.aliases):
                if not 0 < len(name) <= MAX_NAME or not name.isprintable():
                    raise ConfigurationError(f"a tensor name must have 1 to {MAX_NAME} printable characters, not {name[:80]!r}")
                if name in seen:
                    raise ConfigurationError(f"tensor name {name!r} occurs twice in the manifest")
                seen.add(name)
        ordered.sort(key=lambda spec: _order(spec.names[0]))
        self.tensors: tuple[TensorSpec, ...] = tuple(ordered)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __getitem__(self, index: int) -> TensorSpec:
        return self.tensors[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"<Manifest of {len(self)} tensors, {self.nbytes:,} bytes, {self.fingerprint}>"

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits (BLAKE2b-128) over names, shapes, dtypes and ties, in canonical order."""
        tensors = [(spec.names, spec.shape, spec.dtype) for spec in self.tensors]
        return hashlib.blake2b(msgspec.msgpack.encode(tensors), digest_size=16).hexdigest()

    @cached_property
    def index(self) -> dict[str, int]:
        """Index of each tensor by name. An alias maps to the tensor to which it is tied."""
        return {name: i for i, spec in enumerate(self.tensors) for name in (spec.name, *spec.aliases)}

    @cached_property
    def dims(self) -> int:
        """Number of columns of a layout: the largest number of dimensions, and at least one."""
        return max([1, *(len(spec.shape) for spec in self.tensors)])

    @cached_property
    def shapes(self) -> Int64:
        """Global shapes, ``int64[tensors, dims]``, padded with ones in front (a scalar is all ones)."""
        shapes = np.ones((len(self), self.dims), np.int64)
        for row, spec in zip(shapes, self.tensors, strict=True):
            if spec.shape:
                row[-len(spec.shape) :] = spec.shape
        return shapes

    @cached_property
    def itemsizes(self) -> Int64:
        """Bytes of an element, ``int64[tensors]``."""
        return np.array([itemsize(spec.dtype) for spec in self.tensors], np.int64)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, each tied group counted once."""
        return sum(spec.nbytes for spec in self.tensors)

    def check_same(self, engine: Manifest, who: str = "the engine") -> None:
        """Check that ``engine`` is the same manifest.

        Args:
            engine: The other manifest.
            who: Subject of the error message.

        Raises:
            ManifestMismatch: It differs. The message lists at most ten differences, and their number.
        """
        if self.fingerprint == engine.fingerprint:
            return
        ours = {spec.names[0]: spec for spec in self.tensors}
        theirs = {spec.names[0]: spec for spec in engine.tensors}
        lines = [f"missing: {name}" for name in ours if name not in theirs]
        lines += [f"unexpected: {name}" for name in theirs if name not in ours]
        dtypes: dict[tuple[str, str], list[str]] = {}
        for name, spec in ours.items():
            other = theirs.get(name)
            if other is None:
                continue
            if spec.shape != other.shape:
                lines.append(f"shape of {name}: {list(other.shape)} instead of {list(spec.shape)}")
            if spec.dtype != other.dtype:
                dtypes.setdefault((spec.dtype, other.dtype), []).append(name)
            if spec.names != other.names:
                lines.append(f"tied names of {name}: {list(other.names[1:])} instead of {list(spec.names[1:])}")
        count = len(lines) + sum(map(len, dtypes.values()))
        shown = [_dtype_line(*pair, names) for pair, names in dtypes.items()][:_SHOWN]
        shown += lines[: _SHOWN - len(shown)]
        more = len(dtypes) + len(lines) - len(shown)
        text = "\n  ".join(shown) + (f"\n  ... and {more} more" if more else "")
        text += _remedy(dtypes, ours, theirs)
        raise ManifestMismatch(
            f"{who} does not hold the trainer's tensors; {count} difference{'s' if count > 1 else ''}:\n  {text}"
        )


def join_manifests(main: Manifest, draft: Manifest | None, prefix: str) -> Manifest:
    """Join the manifests of a main model and of its draft model, whose names begin with ``prefix``.

    Raises :class:`~weightsync.errors.ConfigurationError` where the rule would send a tensor to the wrong model.
    """
    if draft is None:
        return main
    astray = [spec.name for spec in main for name in (spec.name, *spec.aliases) if name.startswith(prefix)]
    astray += [spec.name for spec in draft for name in (spec.name, *spec.aliases) if not name.startswith(prefix)]
    if astray or not prefix:
        names = ", ".join(name[:200] for name in astray[:_ASTRAY])
        raise ConfigurationError(
            f"names that begin with {prefix!r} must be the draft model's, and only they; {len(astray)} are not: {names}"
        )
    return Manifest([*main, *draft])


def _dtype_line(published: str, held: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"dtype of {names[0]}: {held} instead of {published}"
    examples = ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
    return f"{len(names)} tensors have dtype {held} instead of {published} ({examples})"


def _remedy(
    dtypes: Mapping[tuple[str, str], Sequence[str]], ours: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]
) -> str:
    """Suggest the trainer's ``dtype`` argument that publishes what the engine holds, if a conversion is all that is needed."""
    if not dtypes or not all(ours_dtype in _CONVERTIBLE and their_dtype in _CONVERTIBLE for ours_dtype, their_dtype in dtypes):
        return ""
    # A single dtype converts every floating-point tensor, so it fits only an engine that holds all of them in that dtype.
    wanted = {theirs[name].dtype for name, spec in ours.items() if spec.dtype in _CONVERTIBLE and name in theirs}
    if len(wanted) == 1:
        return f"\nto publish what the engine holds, use Trainer(..., dtype=torch.{wanted.pop()})"
    (_, their_dtype), names = next(iter(dtypes.items()))
    return (
        f"\nto publish what the engine holds, pass dtypes by name: Trainer(..., dtype={{{names[0]!r}: torch.{their_dtype}, ...}})"
    )
