"""Holds what decides that vLLM's parameters are written directly: the trace, the trial against its loading, what rules it out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.traced_shards import DirectShards, find_direct
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.engines.vllm.direct import why_streamed
from weightsync.errors import LayoutError, LoadError
from weightsync.model import Manifest, TensorSpec, Version
from weightsync.tracing.tracer import trace_loader
from weightsync.tracing.verify import batches, try_against

WIDE, EXPERTS, LAYERS, PADDED = 4, 3, 3, 8
CPU = torch.device("cpu")
VERSION = Version("run", 7, "0" * 32, "0" * 16)


class Experts(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDE, WIDE, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.ones(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDE, 3 * WIDE, dtype=torch.bfloat16)
        self.experts = Experts()


class Engine(nn.Module):
    """Fuses, stacks and pads as vLLM does; ``trick`` is what its loading does besides copying."""

    def __init__(self, trick: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(PADDED, WIDE, dtype=torch.bfloat16)  # rows 5 and beyond are padding
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.trick = trick
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(3))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "embed.weight":
                self.embed.weight.data[: len(tensor)].copy_(tensor * 2 if self.trick == "scaled" else tensor)
                continue
            layer = self.layers[int(name.split(".")[1])]
            assert isinstance(layer, Layer)
            kind, part = name.split(".")[2:4]
            if kind == "expert":
                half = WIDE * (name.endswith("up"))
                layer.experts.w13.data[int(part), half : half + WIDE].copy_(tensor)
            elif part == "weight" and self.trick == "replaced":
                kept = layer.qkv.weight.data.clone()
                kept["qkv".index(kind) * WIDE :][:WIDE].copy_(tensor)
                layer.qkv.weight = nn.Parameter(kept)
            else:
                target = layer.qkv.weight if part == "weight" else layer.qkv.bias
                target.data["qkv".index(kind) * WIDE :][:WIDE].copy_(tensor)

    def reload(self, tensors: Iterable[tuple[str, torch.Tensor]], layers: Collection[str] = ()) -> None:
        """As vLLM does: load, then process."""
        given = dict(tensors)
        self.load_weights(given.items())
        touched = {int(name.split(".")[1]) for name in given if name.startswith("layers")}
        for number in touched:
            layer = self.layers[number]
            assert isinstance(layer, Layer)
            if self.trick == "swapped" and number == LAYERS - 1:
                layer.experts.w13.data.copy_(layer.experts.w13.data.roll(WIDE, 1))
            elif self.trick == "derived":
                layer.folded = layer.qkv.weight.detach().sum(0)
            elif self.trick == "buffer":
                layer.experts.scale.fill_(float(layer.qkv.bias.detach().abs().max()))
            elif self.trick == "raises" and number == 1:
                raise ValueError("no such expert")
            elif self.trick == "memory" and number == 1:
                raise torch.OutOfMemoryError("injected")


def manifest() -> Manifest:
    specs = [TensorSpec("embed.weight", (5, WIDE), "bfloat16")]
    for layer in range(LAYERS):
        for part in "qkv":
            specs.append(TensorSpec(f"layers.{layer}.{part}.weight", (WIDE, WIDE), "bfloat16"))
            specs.append(TensorSpec(f"layers.{layer}.{part}.bias", (WIDE,), "bfloat16"))
        for expert in range(EXPERTS):
            specs += [TensorSpec(f"layers.{layer}.expert.{expert}.{half}", (WIDE, WIDE), "bfloat16") for half in ("gate", "up")]
    return Manifest(specs)


def state(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Every parameter and buffer: where it is, and its bits."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (one.data_ptr(), one.detach().clone()) for name, one in found.items()}


def same(before: dict[str, tuple[int, torch.Tensor]], model: nn.Module) -> bool:
    after = state(model)
    return list(before) == list(after) and all(
        before[name][0] == where and torch.equal(before[name][1], bits) for name, (where, bits) in after.items()
    )


def test_a_loader_of_plain_copies_is_written_directly_and_nothing_has_changed() -> None:
    model = Engine()
    before = state(model)
    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", package="vllm")
    assert isinstance(found, DirectShards)
    assert same(before, model)
    wanted = Engine()
    weights = {spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in manifest()}
    wanted.load_weights(weights.items())
    with torch.no_grad():
        for shard in found.now():
            box = tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))
            shard.tensor.copy_(weights[shard.name][box])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        ("scaled", "does more than copy embed.weight"),
        ("swapped", r"does more than copy layers\.2\.expert\.0\.gate.* and 3 more"),
        ("replaced", "vLLM does more than copy layers.0.k"),
        ("derived", r"computes layers\.0\.folded"),
        ("buffer", r"computes layers\.0\.experts\.scale"),
        ("raises", "no such expert"),
        ("memory", "too little device memory"),
    ],
)
def test_what_loading_does_besides_copying_is_noticed_and_undone(trick: str, reason: str) -> None:
    model = Engine(trick)
    if trick == "derived":
        for layer in model.layers:
            layer.folded = torch.zeros(WIDE)
    folded = [getattr(layer, "folded", None) for layer in model.layers]
    before = state(model)
    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", package="vllm")
    assert isinstance(found, str)
    assert re.search(reason, found), found
    assert same(before, model)
    assert all(getattr(layer, "folded", None) is one for layer, one in zip(model.layers, folded, strict=True))
    assert all(one is None or not one.any() for one in folded)


class Packed(nn.Module):
    """Packed integers, of which processing after loading keeps the lowest bit."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(WIDE, WIDE, dtype=torch.int32), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self.packed.data.copy_(tensor)

    def reload(self, tensors: Iterable[tuple[str, torch.Tensor]], layers: Collection[str] = ()) -> None:
        self.load_weights(tensors)
        self.packed.data &= 1


