"""hf_state(bridge=) on stand-ins for Megatron's models: what a converter must be, and what it may not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.integrations.megatron_standins import Model

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.integrations.megatron import Family, bridged_state, hf_state
from weightsync.integrations.megatron.bridged_state import checkpoint_manifest
from weightsync.integrations.megatron.element_numbers import trace

transformers = pytest.importorskip("transformers")

HF = transformers.LlamaConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
)
Function = Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]]


def model(tp: int = 1, rank: int = 0, more: dict[str, torch.Tensor] | None = None) -> Any:
    layer = "decoder.layers.0."
    cut = {"linear_qkv": 0, "linear_fc1": 0, "embedding": 0, "output_layer": 0, "linear_proj": 1, "linear_fc2": 1}
    shapes = {
        "embedding.word_embeddings.weight": (12 // tp, 8), "output_layer.weight": (12 // tp, 8),
        "decoder.final_layernorm.weight": (8,), layer + "input_layernorm.weight": (8,),
        layer + "self_attention.linear_qkv.weight": (16 // tp, 8), layer + "self_attention.linear_proj.weight": (8, 8 // tp),
        layer + "pre_mlp_layernorm.weight": (8,), layer + "mlp.linear_fc1.weight": (24 // tp, 8),
        layer + "mlp.linear_fc2.weight": (8, 12 // tp),
    }  # fmt: skip
    given = {name: torch.randn(shape) if shape[1:] else torch.arange(8.0) for name, shape in shapes.items()}
    made: Any = Model(HF, given | (more or {}), [0], tp=(rank, tp))
    for name, value in made.named_parameters():
        dim = next((dim for part, dim in cut.items() if part in name), None)
        if dim is not None:
            value.tensor_model_parallel, value.partition_dim = True, dim
    return made


def convert(name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    layer = "model.layers.0."
    if name.endswith("linear_qkv.weight"):
        parts = torch.split(whole.view(2, 4, 2, 8), [2, 1, 1], 1)
        return [(f"{layer}self_attn.{kind}_proj.weight", part.reshape(-1, 8)) for kind, part in zip("qkv", parts, strict=True)]
    if name.endswith("linear_fc1.weight"):
        return list(zip((f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"), whole.chunk(2), strict=True))
    names = {
        "embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head", "decoder.final_layernorm": "model.norm",
        "decoder.layers.0.input_layernorm": layer + "input_layernorm",
        "decoder.layers.0.pre_mlp_layernorm": layer + "post_attention_layernorm",
        "decoder.layers.0.self_attention.linear_proj": layer + "self_attn.o_proj",
        "decoder.layers.0.mlp.linear_fc2": layer + "mlp.down_proj",
    }  # fmt: skip
    return [(f"{names[name.removesuffix('.weight')]}.weight", whole[:10] if "embed" in name or "output" in name else whole)]


def changed(part: str, change: Function) -> Function:
    return lambda name, whole: change(name, whole) if part in name else convert(name, whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_boxes_of_all_ranks_are_the_converted_tensors(tp: int) -> None:
    ranks = [model(tp, rank) for rank in range(tp)]
    states = [hf_state(each, config=HF, bridge=convert) for each in ranks]
    manifest = states[0].declare()[0]
    whole = {spec.name: torch.full(spec.shape, torch.nan) for spec in manifest}
    for state in states:
        for shard in state.declare()[1]:
            whole[shard.name][tuple(map(slice, shard.box.starts, shard.box.stops))] = shard.tensor
    for name, value in ranks[0].named_parameters():
        parts = [each.get_parameter(name).detach() for each in ranks]
        if "linear_fc1" in name:
            joined = torch.cat([half for at in (0, 1) for half in (part.chunk(2)[at] for part in parts)])
        else:
            joined = torch.cat(parts, value.partition_dim) if hasattr(value, "partition_dim") else parts[0]
        for hf, wanted in convert(name, joined):
            assert torch.equal(whole.pop(hf), wanted), hf
    assert not whole


def test_the_shards_follow_parameters_to_other_memory() -> None:
    live = model()
    state = hf_state(live, config=HF, bridge=convert)
    before = state.declare()[1]
    assert state.declare()[1] is before
    live.get_parameter("output_layer.weight").data = torch.full((12, 8), 5.0)
    (head,) = (shard for shard in state.declare()[1] if shard.name == "lm_head.weight")
    assert head.tensor.eq(5).all()


def test_what_a_converter_adds_is_published_as_a_copy_that_is_computed_anew() -> None:
    live = model()
    bridge = changed("final_layernorm", lambda name, whole: [("model.norm.weight", whole + 1)])
    state = hf_state(live, config=HF, bridge=bridge)
    norm = live.get_parameter("decoder.final_layernorm.weight")
    with torch.no_grad():
        for value in (3.0, 7.0):
            norm.fill_(value)
            (shard,) = (shard for shard in state.declare()[1] if shard.name == "model.norm.weight")
            assert shard.tensor.eq(value + 1).all()
            assert norm.eq(value).all()


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("linear_fc2", lambda _, w: [("model.layers.0.mlp.down_proj.weight", w * 2)], "computes model.layers.0.mlp.down_proj"),
        (
            "linear_fc2",
            lambda _, w: [("model.layers.0.mlp.other.weight", w)],
            "other.weight, which the checkpoint",
        ),
        ("linear_fc2", lambda _, w: [("model.layers.0.mlp.down_proj.weight", w.t())], r"shape \[12, 8\], and .* has \[8, 12\]"),
        ("linear_fc2", lambda _, w: [], "96 of its elements reach no tensor"),
        ("linear_proj", lambda _, w: [("model.layers.0.self_attn.o_proj.weight", w + w.flip(0))], "computes|repeats"),
    ],
)
def test_a_converter_that_does_more_is_refused_with_parameter_and_rank(part: str, change: Function, words: str) -> None:
    with pytest.raises(LayoutError, match=rf"decoder\.layers\.0\..*{part}\.weight on trainer rank 0: .*({words})"):
        hf_state(model(), config=HF, bridge=changed(part, change))


def test_a_parameter_of_another_dtype_is_refused() -> None:
    live = model(more={"decoder.final_layernorm.weight": torch.ones(8, dtype=torch.float16)})
    with pytest.raises(LayoutError, match=r"final_layernorm.weight .*is float16 instead of float32"):
        hf_state(live, config=HF, bridge=convert)


def test_what_is_no_bridge_and_options_of_rules_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"takes a bridge of Megatron-Bridge or mbridge, or a function .* got a str"):
        hf_state(model(), config=HF, bridge="megatron-bridge")
    with pytest.raises(ConfigurationError, match="has no rules: leave out family"):
        hf_state(model(), config=HF, bridge=convert, family=Family(lambda *_: {}))


def test_the_manifest_is_that_of_transformers_checkpoint() -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=4, first_k_dense_replace=1, tie_word_embeddings=True,
        q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2,
    )  # fmt: skip
    specs = {spec.name: spec for spec in checkpoint_manifest(config, torch.bfloat16)}
    assert specs["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert specs["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (8, 4)
    assert specs["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "float32"
    assert {spec.dtype for name, spec in specs.items() if "bias" not in name} == {"bfloat16"}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.12.mlp.linear_fc1.weight", True),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7", "decoder.layers.3.mlp.experts.linear_fc1.weight11", True),
        ("model.layers.3.mlp.experts.7.down_proj.bias", "model.layers.4.mlp.experts.0.down_proj.bias", True),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc2.weight", False),
        ("model.layers.3.block_sparse_moe.experts.1.w1.weight", "model.layers.3.block_sparse_moe.experts.1.w3.weight", False),
    ],
)
def test_parameters_that_differ_by_layer_and_expert_alone_are_of_one_kind(one: str, other: str, alike: bool) -> None:
    """A kind is traced once: the boxes of fc1 under the name of fc2 would be wrong weights."""
    assert (bridged_state._NUMBER.sub("", one) == bridged_state._NUMBER.sub("", other)) is alike


def test_a_full_gpu_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    def full(convert: Any, shape: tuple[int, ...], device: torch.device) -> Any:
        devices.append(device)
        if len(devices) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trace(convert, shape, device)

    monkeypatch.setattr(bridged_state, "trace", full)
    assert hf_state(model(), config=HF, bridge=convert).declare()[1]
    assert devices[:2] == [torch.device("cpu")] * 2


def test_shapes_of_no_dimension_are_compared_too() -> None:
    with pytest.raises(LayoutError, match=r"with shape \[\], and the checkpoint has \[1\]"):
        bridged_state._placed("scale", "scale", (), (1,))


def test_a_model_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Transformers makes no model of model_type"):
        checkpoint_manifest(transformers.CLIPConfig(), torch.bfloat16)
