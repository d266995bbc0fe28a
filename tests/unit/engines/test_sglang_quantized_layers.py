"""Direct delivery into layers that SGLang changes after loading, with a stand-in for how it makes, loads and processes them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.engines.sglang import quantized
from weightsync.engines.traced_shards import DirectShards, find_direct
from weightsync.model import Manifest, TensorSpec

NAMES = ("first", "second")
POSITIVE = 9
"""The seed of weights that are all positive."""
MANIFEST = Manifest(
    [
        TensorSpec(f"{name}.{part}", shape, dtype)
        for name in NAMES
        for part, shape, dtype in (("weight", (4, 6), "float32"), ("scale", (4,), "bfloat16"))
    ]
)


class Kernel:
    """What a method computes with."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


Kernel.__module__ = "sglang.kernels"


class Method:
    """Transposes the weight and doubles it, once: it remembers that it did, as SGLang's methods do."""

    def __init__(self, trick: str) -> None:
        self.trick, self.done, self.calls = trick, False, 0
        self.kernel: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        assert not self.done
        self.done = True
        layer.weight = nn.Parameter(layer.weight.detach().t() * 2, requires_grad=False)
        if self.trick == "derived tensor":
            layer.largest = layer.scale.max()
        elif self.trick == "derived number":
            layer.weight.largest = float(layer.scale.max())
        elif self.trick == "derived by the method":
            self.calls = int(layer.scale.abs().max() * 1000)
        elif self.trick == "workspace":
            layer.workspace = torch.zeros(8)
        elif self.trick == "in an object":
            self.kernel = Kernel(layer.scale * 2)
        elif self.trick == "in a tuple":
            layer.given = (layer.weight, layer.scale * 2)  # the first is the parameter itself
        elif self.trick == "in a partial call":
            self.kernel = partial(torch.mul, layer.scale * 2)
        elif self.trick == "in a closure":
            scale = layer.scale * 2
            self.kernel = lambda given: given * scale
        elif self.trick == "beside a variable without a value":
            scale = layer.scale * 2
            factor: float
            self.kernel = lambda given: given * scale * factor
            if self.calls:
                factor = 1.0
        elif self.trick == "as a default":
            self.kernel = lambda given, scale=layer.scale * 2: given * scale
        elif self.trick == "only for some weights" and torch.all(layer.scale > 0):
            layer.weight.largest = layer.scale.max()


class Model(nn.Module):
    """As SGLang makes it, with the plugin's hook. Its loader keeps the parameters that it first saw."""

    def __init__(self, trick: str = "") -> None:
        super().__init__()
        for name in NAMES:
            layer: Any = nn.Module()
            layer.register_parameter("weight", nn.Parameter(torch.zeros(4, 6), requires_grad=False))
            layer.register_parameter("scale", nn.Parameter(torch.zeros(4), requires_grad=False))
            layer.quant_method = Method(trick)
            self.add_module(name, layer)
        quantized.keep_formats(self, None, None, object())

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not hasattr(self, "_cached_params_dict"):
            self._cached_params_dict = dict(self.named_parameters())
        for name, tensor in tensors:
            self._cached_params_dict[name].data.copy_(tensor)


def served(trick: str = "", seed: int = 1) -> Model:
    """A model that loaded weights and processed them, as at a start."""
    model = Model(trick)
    model.load_weights(weights(seed).items())
    for name in NAMES:
        layer: Any = model.get_submodule(name)
        layer.quant_method.process_weights_after_loading(layer)
    return model


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in MANIFEST}
    return {name: tensor.abs() for name, tensor in made.items()} if seed == POSITIVE else made


def direct_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> DirectShards | str:
    monkeypatch.setattr(quantized, "_dtype_of", lambda runner: nullcontext())  # SGLang's
    runner = SimpleNamespace(model=model)
    return find_direct(
        model, MANIFEST, partial(quantized.reload, runner), torch.device("cpu"),
        to_load=partial(quantized.format_to_load, model, processes=False), process=partial(quantized.process, runner),
    )  # fmt: skip


def test_updates_have_the_bits_of_a_new_model_that_loads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    direct = direct_of(model, monkeypatch)
    assert isinstance(direct, DirectShards)
    assert direct.steps is not None
    assert direct.steps.layers == set(NAMES)
    assert all(torch.equal(before[name][1], tensor) for name, tensor in model.named_parameters())
    for seed in (2, 3, 4):
        given = weights(seed)
        for shard in direct.now():
            shard.tensor.copy_(given[shard.name][shard.box.slices])
        direct.process()
        for name, tensor in served(seed=seed).named_parameters():
            own = model.get_parameter(name)
            assert (own.data_ptr(), own.stride(), own.dtype) == (before[name][0], tensor.stride(), tensor.dtype)
            assert torch.equal(own, tensor)


def test_what_processing_makes_alike_for_all_weights_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(direct_of(served("workspace"), monkeypatch), DirectShards)


@pytest.mark.parametrize(
    ("trick", "name"),
    [
        ("derived tensor", "first.largest"),
        ("derived number", "first.weight.largest"),
        ("derived by the method", "first.quant_method.calls"),
        ("in an object", "first.quant_method.kernel.scale"),
        ("in a tuple", "first.given.1"),
        ("in a partial call", "first.quant_method.kernel.1"),
        ("in a closure", "first.quant_method.kernel.scale"),
        ("beside a variable without a value", "first.quant_method.kernel.scale"),
        ("as a default", "first.quant_method.kernel.0"),
        ("only for some weights", "first.weight.largest"),
    ],
)
def test_what_processing_keeps_besides_tensors_is_named_and_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch, trick: str, name: str
) -> None:
    model = served(trick) if trick != "only for some weights" else served(trick, seed=POSITIVE)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    reason = direct_of(model, monkeypatch)
    assert f"SGLang computes {name} from weights, which direct delivery would not update" in str(reason)
    assert all(tensor is before[name][0] and torch.equal(tensor, before[name][1]) for name, tensor in model.named_parameters())


def test_what_is_processed_once_is_processed_in_the_trial_and_in_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark at the layer made the trial, and each update, skip what the start had done."""

    def process(method: Method, layer: Any) -> None:
        if not getattr(layer, "is_converted", False):
            layer.weight.data.neg_()
            layer.is_converted = True

    monkeypatch.setattr(Method, "process_weights_after_loading", process)
    model = served()
    direct = direct_of(model, monkeypatch)
    assert isinstance(direct, DirectShards) and direct.steps is not None
    for seed in (2, 3):
        given = weights(seed)
        for shard in direct.now():
            shard.tensor.copy_(given[shard.name][shard.box.slices])
        direct.process()
        assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in served(seed=seed).named_parameters())


def test_scales_of_cached_keys_and_values_are_named() -> None:
    scale = TensorSpec("layers.0.self_attn.k_proj.k_scale", (), "float32")
    assert quantized.scales_of_cache(MANIFEST) is None
    assert "layers.0.self_attn.k_proj.k_scale as numbers" in str(quantized.scales_of_cache(Manifest([*MANIFEST, scale])))