def test_packed_integers_of_a_trial_have_all_bits() -> None:
    model, packed = Packed(), Manifest([TensorSpec("packed", (WIDE, WIDE), "int32")])
    traced = trace_loader(model.load_weights, model, packed)
    assert "does more than copy packed" in str(try_against(model, traced, traced.shards(model), model.reload))


@pytest.mark.parametrize("nbytes", [1, 100, 300, 1 << 30])
def test_batches_hold_whole_layers_and_every_tensor_once(nbytes: int) -> None:
    model = Engine()
    traced = trace_loader(model.load_weights, model, manifest())
    found = batches(traced, nbytes)
    assert [name for names in found for name in names] == [spec.name for spec in manifest()]
    homes: dict[str, int] = {}
    for number, names in enumerate(found):
        for copy in traced.copies:
            if manifest()[copy.tensor].name in names:
                assert homes.setdefault(copy.parameter, number) == number
    assert len(found) == {1: 1 + 2 * LAYERS, 1 << 30: 1}.get(nbytes, len(found))
    before = state(model)
    assert try_against(model, traced, traced.shards(model), model.reload, batch_bytes=nbytes) is None
    assert same(before, model)


def test_shards_follow_parameters_and_refuse_other_ones() -> None:
    model = Engine()
    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", package="vllm")
    assert isinstance(found, DirectShards)
    first = found.now()
    assert found.now() is first
    model.embed.weight.data = model.embed.weight.data.clone()
    moved = found.now()
    assert moved is not first
    assert moved[0].tensor.data_ptr() == model.embed.weight.data_ptr()
    model.embed.weight.data = torch.zeros(PADDED, 2 * WIDE, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"embed\.weight"):
        found.now()


@dataclass
class Model:
    quantization: str | None = None


@dataclass
class Config:
    model_config: Model
    lora_config: object | None = None


@pytest.mark.parametrize(
    ("config", "device", "reason"),
    [
        (Config(Model()), "cpu", "on cpu, where vLLM repacks"),
        (Config(Model("modelopt")), "cuda:1", "quantized (modelopt)"),
        (Config(Model(), object()), "cuda:1", "LoRA"),
    ],
)
def test_what_rules_it_out(config: Config, device: str, reason: str) -> None:
    assert reason in str(why_streamed(config, torch.device(device)))
    assert why_streamed(Config(Model()), torch.device("cuda:1")) is None
    for quantization in ("fp8", "compressed-tensors"):
        assert why_streamed(Config(Model(quantization)), torch.device("cuda:1")) is None  # the trial decides


def test_a_rank_that_was_written_resumes_without_any_loading_and_one_that_was_streamed_to_loads() -> None:
    model = Engine()
    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", package="vllm")
    assert isinstance(found, DirectShards)
    adapter = VllmWorkerAdapter(HfCheckpoint(manifest(), tuple(spec.name for spec in manifest())), None, found, CPU)
    assert adapter.shards() is found.now()
    assert adapter.device() is None
    adapter.pause("abort", 1)
    adapter.begin()
    adapter.wake_weights()
    adapter.finish(VERSION)
    adapter.resume()
    adapter.pause("abort", 1)
    adapter.begin()
    with pytest.raises(LoadError, match="did not load"):  # paused, and nothing came
        adapter.resume()
    adapter.load([("embed.weight", torch.zeros(5, WIDE, dtype=torch.bfloat16))])
    with pytest.raises(LoadError, match="were not received"):
        adapter.finish(VERSION)


