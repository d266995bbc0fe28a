"""Formats of a model that is served: by its Hugging Face ``quantization_config``, or by the tensors that its engine holds."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigurationError, few
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.formats import FORMATS, REFUSED, Format, format_of
from weightsync.tensors.quantization import ChooseFormats, formats_by_pattern

_LINEAR, _WEIGHT = "Linear", ".weight"
_NOT_LINEAR = re.compile(r"(.*\.)?((\w+_)?embed\w*|wte|wpe|router|gate|shared_expert_gate)")
"""Modules with a matrix that engines do not count as linear layers: embeddings, and routers of experts."""
_CLASS = re.compile(r"[A-Z]\w*")
_FLOAT8 = ("float-quantized", "naive-quantized")
_SCHEMES: Mapping[tuple[object, ...], tuple[str, tuple[str, ...]]] = {
    ("float", 8, "channel", None): ("fp8-channel", _FLOAT8),
    ("float", 8, "tensor", None): ("fp8-tensor", _FLOAT8),
    ("float", 8, "block", (128, 128)): ("fp8-block-compressed", _FLOAT8),
    ("float", 8, "group", 32): ("mxfp8", ("mxfp8-quantized",)),
    ("float", 4, "group", 32): ("mxfp4", ("mxfp4-pack-quantized",)),
    ("float", 4, "tensor_group", 16): ("nvfp4", ("nvfp4-pack-quantized",)),
    ("int", 4, "group", 32): ("int4-group32", ("pack-quantized",)),
    ("int", 4, "group", 128): ("int4-group128", ("pack-quantized",)),
}
"""Formats by a group's type, bits, strategy and block, and the names under which compressed-tensors stores them."""
_log = logging.getLogger(__name__)

Quantize = Mapping[str, Any] | str | os.PathLike[str]
_Rule = tuple[Callable[[str], bool], str | None]
"""Whether it holds for a module, and the format of the module's matrix; ``None`` leaves it as it is."""


def choose_formats(quantize: Quantize) -> ChooseFormats:
    """Return how ``quantize`` chooses: a mapping of patterns, a ``quantization_config``, or the folder of a checkpoint with one.

    Raises:
        ConfigurationError: The folder has no ``config.json`` with a ``quantization_config``.
    """
    chosen: Any = quantize
    if isinstance(quantize, str | os.PathLike):
        path = Path(quantize, "config.json")
        try:
            config = json.loads(path.read_bytes())
            chosen = ((config.get("text_config") or {}) | config)["quantization_config"]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"quantize={str(quantize)!r} is neither 'as-served' nor the folder of a quantized checkpoint: {path} holds no "
                f"quantization_config ({type(error).__name__}: {error}). Formats go with patterns: {{'*_proj.weight': 'fp8-block'}}"
            ) from None
    if isinstance(chosen, Mapping) and "quant_method" in chosen:
        return partial(formats_of_config, config=chosen)
    return partial(formats_by_pattern, patterns=chosen)


def formats_of_config(manifest: Manifest, config: Mapping[str, Any], *, whole: bool = True) -> dict[str, Format]:
    """Return the format of each matrix that a Hugging Face ``quantization_config`` quantizes, by name.

    The module of ``X.weight`` is ``X``. The class ``Linear`` stands for every module with a matrix that is no embedding or router.

    Args:
        manifest: The tensors before quantizing.
        config: As in ``config.json``.
        whole: Whether these are all tensors.

    Raises:
        ConfigurationError: No format fits the method or a field, which is named with its group; a field is missing; nothing is
            quantized; or a matrix cannot be.
    """
    method = config["quant_method"]
    if not isinstance(method, str) or method not in _RULES:
        why = "its scales depend on more than the weights" if str(method).startswith(REFUSED) else "no format is its"
        raise ConfigurationError(
            f"a trainer cannot write quant_method {method!r}: {why}. Configurations of {' and '.join(_RULES)} are read; for others "
            f"map patterns to formats: {', '.join(FORMATS)}"
        )
    try:
        rules = _RULES[method](config)
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError, re.error) as error:
        raise ConfigurationError(f"the quantization_config ({method}) is malformed: {type(error).__name__}: {error}") from None
    formats = dict[str, Format]()
    for spec in manifest:
        if len(spec.shape) == 2 and spec.name.endswith(_WEIGHT):
            modules = [name.removesuffix(_WEIGHT) for name in spec.names]
            names = modules if any(map(_NOT_LINEAR.fullmatch, modules)) else [*modules, _LINEAR]
            chosen = next((name for holds, name in rules if any(map(holds, names))), None)
            if chosen is not None:
                formats[spec.name] = format_of(chosen)
                formats[spec.name].check(spec)
    if not formats and whole:
        raise ConfigurationError(f"the quantization_config ({method}) quantizes none of this trainer's {len(manifest)} tensors")
    return formats


def _fp8_rules(config: Mapping[str, Any]) -> list[_Rule]:
    """Rules of ``fp8``, as Transformers and vLLM read it: blocks of 128 x 128, never the head."""
    block, scales = config.get("weight_block_size"), config.get("scale_fmt") or "float"
    _require("quantization_config", "weight_block_size", block and list(block), [128, 128])
    _require("quantization_config", "scale_fmt", scales, "float", "ue8m0")
    _require("quantization_config", "fmt", config.get("fmt"), "e4m3", None)
    _require("quantization_config", "expert_dtype", config.get("expert_dtype"), "fp8", None)
    _require("quantization_config", "modules_to_convert", config.get("modules_to_convert") or None, None)
    kept = config.get("modules_to_not_convert") or config.get("ignored_layers") or []
    _require("quantization_config", "ignored_layers", config.get("ignored_layers") or kept, kept)  # the other name of the same
    return [
        (_matching(kept, around=True), None),
        (_matching(["lm_head"], around=True), None),
        (_matching([_LINEAR]), "fp8-block" if scales == "float" else "fp8-block-e8m0"),
    ]


