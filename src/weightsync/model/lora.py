"""LoRA adapters as plain data: names, labels, configuration, and the pairs of matrices that a manifest lists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Annotated, Literal, NamedTuple

import msgspec

from weightsync.errors import ConfigurationError, VersionError, few
from weightsync.model.manifest import MAX_NAME, Manifest, TensorSpec
from weightsync.model.version import Version

PREFIX = "base_model.model."
"""Begins the name of every tensor of an adapter, as in the files that PEFT writes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
MAX_FACTOR = 1e9
"""The largest alpha, and scaling of a module."""
_MATRIX = 2  # dimensions
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_SHOWN = 3

_Module = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Factor = Annotated[float, msgspec.Meta(ge=-MAX_FACTOR, le=MAX_FACTOR)]


class LoraSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many versions of adapters an engine rank can hold, and their largest rank."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    max_rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What belongs to an adapter besides its matrices."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    """The largest rank of its modules."""
    alpha: _Factor
    rslora: bool = False
    """Whether the scaling is ``alpha / sqrt(rank)`` instead of ``alpha / rank``."""
    dora: bool = False
    scalings: Annotated[dict[_Module, _Factor], msgspec.Meta(max_length=1 << 17)] = {}
    """Scalings of modules that have another one than ``rank`` and ``alpha`` give."""

    def scaling(self, module: str) -> float:
        """Factor of ``B @ A`` in ``module``."""
        return self.scalings.get(module, self.alpha / (self.rank**0.5 if self.rslora else self.rank))


class AdapterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is published: its name, its configuration, and the base weights for which it was trained."""

    name: Annotated[str, msgspec.Meta(max_length=129)]
    config: LoraConfig
    base: Version | None = None
    """With its digest. ``None``: weights that weightsync did not deliver."""
    on_base_update: Literal["keep", "refuse"] = "keep"
    """Whether its versions are still served when the engine has other base weights."""


class LoraModule(NamedTuple):
    """A module of the model that an adapter changes: by ``b @ a``."""

    name: str
    a: TensorSpec
    b: TensorSpec

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return self.a.shape[0]


def check_adapter_name(name: str) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` unless ``name`` is ``owner/name``."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"an adapter's name is owner/name, each 1 to 64 letters, digits, '.', '_' or '-' and beginning with a letter or digit, "
            f"not {str(name)[:140]!r}"
        )


def adapter_label(name: str, number: int) -> str:
    """Return the label of a version: ``alice/math@3``."""
    return f"{name}@{number}"


def check_extents(adapter: str, module: LoraModule, output: int, inputs: int, most: int) -> None:
    """Raise ConfigurationError unless ``module`` changes a layer of ``inputs`` and ``output``, by a rank of at most ``most``.

    Engines would copy smaller matrices into a part of the layer.
    """
    if (module.b.shape[0], module.a.shape[1]) != (output, inputs) or module.rank > most:
        raise ConfigurationError(
            f"{adapter} changes {module.name} by matrices of {module.b.shape} and {module.a.shape}; in this engine it is "
            f"{output} x {inputs}, and ranks are at most {most}"
        )


def newest_label(adapter: str, labels: Iterable[str]) -> str | None:
    """Return the one of ``labels`` that ``adapter`` is, or the newest version of that name; ``None`` if there is neither."""
    versions = [(int(number), label) for label in labels for name, _, number in [label.rpartition("@")] if adapter in (name, label)]
    return max(versions)[1] if versions else None


def served_label(adapter: str, labels: Collection[str]) -> str:
    """Return :func:`newest_label`.

    Raises:
        VersionError: There is none. The message names versions under the same name only: others are other tenants'.
    """
    label = newest_label(adapter, labels)
    if label is None:
        name = adapter.partition("@")[0]
        versions = few(sorted(label for label in labels if label.startswith(f"{name}@")))
        raise VersionError(f"this engine does not serve {adapter}; it serves {versions or f'no version of {name}'}")
    return label


def lora_modules(manifest: Manifest) -> list[LoraModule]:
    """Return the modules of the adapter whose tensors ``manifest`` lists.

    Raises:
        ConfigurationError: A tensor is none of LoRA's matrices, is quantized, lacks its counterpart, or their shapes do not fit.
    """
    pairs: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for spec in manifest:
        match = _TENSOR.fullmatch(spec.name)
        if match is None:
            raise ConfigurationError(
                f"{spec.name!r} is no tensor of a LoRA adapter: names are {PREFIX}MODULE.lora_A.weight and .lora_B.weight. DoRA's "
                "magnitudes, biases and modules_to_save cannot be published as part of an adapter"
            )
        if spec.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{spec.name} is {spec.dtype}, and engines take {', '.join(_DTYPES)}: give Adapters(dtype=torch.bfloat16)"
            )
        pairs[match[1]][match[2]] = spec
    broken = [
        module
        for module, pair in pairs.items()
        if len(pair) != len("AB")
        or any(len(spec.shape) != _MATRIX for spec in pair.values())
        or not 0 < pair["A"].shape[0] == pair["B"].shape[1]
    ]
    if broken or not pairs:
        what = ", ".join(broken[:_SHOWN]) or "no module"
        raise ConfigurationError(f"an adapter needs for each module a matrix A of rank x in and a matrix B of out x rank: {what}")
    return [LoraModule(module, pair["A"], pair["B"]) for module, pair in pairs.items()]