def rolled(model: Engine, times: int) -> Callable[[Collection[str], Mapping[str, torch.Tensor]], None]:
    def process(layers: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
        for name in layers:
            assert tensors[f"{name}.w13"].data_ptr() == model.get_parameter(f"{name}.w13").data_ptr()
            for _ in range(times):
                model.get_parameter(f"{name}.w13").copy_(tensors[f"{name}.w13"].roll(WIDE, 1))

    return process


def test_what_loading_does_to_a_layer_is_done_after_the_move() -> None:
    model = Engine("swapped")
    before = state(model)
    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", process=rolled(model, 1))
    assert isinstance(found, DirectShards) and found.repacks and found.steps is not None
    assert found.steps.layers == {"layers.2.experts"}
    assert same(before, model)
    wanted = Engine("swapped")
    weights = {spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in manifest()}
    wanted.reload(weights.items())
    adapter = VllmWorkerAdapter(HfCheckpoint(manifest(), ()), None, found, CPU)
    assert adapter.repacks and "another layout" in adapter.no_source
    with torch.no_grad():
        for shard in found.now():
            shard.tensor.copy_(weights[shard.name][shard.box.slices])
    adapter.finish(VERSION)
    assert all(torch.equal(ours, other) for ours, other in zip(model.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize(
    ("times", "reason"),
    [(0, r"processing layers\.2\.experts\.w13 after a move gives other bits"), (2, "other bits than the loading of vLLM")],
)
def test_a_step_that_does_something_else_is_refused_by_name(times: int, reason: str) -> None:
    model = Engine("swapped")
    before = state(model)
    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", process=rolled(model, times))
    assert re.search(reason, str(found))
    assert same(before, model)


def test_a_step_that_raises_is_refused_by_name() -> None:
    model = Engine("swapped")

    def process(layers: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
        raise RuntimeError("no such kernel")

    found = find_direct(model, manifest(), model.reload, CPU, engine="vLLM", process=process)
    assert "processing layers.2.experts after a move raised an error in a trial: RuntimeError('no such kernel')" in str(found)


class Kept(nn.Module):
    """Is loaded as ``weight``, E8M0 ``scale`` and bfloat16 ``row``. Keeps them transposed, doubled, and the largest of ``row``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.scale = nn.Parameter(torch.ones(4, 2))
        self.row = nn.Parameter(torch.zeros(1))
        self.calls = 0

    @contextmanager
    def to_load(self) -> Iterator[None]:
        before = dict(self._parameters)
        for name, shape in (("weight", (3, 4)), ("scale", (4, 2)), ("row", (3,))):
            self._parameters[name] = nn.Parameter(torch.empty(shape, device="meta"))
        yield
        self._parameters.update(before)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)

    def process(self, layers: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
        assert set(layers) == {""}
        given = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
        self.weight.copy_(given["weight"].t())
        self.scale.copy_(given["scale"] * 2)
        self.row.copy_(given["row"].max())

    def reload(self, tensors: Iterable[tuple[str, torch.Tensor]], layers: Collection[str] = ()) -> None:
        with torch.no_grad():
            self.process([""], dict(tensors))


def test_parameters_of_another_shape_or_dtype_are_filled_in_their_own_memory_where_they_have_room() -> None:
    kinds = {"weight": ((3, 4), "float32"), "scale": ((4, 2), "float8_e8m0fnu"), "row": ((3,), "bfloat16")}
    known = Manifest(TensorSpec(name, shape, dtype) for name, (shape, dtype) in kinds.items())
    model, wanted = Kept(), Kept()
    before = state(model)
    find = partial(find_direct, model, known, model.reload, CPU, to_load=model.to_load)
    assert "converted from torch.float8_e8m0fnu" in str(find())
    found = find(process=model.process)
    assert isinstance(found, DirectShards) and same(before, model)
    values = {"weight": torch.randn(3, 4), "row": torch.randn(3).bfloat16()}
    values["scale"] = torch.randint(100, 150, (4, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wanted.reload(values.items())
    places = {shard.name: shard.tensor.untyped_storage().data_ptr() for shard in found.now()}
    assert [places[name] == model.get_parameter(name).untyped_storage().data_ptr() for name in kinds] == [True, True, False]
    for shard in found.now():
        shard.tensor.copy_(values[shard.name][shard.box.slices])
    found.process()
    with pytest.raises(LayoutError, match="changed parameter weight to"):
        model.weight = nn.Parameter(model.weight.t().contiguous())
        found.now()
    model.weight = nn.Parameter(model.weight.t())
    assert all(torch.equal(ours, other) for ours, other in zip(model.parameters(), wanted.parameters(), strict=True))


class OneScale(nn.Module):
    """Layers whose processing rounds their only scale up to a power of two, as for DeepGEMM's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(16))
        for layer in self.layers:
            layer.scale = nn.Parameter(torch.zeros(1, 1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    def process(self, layers: Iterable[str], places: object = None) -> None:
        for name in layers:
            scale = self.get_parameter(f"{name}.scale").data
            scale.copy_(torch.where(scale > 0, scale.log2().ceil().exp2(), scale))

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]], layers: Collection[str]) -> None:
        self.load_weights(weights)
        self.process(layers)


def test_a_step_that_leaves_powers_of_two_is_found_in_layers_with_one_scale() -> None:
    model = OneScale()
    specs = Manifest(TensorSpec(f"layers.{index}.scale", (1, 1), "float32") for index in range(16))
    direct = find_direct(model, specs, model.reload, CPU, process=model.process)
    assert isinstance(direct, DirectShards) and direct.steps is not None
    assert direct.steps.layers == {f"layers.{index}" for index in range(16)}
