"""Transformers models are published as the tensors of their checkpoints: what ``save_pretrained`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs Transformers 5, which packs experts")

from safetensors.torch import load_file  # noqa: E402

from weightsync.errors import ConfigurationError  # noqa: E402
from weightsync.model import Box  # noqa: E402
from weightsync.publishing.published_shards import LiveShards  # noqa: E402
from weightsync.tensors.checkpoint_names import CheckpointPart, checkpoint_parts  # noqa: E402
from weightsync.tensors.shards import FollowedShards, manifest_of, shards_of  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32,
         "vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
TOP = {"num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 6, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Qwen2Moe": {"moe_intermediate_size": 6, "num_experts": 4, "shared_expert_intermediate_size": 8, **TOP},
    "Qwen3Moe": {"moe_intermediate_size": 6, "num_experts": 5, "head_dim": 8, "mlp_only_layers": [], **TOP},
    "Mixtral": {"num_local_experts": 3, **TOP},  # other names, too
    "Olmoe": {"num_experts": 4, **TOP},
    "DeepseekV3": {**ROUTED, **LATENT, **TOP},
    "Glm4Moe": {**ROUTED, "head_dim": 8, **TOP},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, **TOP},  # its checkpoint packs them, too
    "JetMoe": {"num_local_experts": 4, "kv_channels": 8, **TOP},
}


def model_of(family: str) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_published_as_its_checkpoint(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    manifest, shards = shards_of(model, include_buffers=True)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {spec.name for spec in manifest} == set(saved)
    assert all(torch.equal(shard.tensor, saved[shard.name]) for shard in shards)
    with torch.no_grad():  # views of the parameters, not copies
        for parameter in model.parameters():
            parameter.add_(1)
    own = {shard.name: shard.tensor for shard in shards}
    name = next(name for name in saved if "down_proj" in name or "output" in name or "w2" in name)
    assert torch.equal(own[name], saved[name] + 1)
    with torch.device("meta"):
        assert manifest_of(model_of(family)).fingerprint == manifest_of(model).fingerprint


def test_ties_are_found_under_the_names_of_the_checkpoint() -> None:
    (tied,) = [spec for spec in manifest_of(model_of("Qwen3")) if spec.aliases]
    assert (tied.name, tied.aliases) == ("model.embed_tokens.weight", ("lm_head.weight",))


def test_experts_that_move_are_followed() -> None:
    model = model_of("Qwen3Moe")
    followed = FollowedShards(model)
    before = followed.now()
    assert followed.now() is before
    packed = model.model.layers[1].mlp.experts.gate_up_proj
    packed.data = packed.data + 1
    _, shards = followed.now()
    up = next(shard for shard in shards if shard.name == "model.layers.1.mlp.experts.4.up_proj.weight")
    assert torch.equal(up.tensor, packed[4, 6:])


def converted(monkeypatch: pytest.MonkeyPatch, transposed: str = "", **renamed: str) -> Any:
    """A model with square matrices ``aa`` and ``bb``, and a conversion that transposes one and renames others."""
    model = model_of("Qwen3")
    for child in ("aa", "bb"):
        setattr(model, child, torch.nn.Linear(4, 4, bias=False))
    from transformers import core_model_loading

    def reverted(module: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {name: tensor.T if name == transposed else tensor for name, tensor in state.items()}
        return {renamed.get(name.removesuffix(".weight"), name): tensor for name, tensor in given.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", reverted)
    return model


def test_a_parameter_that_is_transposed_under_its_own_name_is_published_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(monkeypatch, "aa.weight")
    _, shards = shards_of(model)
    (own,) = [shard.tensor for shard in shards if shard.name == "aa.weight"]
    assert torch.equal(own, model.aa.weight.T)


def test_two_parameters_of_one_name_in_the_checkpoint_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"aa\.weight and bb\.weight of this model are both aa\.weight"):
        shards_of(converted(monkeypatch, bb="aa.weight"))


@pytest.mark.parametrize("moves", ["aa", "bb"])
def test_a_name_that_was_another_parameters_is_found_where_its_memory_is(monkeypatch: pytest.MonkeyPatch, moves: str) -> None:
    model = converted(monkeypatch, aa="bb.weight", bb="cc.weight")
    _, shards = shards_of(model)
    live = LiveShards(model, shards)
    getattr(model, moves).weight.data = getattr(model, moves).weight.data.clone()
    at = dict(zip([shard.name for shard in shards], live.look()[1], strict=True))
    assert (at["bb.weight"], at["cc.weight"]) == (model.aa.weight.data_ptr(), model.bb.weight.data_ptr())


def test_a_packed_parameter_may_be_a_slice_of_a_larger_tensor() -> None:
    model = model_of("Qwen3Moe")
    larger = torch.randn(5, 12, 48)
    model.model.layers[0].mlp.experts.gate_up_proj.data = larger[..., 16:32]
    _, shards = shards_of(model)
    at = dict(zip([shard.name for shard in shards], LiveShards(model, shards).look()[1], strict=True))
    assert at["model.layers.0.mlp.experts.3.up_proj.weight"] == larger[3, 6:, 16:].data_ptr()


@pytest.mark.parametrize("first", [True, False])
def test_a_packed_parameter_that_is_tied_to_another_name_stays_whole(first: bool) -> None:
    model = model_of("Qwen3Moe")
    packed = model.model.layers[0].mlp.experts.gate_up_proj
    model.extra = torch.nn.ParameterDict({"w": packed})
    if first:
        model._modules = {"extra": model.extra, **model._modules}
    manifest = manifest_of(model)
    (tied,) = [spec for spec in manifest if spec.shape == tuple(packed.shape)]
    assert {tied.name, *tied.aliases} == {"extra.w", "model.layers.0.mlp.experts.gate_up_proj"}
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in manifest.index


def test_a_conversion_that_is_set_later_is_not_answered_from_before() -> None:
    from transformers.core_model_loading import WeightRenaming

    model = model_of("Qwen3")
    assert "model.norm.weight" in manifest_of(model).index
    model._weight_conversions = [WeightRenaming("last_norm", "model.norm")]
    assert "last_norm.weight" in manifest_of(model).index


def test_a_conversion_that_computes_leaves_the_parameter_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def converted(_: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "sum": state["a"] + 1,  # computed
            "half": state["b"][:1],  # not all of it
            "permuted": state["e"].reshape(2, 2, 3).transpose(0, 1).reshape(4, 3),  # computed, by a reshape that copies
            "left": state["c"][:, :2], "right": state["c"][:, 2:].contiguous(),
            "turned": state["d"].transpose(0, 1),
        }  # fmt: skip

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", converted)
    parts = checkpoint_parts(model_of("Qwen3"), {"a": (2, 3), "b": (2, 3), "c": (2, 3), "d": (2, 3), "e": (4, 3)})
    assert parts == {
        "c": (CheckpointPart("left", Box((0, 0), (2, 2)), (0, 1)), CheckpointPart("right", Box((0, 2), (2, 3)), (0, 1))),
        "d": (CheckpointPart("turned", Box((0, 0), (2, 3)), (1, 0)),),
    }
    assert parts["d"][0].shape == (3, 2)


def test_an_unknown_interface_of_transformers_leaves_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def fails(*_: object) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", fails)
    assert checkpoint_parts(model_of("Qwen3"), {"a": (2, 3)}) == {}


@pytest.mark.parametrize("seed", range(50))
def test_what_ranks_hold_of_a_part_is_the_part(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    shape = tuple(between(1, 5) for _ in range(3))
    packed = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    expert, first = between(0, shape[0] - 1), between(0, shape[1] - 1)
    part = CheckpointPart("x", Box((expert, first, 0), (expert + 1, *shape[1:])), (2, 1) if seed % 2 else (1, 2))
    whole = packed[expert, first:]
    whole = whole.T if seed % 2 else whole
    dim, built = between(0, 2), torch.full(part.shape, -1)
    cut = between(0, shape[dim])
    for low, high in ((0, cut), (cut, shape[dim])):
        starts, stops = [0, 0, 0], list(shape)
        starts[dim], stops[dim] = low, high
        local = packed.narrow(dim, low, high - low).clone()
        box, view = part.within(Box(tuple(starts), tuple(stops)), local)
        if box is not None:
            built[tuple(map(slice, box.starts, box.stops))] = view
    assert torch.equal(built, whole)
