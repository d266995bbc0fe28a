"""Real Megatron-core models in real processes: published without a gather, they arrive in Transformers' module bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.megatron.megatron_cases import MESHES, TIED, Case, fsdp_values, hf_config
from tests.integration.megatron.megatron_process import Ranks
from tests.integration.rounds.test_adapters import Part

import weightsync

NEEDED = [name for name in ("megatron", "mbridge", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(180),  # the ranks share two cores with whatever else runs
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}: make"),
]

FORWARD: dict[str, Any] = {"dtype": "float32", "forward": True}
QUICK = [
    Case("llama", tp=2, versions=2, **FORWARD),
    Case("qwen2", pp=2, vpp=2, versions=2, changes=TIED),
    Case("qwen3_moe", tp=2, ep=2, etp=1, versions=2),
    Case("deepseek_v3", tp=2, ep=2, versions=2, stacked=False),
]
RARE = [
    Case("llama", tp=2, dp=2),
    Case("llama", tp=2, cp=2),
    Case("llama", tp=4, changes={"num_key_value_heads": 2}),
    Case("llama", pp=2, first_stage=1, changes=TIED),
    Case("qwen2", tp=2, changes=TIED, **FORWARD),
    Case("qwen3", tp=2, **FORWARD),
    Case("qwen3_moe", ep=2, dp=2),
    Case("qwen3_moe", tp=2, ep=2, etp=1, pp=2, stacked=False),
    Case("mixtral", ep=2, pp=2, vpp=2, stacked=False),
    Case("deepseek_v3", ep=2, pp=2, first_stage=3, stacked=False),
    Case("deepseek_v3", tp=2, ep=2, mtp=1, stacked=False),
    Case("deepseek_v3", ep=2, pp=2, mtp=1, stacked=False),
]
BRIDGED = [
    Case("glm4_moe", tp=2, versions=2, stacked=False, bridge="megatron_bridge", exported=True),
    Case("mixtral", tp=2, ep=2, etp=1, stacked=False, changes={"head_dim": 8}, bridge="mbridge"),
    Case("llama", tp=2, bridge="function"),
]
BRIDGED_RARE = [
    Case("deepseek_v3", tp=2, ep=2, stacked=False, bridge="megatron_bridge"),
    Case("llama", tp=4, changes={"num_key_value_heads": 2}, bridge="megatron_bridge"),
    Case("qwen2", tp=2, pp=2, changes=TIED, bridge="megatron_bridge"),
    Case("qwen3_moe", tp=2, ep=2, etp=2, pp=2, stacked=False, changes={"mlp_only_layers": []}, bridge="megatron_bridge"),
    Case("deepseek_v3", ep=2, pp=2, vpp=2, stacked=False, bridge="megatron_bridge"),
    Case("qwen3", tp=2, pp=2, changes=TIED, bridge="mbridge"),
    Case("llama", tp=4, changes={"num_key_value_heads": 2, "head_dim": 8}, bridge="mbridge"),
]
RARE += [case for case in MESHES if str(case) not in map(str, QUICK + RARE)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("megatron"))
    yield started
    started.close()


def _module(case: Case) -> torch.nn.Module:
    """The engine's module: Transformers' own, or one that has its parameters under the names of the checkpoint."""
    from transformers import AutoModelForCausalLM

    hf = hf_config(case.family, case.changes)
    layers = hf.num_hidden_layers
    hf.num_hidden_layers += case.mtp  # Transformers has no prediction layers: they are layers and what is around
    module = AutoModelForCausalLM.from_config(hf, dtype=getattr(torch, case.dtype))
    for name, value in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.data = value.data.float()  # as checkpoints have it
    if case.stacked:
        return module  # type: ignore[no-any-return]
    around = {
        "enorm": (64,), "hnorm": (64,), "eh_proj": (64, 128), "shared_head.norm": (64,), "shared_head.head": (hf.vocab_size, 64),
        "embed_tokens": (hf.vocab_size, 64),
    }  # fmt: skip
    more = {f"model.layers.{layers}.{name}.weight": torch.zeros(shape, dtype=module.dtype) for name, shape in around.items()}
    return Checkpoint(module, more if case.mtp else {})


class Checkpoint(torch.nn.Module):
    """Parameters under the names that Transformers saves, as vLLM's loaders take them."""

    def __init__(self, model: Any, more: dict[str, torch.Tensor]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        super().__init__()
        for name, value in (revert_weight_conversion(model, model.state_dict()) | more).items():
            path, _, last = name.rpartition(".")
            module: torch.nn.Module = self
            for part in path.split("."):
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(value.clone()))


