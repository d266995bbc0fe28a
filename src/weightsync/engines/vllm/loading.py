"""Loading of whole checkpoint tensors into a running vLLM model, through vLLM's loader and its layerwise reload."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from weightsync.engines import processing
from weightsync.errors import LoadError, few

_REQUANTIZED = 1 << 25  # elements at a time; vLLM takes about 20 bytes for each
_E4M3_224, _E4M3_448 = 0x76, 0x7E

ModelConfig: TypeAlias = Any
"""``vllm.config.ModelConfig``. Its ``quantization`` is ``None`` if the model is not quantized."""

_unfilled: WeakKeyDictionary[torch.nn.Module, dict[str, int]] = WeakKeyDictionary()
"""The layers of a model that a whole checkpoint does not fill (they are padded), and how many elements they get."""
_written: WeakKeyDictionary[torch.nn.Module, list[tuple[int, int]]] = WeakKeyDictionary()
"""Marks of a model's parameters after :func:`install` wrote them."""


def install(
    model: torch.nn.Module,
    model_config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    whole: bool = True,
    as_whole: bool = False,
) -> None:
    """Load the tensors of a checkpoint into ``model``, in place, on the thread that runs the model.

    The reload is opened and closed in this call, because the model cannot run during a reload, and a second reload would count
    the tensors that the first one kept. The memory of the tensors may be reused when this returns. After an error the model can
    run, but with weights of several versions, until a later call succeeds.

    Args:
        model: The serving model.
        model_config: Its configuration.
        tensors: Tensors by their names in the checkpoint.
        whole: Whether these are all tensors of the checkpoint. Otherwise they are those of some whole layers, and the others keep
            their weights.
        as_whole: Whether each of these layers must get as many elements as when :func:`install` last loaded the whole checkpoint.

    Raises:
        LoadError: The loader did not consume all tensors, or did not fill all parameters or ``as_whole`` layers.
        Exception: The loader raised it.
    """
    with _packed_experts(model):
        _reload(model, model_config, tensors, whole, as_whole)


def _reload(
    model: torch.nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], whole: bool, as_whole: bool
) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    tied = _tied(model)
    before = {name for name, _ in model.named_parameters()}  # only the first of tied ones; the reload unties them temporarily
    initialize_layerwise_reload(model)
    try:
        wanted = before & {name for name, _ in model.named_parameters()}
        loaded = processing.load_every(model, tensors, "vLLM")
        # A quantized model has additional parameters, with names that are in no checkpoint.
        if whole and model_config.quantization is None and loaded is not None and wanted - set(loaded):
            missing = sorted(wanted - set(loaded))
            raise LoadError(f"vLLM's loader did not fill {len(missing)} parameters: {few(missing)}")
        unfilled = _waiting(model)
        if whole:
            _unfilled[model] = unfilled
        elif as_whole and (parts := [name for name, count in unfilled.items() if _unfilled.get(model, {}).get(name) != count]):
            raise LoadError(f"the tensors that changed fill only parts of {len(parts)} layers: {few(parts)}")
    except BaseException:
        _drop_buffered(model)
        finalize_layerwise_reload(model, model_config)
        raise
    finalize_layerwise_reload(model, model_config)
    for layer in tied:
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
    _written[model] = _marks(model)


def untouched(model: torch.nn.Module) -> bool:
    """Whether nothing but :func:`install` has written or replaced parameters of ``model`` since then, as far as torch counts."""
    return _written.get(model) == _marks(model)


