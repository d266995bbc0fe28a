"""Direct delivery into quantized layers of SGLang, which it changes after loading them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from weightsync.engines.processing import given, load_every, process_layers, restored, tensors_of
from weightsync.errors import LoadError, few
from weightsync.model import Manifest
from weightsync.tensors.shards import bits_of

_log = logging.getLogger(__name__)

_FORMAT = "_weightsync_format"
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant"
_METHODS = ("fp8", "compressed-tensors")
_SCALES_OF_CACHE = ("k_scale", "v_scale", "kv_scale")
_PLAIN = frozenset(vars(nn.Module()))
_DEEP = 4  # objects, or containers, within each other


@dataclass(frozen=True, eq=False)
class _AsMade:
    """A layer as SGLang made it, which is what its loader fills. Its tensors are on the meta device."""

    name: str
    attributes: Mapping[str, Mapping[str, Any]]
    """Those of the layer itself, besides tensors, and of the objects that process it, see :func:`_tables`."""
    parameters: Mapping[str, Any]
    buffers: Mapping[str, Any]


def keep_formats(
    model: nn.Module,
    model_config: Any,  # noqa: ANN401 - SGLang's, as the two below
    load_config: Any,  # noqa: ANN401
    quant_config: Any = None,  # noqa: ANN401
) -> None:
    """Keep what the loader of a quantized ``model`` fills. SGLang calls this when it has made a model, before it loads."""
    if quant_config is None:
        return
    try:
        for name, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is not None and type(method).__module__ != _UNQUANTIZED:
                tensors = [{key: _on_meta(tensor) for key, tensor in held.items()} for held in (layer._parameters, layer._buffers)]
                made = _AsMade(name, {prefix: dict(table) for prefix, table in _tables(layer).items()}, *tensors)
                setattr(layer, _FORMAT, made)
    except Exception:  # noqa: BLE001 - logged; SGLang serves without updates
        _log.exception("weightsync: cannot keep how SGLang made this quantized model")


def _tables(layer: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of ``layer``, of the objects that process it, and of SGLang's objects in these, by their paths."""
    tables = {"": vars(layer)}
    left = [(f"{key}.", getattr(layer, key, None), _DEEP) for key in ("quant_method", "scheme")]
    for prefix, owner, depth in left:  # which grows
        held, ours = getattr(owner, "__dict__", None), depth == _DEEP or type(owner).__module__.startswith("sglang.")
        if not (depth and ours and isinstance(held, dict)) or isinstance(owner, nn.Module | type):
            continue
        if all(held is not table for table in tables.values()):
            tables[prefix] = held
            left += [(f"{prefix}{key}.", value, depth - 1) for key, value in held.items()]
    return tables


def _on_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    made: Any = torch.empty_like(tensor.detach(), device="meta")
    made.__class__, made.__dict__ = tensor.__class__, dict(vars(tensor))
    return made  # type: ignore[no-any-return]


def why_not(runner: Any, arguments: Any) -> str | None:  # noqa: ANN401 - SGLang's
    """Return the reason on one line why this quantized model cannot be updated, as far as settings tell; ``None`` if none does."""
    method = runner.model_config.quantization
    if method not in _METHODS:
        return f"the model is quantized ({method}): only {' and '.join(_METHODS)} are supported. Serve a checkpoint in FP8 blocks"
    if getattr(runner.model_config.hf_config, "quantization_config", None) is None:
        return f"--quantization is {method!r}: SGLang quantizes on loading. Serve a checkpoint that is quantized, or none that is"
    if arguments.enable_lora:
        return f"--enable-lora with a quantized model ({method}) was not tested. Serve it without LoRA"
    if not any(hasattr(layer, _FORMAT) for layer in runner.model.modules()):
        return f"the model is quantized ({method}), and SGLang made it without the plugin of weightsync"
    return None


def scales_of_cache(manifest: Manifest) -> str | None:
    """Return the reason on one line why the scales of cached keys and values, if there are some, cannot be updated."""
    scales = [spec.name for spec in manifest if spec.name.rpartition(".")[2] in _SCALES_OF_CACHE]
    return f"SGLang keeps {few(scales, 3)} as numbers, also in CUDA graphs: serve a checkpoint without them" if scales else None


