"""hf_state on stand-ins: names of TransformerEngine's modules, and all that it refuses. Real models: test_megatron.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.integrations.megatron_standins import Model, llama_config, place
from torch import nn

import weightsync
from weightsync.errors import ConfigurationError, LayoutError, RoundFailed, VerificationError, WeightSyncError
from weightsync.integrations.megatron import FAMILIES, Family, hf_state
from weightsync.integrations.megatron.blocks import attention, experts, norms, router
from weightsync.integrations.megatron.chunk import ModelChunk
from weightsync.integrations.megatron.packing import Packing, Part
from weightsync.tensors.shards import ShardedState

CONFIG = llama_config()


def parameters(tp: int = 1, layers: int = 2, fused: bool = True) -> dict[str, torch.Tensor]:
    """Of one rank of ``tp``; with ``fused``, as TransformerEngine's layers name their norms."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (12 // tp, 8),
        "output_layer.weight": (12 // tp, 8),
        "decoder.final_layernorm.weight": (8,),
    }
    for number in range(layers):
        layer = f"decoder.layers.{number}."
        shapes[layer + ("self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight")] = (8,)
        shapes[layer + "self_attention.linear_qkv.weight"] = (16 // tp, 8)
        shapes[layer + "self_attention.linear_proj.weight"] = (8, 8 // tp)
        shapes[layer + ("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight")] = (8,)
        shapes[layer + "mlp.linear_fc1.weight"] = (24 // tp, 8)
        shapes[layer + "mlp.linear_fc2.weight"] = (8, 12 // tp)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def held(state: ShardedState) -> dict[str, torch.Tensor]:
    """The tensors put together from the shards of a rank that holds everything."""
    manifest, shards = state.declare()
    whole = {spec.name: torch.full(spec.shape, torch.nan) for spec in manifest}
    for one in shards:
        whole[one.name][tuple(map(slice, one.box.starts, one.box.stops))] = one.tensor
    return whole


@pytest.mark.parametrize("fused", [True, False])
def test_norms_are_found_under_both_names(fused: bool) -> None:
    given = parameters(fused=fused)
    whole = held(hf_state(Model(CONFIG, given), config=CONFIG))
    assert not any(value.isnan().any() for value in whole.values())
    name = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    assert torch.equal(whole["model.layers.1.input_layernorm.weight"], given[f"decoder.layers.1.{name}"])


def test_shards_are_views_that_follow_the_parameters() -> None:
    model = Model(CONFIG, parameters())
    state = hf_state(model, config=CONFIG)
    before = state.declare()
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(3)
    assert all(one.tensor.eq(3).all() for one in before[1])
    assert state.declare()[1] is before[1]
    for value in model.parameters():
        value.data = torch.full_like(value.data, 4)  # as an optimizer does that moves parameters to a buffer
    assert all(one.tensor.eq(4).all() for one in state.declare()[1])
    for module in model.modules():
        for name, value in dict(module.named_parameters(recurse=False)).items():
            setattr(module, name, nn.Parameter(torch.full_like(value, 5)))
    assert all(one.tensor.eq(5).all() for one in state.declare()[1])


@pytest.mark.parametrize("zero_centered", [True, False])
def test_norms_that_are_stored_minus_one_are_converted_on_request(zero_centered: bool) -> None:
    """No module that builds without TransformerEngine stores them so."""
    model = Model(CONFIG, parameters(), layernorm_zero_centered_gamma=zero_centered)
    family = Family(FAMILIES["llama"].layer, zero_centered_norms=not zero_centered)
    with pytest.raises(ConfigurationError, match="layernorm_zero_centered_gamma"):
        hf_state(model, config=CONFIG, family=family)
    state = hf_state(model, config=CONFIG, family=family, convert_norms=True)
    before = {name: value.clone() for name, value in held(state).items()}
    added = 1 if zero_centered else -1
    names = {
        "model.norm.weight": "decoder.final_layernorm.weight",
        "model.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "model.layers.1.post_attention_layernorm.weight": "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    }
    for change in (0.0, 2.0):
        with torch.no_grad():
            for value in model.parameters():
                value.add_(change)
        for name, parameter in names.items():
            assert torch.equal(held(state)[name], model.get_parameter(parameter).detach() + added)
    plain = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(held(state)[plain], before[plain] + 2)
    assert sum(name not in names and "norm" in name for name in before) == 2  # of the other layer
    shards = state.declare()[1]
    assert state.declare()[1] is shards
    assert {one.tensor.data_ptr() for one in shards if "norm" not in one.name} <= {
        value.data_ptr() + offset * value.element_size() for value in model.parameters() for offset in range(value.numel())
    }


def test_a_norm_whose_rule_does_not_say_so_is_not_left_unconverted() -> None:
    def layer(config: Any, number: int, stacked: bool) -> Any:
        rules = FAMILIES["llama"].layer(config, number, stacked)
        return {**rules, "mlp.linear_fc1.layer_norm_weight": Packing((Part("post_attention_layernorm.weight", (8,)),), cut=False)}

    model = Model(CONFIG, parameters(), layernorm_zero_centered_gamma=True)
    with pytest.raises(LayoutError, match=r"layers\.0\.mlp\.linear_fc1\.layer_norm_weight .* is a norm, and its rule does not"):
        hf_state(model, config=CONFIG, family=Family(layer), convert_norms=True)


def test_wrappers_are_looked_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert len(hf_state([Wrapper(Wrapper(Model(CONFIG, parameters())))], config=CONFIG).declare()[1]) == 27


@pytest.mark.parametrize("stacked", [True, False])
def test_grouped_experts_of_transformer_engine(stacked: bool) -> None:
    hf = llama_config(num_experts=4, num_hidden_layers=1)

    def layer(config: Any, _: int, stacked: bool) -> Any:
        return {**norms(config), **attention(config), **router(config, 4), **experts(config, 4, 6, stacked=stacked)}

    whole: dict[str, torch.Tensor] = {}
    for rank in range(2):
        given = {name: value for name, value in parameters(layers=1).items() if "mlp" not in name}
        given |= {
            "decoder.layers.0.pre_mlp_layernorm.weight": torch.ones(8),
            "decoder.layers.0.mlp.router.weight": torch.ones(4, 8),
        }
        for expert in range(2):
            number = 2 * rank + expert
            given[f"decoder.layers.0.mlp.experts.linear_fc1.weight{expert}"] = torch.full((12, 8), 10.0 + number)
            given[f"decoder.layers.0.mlp.experts.linear_fc2.weight{expert}"] = torch.full((8, 6), 20.0 + number)
        state = hf_state(Model(hf, given, [0], ep=(rank, 2)), config=hf, family=Family(layer), stacked_experts=stacked)
        whole = {name: torch.where(value.isnan(), whole.get(name, value), value) for name, value in held(state).items()}
    for number in range(4):
        if stacked:
            assert whole["model.layers.0.mlp.experts.gate_up_proj"][number].eq(10 + number).all()
            assert whole["model.layers.0.mlp.experts.down_proj"][number].eq(20 + number).all()
        else:
            assert whole[f"model.layers.0.mlp.experts.{number}.up_proj.weight"].eq(10 + number).all()
            assert whole[f"model.layers.0.mlp.experts.{number}.down_proj.weight"].eq(20 + number).all()


def without(name: str) -> dict[str, torch.Tensor]:
    given = parameters()
    del given[name]
    return given


class Quantized(torch.Tensor):
    """As the FP8 parameters of TransformerEngine: a subclass that wraps others."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decoder.layers.1.self_attention.sinks": torch.ones(4)}, r"no rule for parameter decoder\.layers\.1.*sinks"),
        ({"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(16, 7)}, r"linear_qkv\.weight on trainer.*\[16, 8\]"),
        ({"output_layer.weight": torch.ones(8, 8)}, r"output_layer\.weight on .*lm_head\.weight: shape \[8, 8\]"),
        ({"decoder.final_layernorm.weight": torch.ones(8, dtype=torch.float16)}, "is float16 instead of float32"),
        ({"decoder.final_layernorm.weight": nn.Parameter(torch.ones(8).as_subclass(Quantized))}, "is a Quantized, not"),
    ],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_is_named(given: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        hf_state(Model(CONFIG, {**parameters(), **given}), config=CONFIG)


def test_a_rank_that_holds_half_of_a_wider_tensor_is_not_taken_for_one_that_holds_all() -> None:
    """Megatron's MLP is twice as wide as the Hugging Face configuration says, and cut in two: each half has the whole's shape."""
    given = parameters(tp=2)
    given |= {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(24, 8),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(8, 12),
    }
    with pytest.raises(
        LayoutError, match=r"layers\.0\.mlp\.linear_fc1\.weight on trainer rank 0 \(TP 1 of 2\).* \[24, 8\].* \[48, 8\]"
    ):
        hf_state(Model(CONFIG, given, tp=(1, 2)), config=CONFIG)


def test_prediction_layers_of_a_family_without_rules_for_them_are_named() -> None:
    model: Any = Model(CONFIG, parameters())
    layer: Any = nn.Module()
    layer.layer_number, layer.transformer_layer = 1, nn.Module()
    layer.transformer_layer.mlp = nn.Module()
    place(layer, "enorm.weight", torch.ones(8))
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList([layer])
    model.config.mtp_num_layers = 1
    with pytest.raises(LayoutError, match=r"mtp\.layers\.0\.enorm\.weight on trainer rank 0: this family has no rules"):
        hf_state(model, config=llama_config(num_nextn_predict_layers=1))
    with pytest.raises(ConfigurationError, match="mtp_num_layers is 1 on trainer rank 0"):
        hf_state(model, config=CONFIG)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", r"nothing holds model\.layers\.1\.mlp\.down_proj\.weight on trainer rank 0"),
        ("output_layer.weight", r"nothing holds lm_head\.weight"),
        ("embedding.word_embeddings.weight", r"nothing holds model\.embed_tokens\.weight"),
    ],
)
def test_a_missing_parameter_is_named_with_the_rank(missing: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        hf_state(Model(CONFIG, without(missing)), config=CONFIG)


LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
LATENT_MODEL = {
    "multi_latent_attention": True, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_head_dim": 2, "qk_pos_emb_head_dim": 2,
    "v_head_dim": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("hf", "changes", "said"),
    [
        ({}, {"num_attention_heads": 8}, "num_attention_heads is 8 on trainer rank 0"),
        ({}, {"num_query_groups": 4}, "num_query_groups is 4"),
        ({}, {"num_layers": 3}, "num_layers is 3"),
        ({}, {"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({}, {"layernorm_zero_centered_gamma": True}, "the weight minus one.*convert_norms=True"),
        ({}, {"moe_mlp_glu_interleave_size": 32}, "alternate 32 rows of gate and up"),
        ({}, {"moe_shared_expert_glu_interleave_size": 8}, r"alternate 8 rows of gate and up \(moe_shared_expert"),
        (LATENT | {"rope_interleave": False}, LATENT_MODEL, "rope_interleave=False"),
        (LATENT | {"v_head_dim": 3}, LATENT_MODEL, "v_head_dim is 2"),
        ({}, {"virtual_pipeline_model_parallel_size": 2}, "2 virtual pipeline stages, and hf_state got 1 model chunks"),
        ({"model_type": "gpt_oss"}, {}, "'gpt_oss' cannot be published without a conversion: .* every column would be a box"),
        ({"model_type": "glm4"}, {}, "no rules for model_type 'glm4'; known: deepseek_v3, llama"),
        ({"tie_word_embeddings": True}, {}, "share_embeddings_and_output_weights is False"),
    ],
)
def test_configurations_that_contradict_each_other_are_refused(hf: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        hf_state(Model(CONFIG, parameters(), **changes), config=llama_config(**hf))


def test_the_final_norm_is_looked_for_in_the_stage_that_has_it() -> None:
    """With prediction layers it is in the stage of the last decoder layer, and the last stage may have no decoder layer."""
    middle = Model(CONFIG, {**stage(True, False, copies=2), "decoder.final_layernorm.weight": torch.ones(8)}, [0, 1], last=False)
    assert "model.norm.weight" in [shard.name for shard in hf_state(middle, config=CONFIG).declare()[1]]
    head: Any = Model(CONFIG, {"output_layer.weight": torch.randn(12, 8)}, [], first=False)
    head.decoder.final_layernorm = None
    assert [shard.name for shard in hf_state(head, config=CONFIG).declare()[1]] == ["lm_head.weight"]


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_a_prediction_layer_is_known_by_both_names_of_its_inner_layer(inner: str) -> None:
    model: Any = Model(CONFIG, parameters())
    layer: Any = nn.Module()
    layer.layer_number = 1
    layer.add_module(inner, nn.Module())
    layer.get_submodule(inner).mlp = nn.Module()
    layer.get_submodule(inner).mlp.local_expert_indices = [4, 5]
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList([layer])
    chunk = ModelChunk(model)
    assert chunk.locate(f"mtp.layers.0.{inner}.mlp.experts.linear_fc1.weight1") == (2, "mlp.experts.5.linear_fc1.weight")
    assert chunk.locate("mtp.layers.0.enorm.weight") == (2, "enorm.weight")


def test_parameters_without_memory_are_named_before_a_publication() -> None:
    """Frameworks offload a model by resizing the storage of its parameters to zero."""
    model = Model(CONFIG, parameters())
    state = hf_state(model, config=CONFIG)
    memory = model.get_parameter("output_layer.weight").untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    with pytest.raises(LayoutError, match=r"output_layer\.weight on trainer rank 0 has no memory: .* Load the parameters back"):
        state.declare()
    memory.resize_(size)
    assert state.declare()


@pytest.mark.parametrize("name", ["linear_qkv.to_wrap.weight", "linear_qkv.adapter.linear_in.weight", "linear_qkv.lora_a.weight"])
def test_an_adapter_is_named_and_to_be_published_apart(name: str) -> None:
    model = Model(CONFIG, {**parameters(), f"decoder.layers.0.self_attention.{name}": torch.ones(2, 2)})
    with pytest.raises(
        LayoutError, match=r"layers\.0\.self_attention\.linear_qkv.* belongs to an adapter \(LoRA\).*apart, with hf_state"
    ):
        hf_state(model, config=CONFIG)


def adapted(more: dict[str, torch.Tensor] | None = None, rank: int = 4) -> Model:
    """A model with Megatron-Bridge's LoRA on its attention's output."""
    given, layer = parameters(), "decoder.layers.{}.self_attention.linear_proj."
    for number in range(2):
        given[layer.format(number) + "to_wrap.weight"] = given.pop(layer.format(number) + "weight")
        given[layer.format(number) + "adapter.linear_in.weight"] = torch.randn(rank, 8)
        given[layer.format(number) + "adapter.linear_out.weight"] = torch.randn(8, rank)
    model = Model(CONFIG, given | (more or {}))
    for name, module in model.named_modules():
        if name.endswith(".adapter"):
            module.dim = rank
    return model


def test_base_and_adapter_are_published_apart() -> None:
    model = adapted()
    base, adapter = (held(hf_state(model, config=CONFIG, lora=part)) for part in ("base", "adapter"))
    layer: Any = model.get_submodule("decoder.layers.1.self_attention.linear_proj")
    assert torch.equal(base["model.layers.1.self_attn.o_proj.weight"], layer.to_wrap.weight)
    assert not any(value.isnan().any() for value in base.values())
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_{}.weight"
    assert torch.equal(adapter[name.format("A")], layer.adapter.linear_in.weight)
    assert torch.equal(adapter[name.format("B")], layer.adapter.linear_out.weight)
    assert len(adapter) == 4


def test_what_is_no_lora_of_megatron_bridge_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"has no LoRA of Megatron-Bridge"):
        hf_state(Model(CONFIG, parameters()), config=CONFIG, lora="adapter")
    with pytest.raises(ConfigurationError, match=r"bridge=\) has no rules: .* and lora"):
        hf_state(adapted(), config=CONFIG, lora="base", bridge=lambda name, whole: [])
    experts = adapted({"decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight": torch.randn(4, 8)})
    with pytest.raises(LayoutError, match=r"no rule for parameter decoder\.layers\.0\.mlp\.experts\.linear_fc1\.adapter"):
        hf_state(experts, config=CONFIG, lora="adapter")
    some = adapted()
    del some.get_submodule("decoder.layers.0.self_attention.linear_proj").adapter
    with pytest.raises(LayoutError, match=r"nothing holds base_model\.model\.model\.layers\.0\.self_attn\.o_proj\.lora_A\.weight"):
        hf_state(some, config=CONFIG, lora="adapter")


def test_a_parameter_without_a_rule_is_named_before_megatron_is_asked_for_its_shards() -> None:
    """Megatron's MLP fails with an AttributeError on a plain nn.Linear inside it."""
    model: Any = Model(CONFIG, {**parameters(), "decoder.layers.0.mlp.extra.weight": torch.ones(2, 2)})

    def fails(metadata: dict[str, Any]) -> dict[str, Any]:
        raise AttributeError("'Linear' object has no attribute 'sharded_state_dict'")

    model.sharded_state_dict = fails
    with pytest.raises(LayoutError, match=r"no rule for parameter decoder\.layers\.0\.mlp\.extra\.weight"):
        hf_state(model, config=CONFIG)


def test_two_chunks_that_claim_a_layer_are_refused() -> None:
    chunks = [Model(CONFIG, parameters(), virtual_pipeline_model_parallel_size=2) for _ in range(2)]
    with pytest.raises(ConfigurationError, match=r"holds layers \[0, 1, 0, 1\]"):
        hf_state(chunks, config=CONFIG)


@pytest.mark.parametrize("given", [[], nn.Linear(2, 2)])
def test_what_is_not_a_model_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="hf_state"):
        hf_state(given, config=CONFIG)


class Watched(weightsync.ModuleAdapter):
    """An engine that counts its pauses."""

    pauses = 0

    def pause(self, mode: weightsync.PauseMode, timeout: float) -> None:
        self.pauses += 1
        super().pause(mode, timeout)


def publish(*models: Model, hf: Any) -> tuple[WeightSyncError, int]:
    """What the first rank's publish() raises, of ranks that are threads of this process, and how often the engine was paused."""
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import ExitStack

    from weightsync.server.server import BackgroundServer

    states = [hf_state(model, config=hf) for model in models]
    served = nn.Module()
    for spec in states[0].declare()[0]:
        place(served, spec.name, torch.zeros(spec.shape))
    if hf.tie_word_embeddings:
        place(served, "lm_head.weight", served.get_parameter("model.embed_tokens.weight"))
    with ExitStack() as stack:
        server = stack.enter_context(BackgroundServer())
        adapter, world = Watched(served), len(models)
        engine = weightsync.Engine(adapter, replica="module-0", coordinator=server.url, token=server.token, transports=["inproc"])
        stack.enter_context(engine)
        pool = stack.enter_context(ThreadPoolExecutor(world))

        def rank(number: int) -> WeightSyncError | None:
            member = {"rank": number, "world_size": world}
            with weightsync.Trainer(states[number], server.url, token=server.token, **member, transports=["inproc"]) as trainer:  # type: ignore[arg-type]
                try:
                    trainer.wait_for_replicas(1, timeout=20)
                    trainer.publish(1, timeout=40)
                except WeightSyncError as error:
                    return error
            return None

        raised = next(iter(pool.map(rank, range(world))))
    assert raised is not None
    return raised, adapter.pauses


def stage(first: bool, last: bool, *, copies: int = 1) -> dict[str, torch.Tensor]:
    """Parameters of a pipeline stage with ``copies`` layers."""
    apart: tuple[str, ...] = () if first else ("embedding",)
    apart += () if last else ("output", "decoder.final")
    return {name: value for name, value in parameters(layers=copies).items() if not name.startswith(apart)}


def test_a_missing_pipeline_stage_is_named_by_its_tensors() -> None:
    error, pauses = publish(Model(CONFIG, stage(True, False), [0], pp=(0, 2), last=False), hf=CONFIG)
    assert isinstance(error, LayoutError | RoundFailed)
    assert "lm_head.weight" in str(error) or "model.layers.1" in str(error)
    assert not pauses


def test_tied_weights_that_differ_between_stages_are_refused() -> None:
    hf = llama_config(tie_word_embeddings=True)
    first = Model(hf, stage(True, False), [0], pp=(0, 2), last=False)
    error, pauses = publish(first, Model(hf, stage(False, True), [1], pp=(1, 2), first=False), hf=hf)
    assert isinstance(error, VerificationError | RoundFailed)
    assert "diverged" in str(error)
    assert "model.embed_tokens.weight (on trainer/0, trainer/1)" in str(error)
    assert not pauses


def test_two_stages_that_claim_a_layer_are_refused() -> None:
    first = Model(CONFIG, stage(True, False, copies=2), [0, 1], pp=(0, 2), last=False)
    error, pauses = publish(first, Model(CONFIG, stage(False, True), [1], pp=(1, 2), first=False), hf=CONFIG)
    assert isinstance(error, VerificationError | RoundFailed)
    assert "model.layers.1.mlp.down_proj.weight (on trainer/0, trainer/1)" in str(error)
    assert "model.layers.0" not in str(error)
    assert not pauses
