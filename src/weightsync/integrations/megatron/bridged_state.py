"""The shards of one Megatron-core rank of any model family, traced through the converters of a bridge.

The converters of Megatron-Bridge, mbridge, and frameworks with functions, called for one parameter without any communication.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace as replaced
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.integrations.megatron.chunk import ModelChunk, ParallelPlace
from weightsync.integrations.megatron.element_numbers import TracedBox, trace
from weightsync.integrations.megatron.live_state import LiveState, refuse_adapter
from weightsync.model import Box, Manifest
from weightsync.tensors.shards import Shard, dtype_name, manifest_of

_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))$")


class Converter(ABC):
    """Converts one parameter of a rank to tensors under Hugging Face names. What other ranks hold of them is NaN."""

    def __init__(self, bridge: Any, place: ParallelPlace) -> None:  # noqa: ANN401
        self._bridge, self._place = bridge, place

    @abstractmethod
    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Convert ``values``, which are shaped like ``parameter`` of ``module``, whose name in the whole model is ``name``.

        Raises:
            LayoutError: The converter has no mapping for this parameter.
        """

    def _parts(self, name: str, values: torch.Tensor) -> list[torch.Tensor]:
        """Return ``values`` at this rank's place among the ranks that hold a part of the parameter."""
        rank, size = self._place.expert_tensor if is_expert(name) else self._place.tensor
        return [values if at == rank else torch.full_like(values, torch.nan) for at in range(size)]


def converter_of(bridge: Any, config: Any, place: ParallelPlace) -> Converter:  # noqa: ANN401
    """Return the converter of what :func:`hf_state` takes as ``bridge``.

    Raises:
        ConfigurationError: It is none of the three kinds.
    """
    model_bridge = getattr(bridge, "_model_bridge", bridge)  # of Megatron-Bridge's AutoBridge
    if hasattr(model_bridge, "mapping_registry"):
        return _MegatronBridge(model_bridge, config, place)
    if hasattr(bridge, "_weight_to_hf_format") and hasattr(bridge, "_weight_merge_across_tp"):
        return _MBridge(bridge, place)
    if callable(bridge):
        return _Function(bridge, place)
    raise ConfigurationError(
        f"hf_state(bridge=) takes a bridge of Megatron-Bridge or mbridge, or a function of a name and a tensor, and got a "
        f"{type(bridge).__name__}"
    )


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to a routed expert, which expert tensor parallelism cuts."""
    return ".experts." in name


def _names(name: str) -> list[str]:
    """Return the names by which a bridge may know a parameter: that of a grouped MLP, and of norms inside linear layers."""
    names = dict.fromkeys((_LOCAL_EXPERT.sub(r".experts.\2\1", name), name))
    fused = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}
    for separate, inside in fused.items():
        names |= dict.fromkeys(each.replace(f".{separate}.", f".{inside}_") for each in names)
    return list(names)


class _MegatronBridge(Converter):
    """Megatron-Bridge's own mapping of a parameter, whose gathers find this rank alone."""

    def __init__(self, bridge: Any, config: Any, place: ParallelPlace) -> None:  # noqa: ANN401
        super().__init__(bridge, place)
        if getattr(bridge, "hf_config", None) is None:
            bridge.hf_config = config  # as its own conversions do first
        with self._alone():
            self._registry = bridge.mapping_registry()

    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        with self._alone():
            mapping = next(filter(None, map(self._registry.megatron_to_hf_lookup, _names(name))), None)
            if mapping is None:
                raise LayoutError(f"the bridge has no mapping for {name}")
            converted: Mapping[str, torch.Tensor] = mapping.megatron_to_hf(values, module)
            return converted

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Give mappings groups in which no other rank answers. They ask Megatron for its groups when they are made."""
        from megatron.core import parallel_state

        cuts = {
            "tensor_model": self._place.tensor, "expert_tensor": self._place.expert_tensor, "pipeline_model": (0, 1),
            "expert_model": (0, 1),
        }  # fmt: skip
        names = {f"get_{what}_parallel_group": Alone(*cut) for what, cut in cuts.items()}
        before = {name: getattr(parallel_state, name) for name in names}
        for name, group in names.items():
            setattr(parallel_state, name, lambda *_, group=group, **__: group)
        try:
            yield
        finally:
            for name, getter in before.items():
                setattr(parallel_state, name, getter)


class Alone(dist.ProcessGroup):
    """A process group whose other ranks hold NaN."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def allgather(self, outputs: Any, inputs: Any, _: Any = None) -> Any:  # noqa: ANN401
        """Give every rank's tensor, of which only this rank's is known."""
        for parts, given in zip(outputs, inputs, strict=True):
            for rank, part in enumerate(parts):
                part.copy_(given) if rank == self.rank() else part.fill_(torch.nan)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return _create_work_from_future(done)