@contextmanager
def format_to_load(model: nn.Module, *, processes: bool = True) -> Iterator[None]:
    """Give the quantized layers of ``model`` the parameters that its loader expects, on the meta device.

    Unless the block ``processes`` them, it is not asked what SGLang keeps of that.

    Raises:
        LoadError: SGLang computed something else from weights in the block than parameters and buffers.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, _FORMAT)]
    tables: list[Any] = [table for layer in layers for table in (layer._parameters, layer._buffers, *_tables(layer).values())]
    engine = [_values(layer) for layer in layers]
    with restored([vars(model), *tables]):
        vars(model).pop("_cached_params_dict", None)  # some loaders keep the parameters that they first saw
        for layer in layers:
            made: _AsMade = getattr(layer, _FORMAT)
            for prefix, own in _tables(layer).items():
                if (values := made.attributes.get(prefix)) is not None:  # otherwise what holds it is removed
                    for key in own.keys() - values.keys() - _PLAIN - {_FORMAT}:  # processing begins as it did the first time
                        del own[key]
                    own.update({key: value for key, value in values.items() if key not in _PLAIN})
            layer._parameters, layer._buffers = dict(made.parameters), dict(made.buffers)
        before = [_values(layer) for layer in layers]
        yield
        for layer, first, held in zip(layers, before, engine, strict=True):
            now = _values(layer)
            gone = [key for key, value in held.items() if processes and isinstance(value, torch.Tensor) and key not in now]
            others = (
                key for key, value in now.items()
                if value is not first.get(key) and not (_same(value, first.get(key)) or _same(value, held.get(key)))
            )  # fmt: skip
            if (wrong := next(others, gone[0] if gone else None)) is not None:
                name = f"{getattr(layer, _FORMAT).name}.{wrong}"
                raise LoadError(f"SGLang computes {name} from weights, which direct delivery would not update")


def _values(layer: nn.Module) -> dict[str, Any]:
    """Return tensors and plain values at ``layer``, some of which processing may compute, besides the memory of its parameters."""
    tensors = {key: tensor for key, tensor in tensors_of(layer).items() if tensor is not None}
    memories = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if not tensor.is_meta} - {0}
    return {
        name: leaf
        for prefix, table in (_tables(layer) | {f"{key}.": vars(tensor) for key, tensor in tensors.items()}).items()
        for key, value in table.items()
        if key not in _PLAIN and key != _FORMAT
        for name, leaf in _leaves(prefix + key, value, _DEEP)
        if not (isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in memories)
    }


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - SGLang's
    """Yield tensors and plain values in ``value``: also those in containers, partial calls and closures."""
    inside: Iterable[tuple[object, Any]] = ()
    if isinstance(value, torch.Tensor | bool | int | float | str):
        yield name, value
    elif isinstance(value, tuple | list):
        inside = enumerate(value)
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, partial):
        inside = enumerate((value.func, *value.args, *value.keywords.values()))
    elif isinstance(function := value.__func__ if isinstance(value, MethodType) else value, FunctionType):
        inside = _kept_by(function)
    for key, part in inside if depth else ():
        yield from _leaves(f"{name}.{key}", part, depth - 1)


def _kept_by(function: FunctionType) -> Iterator[tuple[object, Any]]:
    """Yield what a function brings along: the variables of its closure, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (first.shape, first.dtype) == (second.shape, second.dtype) and torch.equal(bits_of(first), bits_of(second))
    return type(first) is type(second) and not isinstance(first, torch.Tensor) and first == second


def process(runner: Any, layers: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: ANN401 - SGLang's
    """Process ``layers`` as SGLang does after it loaded them, from what is in ``tensors``, into the memory that they have.

    Raises:
        LoadError: A parameter that a layer is processed from is not among ``tensors``, or the result has another form.
    """
    with _dtype_of(runner):
        for name in layers:
            process_layers(runner.model, [name], format_to_load, given(tensors))


def reload(runner: Any, tensors: Iterable[tuple[str, torch.Tensor]], layers: Collection[str]) -> None:  # noqa: ANN401 - SGLang's
    """Load some whole ``layers`` as SGLang does at its start: into new parameters, which it processes. They replace no others.

    SGLang's own updates process all layers again, and load into what it processed the first time.

    Raises:
        LoadError: The loader left tensors, or computes something from weights besides parameters and buffers.
        Exception: The loader raised it.
    """
    model = runner.model
    device = next(model.parameters()).device
    plain = [layer for name in layers if not hasattr(layer := model.get_submodule(name), _FORMAT)]

    def load() -> None:
        for layer in plain:
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "restore_weights_before_loading"):
                method.restore_weights_before_loading(layer)
        load_every(model, tensors, "SGLang")

    with torch.no_grad(), _dtype_of(runner), restored([vars(model)]):
        vars(model).pop("_cached_params_dict", None)
        process_layers(model, layers, format_to_load, lambda name, wanted: torch.empty_like(wanted, device=device), load=load)


def _dtype_of(runner: Any) -> Any:  # noqa: ANN401 - SGLang's
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    return set_default_torch_dtype(runner.model_config.dtype)
