"""The shards of one Megatron-core rank of any model family, traced through the converters of a bridge."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.integrations.megatron.chunk import ModelChunk
from weightsync.integrations.megatron.converters import converter_of, is_expert, with_config
from weightsync.integrations.megatron.element_numbers import TracedBox, trace
from weightsync.integrations.megatron.live_state import LiveState, refuse_adapter
from weightsync.model import Box, Manifest
from weightsync.tensors.shards import Shard, dtype_name, manifest_of

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