def _marks(model: torch.nn.Module) -> list[tuple[int, int]]:
    held = (parameter.detach() for parameter in model.parameters())
    return [(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for tensor in held]


def _waiting(model: torch.nn.Module) -> dict[str, int]:
    """Return the layers that vLLM's reload has not processed yet, although they got elements, and how many."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = ((name, get_layerwise_info(layer)) for name, layer in model.named_modules())
    return {name: info.load_numel for name, info in infos if info.can_load() and info.load_numel}


def install_some(
    model: torch.nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], *, as_whole: bool = False
) -> None:
    """Load some whole layers as :func:`install` does, without vLLM's warnings about the other layers."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        install(model, model_config, tensors, whole=False, as_whole=as_whole)
    finally:
        log.setLevel(level)


def load_in_sessions(worker: Any, *, draft: bool) -> None:  # noqa: ANN401 - vLLM's
    """Let ``worker`` load its staged weights in a session, and those of its draft model in a session before it.

    The draft model comes first, so that shared layers (such as an embedding that was equal at the start) end with the main
    model's weights. A session that was left open is closed first. If ``update_weights`` fails, its session has ended.

    Args:
        worker: The worker.
        draft: Whether there is a draft model to load.

    Raises:
        Exception: The worker raised it.
    """
    for start in [*([worker.start_draft_weight_update] if draft else []), worker.start_weight_update]:
        with suppress(RuntimeError):  # usually no session is open
            worker.finish_weight_update()
        start()
        worker.update_weights({})
        worker.finish_weight_update()


@contextmanager
def format_to_load(model: torch.nn.Module) -> Iterator[None]:
    """Give ``model`` the parameters that its loader expects, on the meta device, where vLLM processed and replaced them since.

    vLLM keeps what it needs for that, for its layerwise reload.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    layers = list(model.modules())
    with processing.restored(table for layer in layers for table in (vars(layer), layer._parameters, layer._buffers)):
        for layer in layers:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            vars(layer).pop("_already_called_process_weights_after_loading", None)
        yield


def process_layers(config: Any, model: torch.nn.Module, layers: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: ANN401 - vLLM's
    """Process ``layers`` of ``model`` as vLLM does after it loaded them, into the memory that they have.

    This is what a layerwise reload does, without loading: kernels and CUDA graphs keep their addresses.

    Args:
        config: vLLM's configuration.
        model: The serving model.
        layers: Names of layers.
        tensors: What the loader would have filled, by parameter. It may be the layers' own memory.

    Raises:
        LoadError: A parameter that a layer is processed from is not among ``tensors``, or the result has another form.
    """
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), _requantized_at_once():
        for name in layers:
            processing.process_layers(model, [name], format_to_load, processing.given(tensors))


@contextmanager
def _requantized_at_once() -> Iterator[None]:
    """Let vLLM requantize many blocks of a layer in a call, instead of one expert, and only those that this changes."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    own: Any = getattr(fp8_utils, "requant_weight_ue8m0_inplace", None)
    if own is None:
        yield
        return

    def requantize(weight: torch.Tensor, weight_scale: torch.Tensor, block_size: Sequence[int] = (128, 128)) -> None:
        rows, columns = block_size
        even = weight.numel() and weight.shape[-2] % rows == weight.shape[-1] % columns == 0
        if not (even and weight.is_contiguous() and weight_scale.is_contiguous()):
            own(weight, weight_scale, block_size)
            return
        data = weight.view(torch.uint8).view(-1, rows, weight.shape[-1] // columns, columns)
        scales = weight_scale.view(len(data), -1)
        count = max(_REQUANTIZED // data[0].numel(), 1)
        parts = zip(torch.split(data, count), torch.split(scales, count), strict=True)
        kept = torch.cat([_unchanged(*part) for part in parts])
        for part in torch.split((~kept).any(1).nonzero()[:, 0], count):
            taken, factors = data[part], scales[part]
            own(taken.view(-1, weight.shape[-1]).view(weight.dtype), factors, block_size)
            data[part], scales[part] = taken, factors

    fp8_utils.requant_weight_ue8m0_inplace = requantize
    try:
        yield
    finally:
        fp8_utils.requant_weight_ue8m0_inplace = own


def _unchanged(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return which blocks, ``[blocks of rows, rows, blocks of columns, columns]``, have the scale that vLLM would give them.

    It is the least power of two that makes the largest value at most 448, of a block that is not nearly zero.
    """
    largest = (data & 127).amax((1, 3))
    power = ((scales.view(torch.int32) & 0x7FFFFF) == 0) & (scales > 2.0**-20) & (scales < 2.0**20)
    return power & (largest > _E4M3_224) & (largest <= _E4M3_448)


def kept_by_kernels(model: torch.nn.Module) -> str | None:
    """Return the first layer whose experts' kernel computes with other tensors than the model's parameters, if there is one."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for name, layer in model.named_modules():
        values: list[Any] = [getattr(getattr(layer, "quant_method", None), "moe_quant_config", None)]
        while values:
            value = values.pop()
            if isinstance(value, torch.Tensor):
                if value.numel() and value.untyped_storage().data_ptr() not in storages:
                    return str(name)
            elif type(value).__module__.startswith("vllm."):
                values += vars(value).values() if hasattr(value, "__dict__") else ()
    return None


@contextmanager
def _packed_experts(model: torch.nn.Module) -> Iterator[None]:
    """Make vLLM's CPU build pack experts in a reload.

    It packs them only when it makes their kernel. A reload keeps the kernel, which would then read unpacked weights as packed
    ones. So this removes the kernels before the reload, and vLLM makes new ones.
    """
    kernels: list[tuple[Any, object]] = []
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
        kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # this layer was not loaded
                method.moe_kernel = kernel


def _tied(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that share a parameter with an earlier layer, such as a head with its embedding.

    The reload does not process them, because no loader is called for them. But vLLM's CPU build computes a head from a packed
    copy of its weight, which it makes while processing, so without processing the old head would stay in use.
    """
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen:
            tied.append(layer)
        seen |= own
    return tied


def _drop_buffered(model: torch.nn.Module) -> None:
    """Drop the buffered tensors of an unfinished reload, so that finalizing restores the old tensors of unfinished layers."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights = []


@contextmanager
def without_lora_layers(model: torch.nn.Module) -> Iterator[None]:
    """Put the model's own layers in the places of the LoRA layers that wrap them: loaders find parameters by their names."""
    wrapped = [(name, layer) for name, layer in model.named_modules(remove_duplicate=False) if _wraps(layer)]

    def put(unwrap: bool) -> None:
        for name, layer in wrapped:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer.base_layer if unwrap else layer)

    try:
        put(unwrap=True)
        yield
    finally:
        put(unwrap=False)


def _wraps(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith("vllm.lora.") and hasattr(layer, "base_layer")