@pytest.mark.parametrize(
    "case", [*QUICK, *BRIDGED, *(pytest.param(case, marks=pytest.mark.rare) for case in RARE + BRIDGED_RARE)], ids=str
)
def test_every_version_arrives_in_transformers_bit_for_bit(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from tests.integration.megatron.megatron_reference import reference, stacked

    module = _module(case)
    adapter = weightsync.ModuleAdapter(module, include_buffers=True)
    ranks.begin(case, tmp_path)
    environment = ranks.read("environment")["environment"]
    where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
    with weightsync.Engine(adapter, replica="transformers-0", coordinator=where, token=token):
        for version in range(1, case.versions + 1):
            assert ranks.read("published")["replicas"] == [["loaded", "installed", "direct"]]
            exported = tmp_path / f"{version}-exported.safetensors"
            wanted = load_file(exported) if case.exported else reference(case, tmp_path, version)
            wanted = stacked(wanted) if case.stacked else wanted
            held = module.state_dict()
            assert set(held) == set(wanted)
            assert [name for name, value in wanted.items() if not torch.equal(held[name], value)] == []
            if case.forward:
                computed = load_file(tmp_path / f"{version}-logits.safetensors")
                with torch.no_grad():
                    logits = module(computed["ids"]).logits
                torch.testing.assert_close(logits, computed["logits"], rtol=1e-4, atol=1e-4)
            ranks.write("")
    ranks.end()


LORA = [
    Case("llama", tp=2, lora=4, versions=2, **FORWARD),
    Case("qwen3_moe", tp=2, ep=2, etp=1, lora=4, versions=2, stacked=False),
    pytest.param(Case("qwen3_moe", tp=2, ep=2, etp=2, pp=2, lora=4, stacked=False), marks=pytest.mark.rare),
    pytest.param(Case("llama", tp=2, pp=2, vpp=2, lora=4), marks=pytest.mark.rare),
    pytest.param(Case("deepseek_v3", tp=2, ep=2, lora=4, stacked=False), marks=pytest.mark.rare),
]


@pytest.mark.parametrize("case", LORA, ids=str)
def test_lora_of_megatron_bridge_arrives_beside_its_base_bit_for_bit(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from tests.integration.megatron.megatron_reference import adapter_reference, reference

    module = _module(case)
    engine = weightsync.ModuleAdapter(module, include_buffers=True, adapter_slots=4)
    received = Part()  # takes adapters of experts, too
    received.inner = engine
    ranks.begin(case, tmp_path)
    environment = ranks.read("environment")["environment"]
    where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
    with weightsync.Engine(engine if case.forward else received, replica="transformers-0", coordinator=where, token=token):
        for version in range(1, case.versions + 1):
            assert ranks.read("published")["replicas"] == [["loaded", "installed", "streamed"]]
            if case.forward:
                computed = load_file(tmp_path / f"{version}-logits.safetensors")
                with torch.no_grad(), engine.in_use(adapter=f"megatron/lora@{version}"):
                    logits = module(computed["ids"]).logits
                torch.testing.assert_close(logits, computed["logits"], rtol=1e-4, atol=1e-4)
            else:
                held, wanted = received.staged[f"megatron/lora@{version}"], adapter_reference(case, tmp_path, version)
                assert set(held) == set(wanted)
                assert [name for name, value in wanted.items() if not torch.equal(held[name], value)] == []
            base, wanted = module.state_dict(), reference(case, tmp_path, version)
            assert [name for name, value in wanted.items() if not torch.equal(base[name], value)] == []
            ranks.write("")
    ranks.end()


FSDP = [
    Case("llama", dp=3, versions=2, fsdp=True),
    pytest.param(Case("llama", dp=2, tp=2, fsdp=True), marks=pytest.mark.rare),
    pytest.param(Case("qwen2", dp=2, changes=TIED, fsdp=True), marks=pytest.mark.rare),
]


@pytest.mark.parametrize("case", FSDP, ids=str)
def test_what_megatron_fsdp_shards_arrives_bit_for_bit(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    """It cuts tensors at other rows than torch does, some ranks have all of one."""
    module = _module(case)
    ranks.begin(case, tmp_path)
    environment = ranks.read("environment")["environment"]
    where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
    with weightsync.Engine(weightsync.ModuleAdapter(module), replica="transformers-0", coordinator=where, token=token):
        for version in range(1, case.versions + 1):
            assert ranks.read("published")["replicas"] == [["loaded", "installed", "direct"]]
            for name, value in module.named_parameters():
                assert torch.equal(value, fsdp_values(name, version, tuple(value.shape))), name
            ranks.write("")
    ranks.end()


REFUSED: list[tuple[Case, dict[str, Any], str]] = [
    (Case("llama", tp=2), {"num_attention_heads": 4}, "ConfigurationError: Megatron's num_attention_heads is 8 on trainer rank 0"),
    (Case("llama", tp=2), {"num_key_value_heads": 2}, "ConfigurationError: Megatron's num_query_groups is 4"),
    (Case("llama", tp=2), {"head_dim": 16}, "ConfigurationError: Megatron's kv_channels is 8"),
    (Case("llama", tp=2), {"vocab_size": 300}, "LayoutError: embedding.word_embeddings.weight on trainer rank 0 (TP 0 of 2)"),
    (Case("llama", tp=2), {"num_hidden_layers": 5}, "ConfigurationError: Megatron's num_layers is 4"),
    (Case("llama", tp=2), {"tie_word_embeddings": True}, "ConfigurationError: share_embeddings_and_output_weights is False"),
    (Case("llama", tp=2), {"attention_bias": True}, "LayoutError: nothing holds model.layers.0.self_attn.q_proj.bias on trainer"),
    # Half as wide: what each of two ranks holds has the shape of the whole.
    (Case("llama", tp=2), {"intermediate_size": 48}, "the model's sharded_state_dict() says [192, 64]"),
    (Case("qwen3_moe", tp=2, etp=2), {"moe_intermediate_size": 16}, "the model's sharded_state_dict() says [64, 64]"),
    (Case("qwen3_moe", tp=2, etp=2), {"num_experts": 4}, "num_moe_experts is 8 on trainer rank 0 (TP 0 of 2, ETP 0 of 2)"),
    (Case("qwen3_moe", tp=2, etp=2), {"mlp_only_layers": [1]}, "no rule for parameter decoder.layers.0.mlp.linear_fc1"),
    (Case("deepseek_v3", tp=2, etp=2), {"qk_nope_head_dim": 8, "v_head_dim": 14}, "Megatron's qk_head_dim is 12"),
    (Case("deepseek_v3", tp=2, etp=2), {"n_shared_experts": 1}, "mlp.shared_experts.linear_fc1.weight on trainer rank 0"),
]  # fmt: skip


@pytest.mark.parametrize("case", dict.fromkeys(case for case, _, _ in REFUSED), ids=str)
def test_a_configuration_that_contradicts_the_weights_is_refused(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    contradictions = [(changes, words) for other, changes, words in REFUSED if other == case]
    ranks.begin(replace(case, contradictions=[changes for changes, _ in contradictions]), tmp_path)
    errors = ranks.read("errors")["errors"]
    assert [error for error, (_, words) in zip(errors, contradictions, strict=True) if words not in error] == []
    ranks.end()