class _MBridge(Converter):
    """mbridge's two steps: merge what tensor-parallel ranks hold, and rename."""

    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        known_as = next(filter(self._knows, _names(name)), None)
        if known_as is None:
            raise LayoutError(f"the bridge has no mapping for {name}")
        if getattr(parameter, "tensor_model_parallel", False):
            values = self._bridge._weight_merge_across_tp(known_as, self._parts(name, values), parameter)
        return dict(zip(*self._bridge._weight_to_hf_format(known_as, values), strict=True))

    def _knows(self, name: str) -> bool:
        try:
            return bool(self._bridge._weight_name_mapping_mcore_to_hf(name))
        except (KeyError, NotImplementedError):
            return False


class _Function(Converter):
    """A function of a name and a whole parameter, which gives names and tensors: slime's, AReaL's and ROLL's converters are such.

    The parts of tensor-parallel ranks are put together as these frameworks do: gate and up apart.
    """

    def convert(self, name: str, parameter: torch.Tensor, module: nn.Module, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        name = _LOCAL_EXPERT.sub(r".experts.\2\1", name)
        if getattr(parameter, "tensor_model_parallel", False):
            parts = self._parts(name, values)
            dim = int(getattr(parameter, "partition_dim", 0))
            if "linear_fc1." in name and getattr(getattr(module, "config", None), "gated_linear_unit", True):
                halves = [part.chunk(2) for part in parts]
                parts = [gate for gate, _ in halves] + [up for _, up in halves]
            elif is_expert(name) and "linear_fc2.weight" in name:
                dim = 1  # grouped experts may say 0
            values = torch.cat(parts, dim)
        return dict(self._bridge(name, values))


def with_config(module: nn.Module, config: Any) -> nn.Module:  # noqa: ANN401
    """Return ``module``, or a copy that has ``config``: mappings read it, and not all modules of a model have one."""
    if hasattr(module, "config"):
        return module
    module = copy(module)
    module.config = config
    return module


_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)$")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)|(?<=weight)[0-9]+$|(?<=bias)[0-9]+$")
"""Of a layer or an expert. Other digits belong to the name: fc1 and fc2 are two kinds of parameter."""
_EXPERT = re.compile(r"(.+)\.experts\.(?:local_experts\.([0-9]+)(\..+)|(.+\.(?:weight|bias))([0-9]+))")
_EXPERT_NUMBER = re.compile(r"\.experts\.(?:local_experts\.([0-9]+)|.+?([0-9]+)$)")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")

_Kind = tuple[object, ...]