def _compressed_rules(config: Mapping[str, Any]) -> list[_Rule]:
    """Rules of compressed-tensors. A name goes before a class."""
    _require("quantization_config", "sparsity_config", (config.get("sparsity_config") or {}).get("format"), "dense", None)
    _require("quantization_config", "transform_config", config.get("transform_config") or None, None)
    named, of_class = list[_Rule](), list[_Rule]()
    for name, group in config["config_groups"].items():
        targets = group["targets"]
        if (weights := group.get("weights")) is not None:
            chosen = _format_of_group(name, weights, group.get("format") or config.get("format"))
            for target in filter(_CLASS.fullmatch, targets):
                _require(name, "targets", target, _LINEAR)
            named.append((_matching([target for target in targets if target != _LINEAR]), chosen))
            of_class.append((_matching([target for target in targets if target == _LINEAR]), chosen))
    return [(_matching(config.get("ignore") or []), None), *named, *of_class]


def _format_of_group(group: str, weights: Mapping[str, Any], stored: str | None) -> str:
    _require(group, "symmetric", weights.get("symmetric"), True, None)
    _require(group, "dynamic", weights.get("dynamic"), False, None)
    _require(group, "actorder", weights.get("actorder"), "weight", "static", False, None)  # these leave the columns in order
    size, block = weights.get("group_size"), weights.get("block_structure")
    block = [128, 128] if block == "128x128" else block  # of early releases
    extent = tuple(block) if block else size if size and size > 0 else None
    strategy = weights.get("strategy") or ("group" if extent else "channel" if size else "tensor")
    scheme = weights.get("type", "int"), weights.get("num_bits", 8), strategy, extent
    if scheme not in _SCHEMES:
        raise ConfigurationError(
            f"no format has the weights of {group}, with type, num_bits, strategy and group_size or block_structure "
            f"{', '.join(map(str, scheme))}; formats: {', '.join(FORMATS)}"
        )
    chosen, storages = _SCHEMES[scheme]
    _require(group, "format", stored, *storages, "mixed-precision", None)
    return chosen


def _require(where: str, field: str, value: object, *served: object) -> None:
    """Raise ``ConfigurationError`` unless a field of the configuration or of a group has a value that a trainer can serve."""
    if value not in served:
        raise ConfigurationError(
            f"a trainer cannot write what {field} of {where} says, {value!r}; it can for {' or '.join(map(repr, served))}"
        )


def _matching(targets: Collection[str], *, around: bool = False) -> Callable[[str], bool]:
    """Return whether a module has one of these names, or a regular expression (``re:``) matches the start of its name.

    ``around`` takes in the modules within those of a name, and names that lack their beginning.
    """
    if not isinstance(targets, list | tuple):
        raise TypeError(f"a list of modules is wanted, not {targets!r}")
    names = {target for target in targets if not target.startswith("re:")}
    patterns = [re.compile(target.removeprefix("re:")) for target in targets if target.startswith("re:")]

    def matches(module: str) -> bool:
        parts = module.split(".") if around else []
        cut = [".".join(part) for number in range(len(parts)) for part in (parts[:number], parts[number:])]
        return not names.isdisjoint([module, *cut]) or any(pattern.match(module) for pattern in patterns)

    return matches


_RULES: Mapping[str, Callable[[Mapping[str, Any]], list[_Rule]]] = {"fp8": _fp8_rules, "compressed-tensors": _compressed_rules}


def formats_as_served(manifest: Manifest, replica: str, served: Collection[TensorSpec], *, whole: bool = True) -> dict[str, Format]:
    """Return the format of each matrix that an engine holds quantized, by name.

    Args:
        manifest: The trainer's tensors before quantizing.
        replica: Name of the engine, for messages.
        served: The engine's tensors.
        whole: Whether the manifest has all tensors of the trainer.

    Raises:
        ConfigurationError: The engine holds a matrix in no known format. The message lists its tensors.
    """
    held = {name: (spec.shape, spec.dtype) for spec in served for name in spec.names}
    beside = defaultdict[str, list[str]](list)
    for name, (shape, dtype) in held.items():
        beside[name.rpartition(".")[0]].append(f"{name} ({dtype} {list(shape)})")
    formats = dict[str, Format]()
    for spec in manifest:
        if held.get(spec.name) == (spec.shape, spec.dtype):
            continue
        chosen = next((each for each in FORMATS.values() if _is_held(spec, each, held)), None)
        if chosen is not None:
            formats[spec.name] = chosen
        elif spec.name.endswith(_WEIGHT) and (others := beside[spec.name.removesuffix(_WEIGHT)]):
            raise ConfigurationError(
                f"replica {replica} holds {spec.name} ({spec.dtype} {list(spec.shape)}) in no format that a trainer can write: "
                f"{few(others)}. Formats: {', '.join(FORMATS)}"
            )
    names = ", ".join(sorted({each.name for each in formats.values()})) or "no quantized ones"
    if whole:
        _log.info(
            "%d of %d tensors are published quantized, because replica %s holds %s", len(formats), len(manifest), replica, names
        )
    return formats


def _is_held(spec: TensorSpec, encoding: Format, held: Mapping[str, tuple[tuple[int, ...], str]]) -> bool:
    try:
        encoding.check(spec)
    except ConfigurationError:
        return False
    return all(held.get(part.name) == (part.shape, part.dtype) for part in encoding.specs(spec))