def checkpoint_manifest(config: Any, dtype: torch.dtype) -> Manifest:  # noqa: ANN401
    """Return the tensors of a checkpoint of Transformers' model with this configuration. Allocates none of them.

    Raises:
        ConfigurationError: Transformers is missing or does not know the model.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigurationError("hf_state(bridge=) takes names and shapes from Transformers: pip install transformers") from None
    architecture = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    factory: Any = transformers.AutoModelForCausalLM if architecture is None else architecture
    try:
        with torch.device("meta"):
            model: Any = factory.from_config(config) if architecture is None else factory(config)
    except ValueError as error:
        raise ConfigurationError(f"Transformers makes no model of model_type {config.model_type!r}: {error}") from None
    precise = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return Manifest(
        replace(spec, dtype=dtype_name(dtype) if precise.isdisjoint(spec.name.split(".")) else "float32")
        for spec in manifest_of(model, include_buffers=True)
    )


class BridgedState(LiveState):
    """Made by ``hf_state(bridge=)``: the boxes of each parameter are where the bridge's own converter puts its elements."""

    def __init__(self, chunks: Sequence[ModelChunk], config: Any, bridge: Any) -> None:  # noqa: ANN401
        self._converter = converter_of(bridge, config, chunks[0].place)
        self._known: dict[_Kind, list[tuple[tuple[int, ...], list[TracedBox]]]] = {}
        """By kind of parameter: every layer has one of each, and every expert."""
        manifest = checkpoint_manifest(config, chunks[0].config.params_dtype)
        self._names = {name: spec for spec in manifest for name in spec.names}
        super().__init__(manifest, chunks)

    def _shards_of(self, chunk: ModelChunk) -> Iterator[Shard]:
        whole_name = _whole_names(chunk.model)
        for name, value in chunk.tensors():
            refuse_adapter(name, self._place)
            try:
                yield from self._cut(chunk, name, whole_name(name), value)
            except LayoutError as error:
                raise LayoutError(f"{name} on {self._place}: {error}") from None

    def _cut(self, chunk: ModelChunk, name: str, known_as: str, value: torch.Tensor) -> Iterator[Shard]:
        module = with_config(chunk.model.get_submodule(name.rpartition(".")[0]), chunk.config)
        if known_as == "output_layer.weight" and chunk.model.share_embeddings_and_output_weights:
            known_as = "embedding.word_embeddings.weight"
        shape = tuple(value.shape)

        def convert(values: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return self._converter.convert(known_as, value, module, values)

        names = list(convert(torch.empty(shape, dtype=torch.float64, device="meta")))
        kind = (_NUMBER.sub("", known_as), type(module), shape, *(_NUMBER.sub("", each) for each in names))
        if kind not in self._known:
            try:
                self._known[kind] = trace(convert, shape, value.device)
            except torch.OutOfMemoryError:  # a trainer's GPU is full: slower in host memory, once
                self._known[kind] = trace(convert, shape, torch.device("cpu"))
        left = value.numel()
        for each, (made, boxes) in zip(names, self._known[kind], strict=True):
            spec = self._names.get(each)
            if spec is None:
                raise LayoutError(f"the bridge calls it {each}, which the checkpoint of Transformers' model does not have")
            data = self._plain(known_as, value, spec.dtype, "give hf_state what get_model() returns, after its first load or step")
            for box in map(_placed(known_as, each, made, spec.shape), boxes):
                extents = [
                    min(extent, whole - start) for start, extent, whole in zip(box.starts, box.extents, spec.shape, strict=True)
                ]
                left -= torch.Size(box.extents).numel()
                if min(extents, default=1) <= 0:
                    continue  # padding of the vocabulary
                view = data.as_strided(extents, box.strides, data.storage_offset() + box.offset)
                stops = tuple(start + extent for start, extent in zip(box.starts, extents, strict=True))
                yield Shard(spec.name, spec.shape, Box(box.starts, stops), self._published(view, box.added))
        if left and not known_as.endswith(_VOCABULARY):
            raise LayoutError(f"{left:,} of its elements reach no tensor of the checkpoint")


def _whole_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that gives a parameter of one chunk its name in the whole model: numbers of layers and experts."""
    layers, experts = dict[str, int](), dict[str, Sequence[int]]()
    for path, module in model.named_modules():
        number: Any = getattr(module, "layer_number", None)
        if _LAYER.search(path) and isinstance(number, int):
            layers[path] = number - 1
        if hasattr(module, "local_expert_indices"):
            experts[path] = module.local_expert_indices

    def whole_name(name: str) -> str:
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            local, numbers = int(expert[2] or expert[5]), experts[expert[1]]
            name = f"{expert[1]}.experts." + (
                f"local_experts.{numbers[local]}{expert[3]}" if expert[2] else f"{expert[4]}{numbers[local]}"
            )
        for path, number in layers.items():
            if name.startswith(f"{path}."):
                return f"{path.rpartition('.')[0]}.{number}{name[len(path) :]}"
        return name

    return whole_name


def _placed(name: str, known_as: str, made: tuple[int, ...], whole: tuple[int, ...]) -> Callable[[TracedBox], TracedBox]:
    """Return a function that moves the boxes of a converted tensor to their place in the checkpoint's.

    Raises:
        LayoutError: The shapes mean different things.
    """
    if made == whole or (made[1:] == whole[1:] and made[:1] > whole[:1] and name.endswith(_VOCABULARY)):
        return lambda box: box
    expert = _EXPERT_NUMBER.search(name)
    if is_expert(name) and expert is not None and made == whole[1:]:  # a tensor of all experts
        number = int(expert[1] or expert[2])
        return lambda box: replaced(box, starts=(number, *box.starts), extents=(1, *box.extents), strides=(1, *box.strides))
    raise LayoutError(f"the bridge makes {known_as} with shape {list(made)}, and the checkpoint has {list(whole)}")
