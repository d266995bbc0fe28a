"""Traced layouts, applied with the project's own plan and copies, are bit for bit what engines' own loaders do.

On checkpoints that Transformers writes, into engine-like parameters (tensor parallel 1 and 2) and by Transformers' own loading
code; and a whole round into a traced engine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.tracing.tracing_delivery import deliver, saved, scramble
from tests.integration.tracing.tracing_engines import LikeAnEngine, Sizes

import weightsync
from weightsync.model import Manifest, PauseMode
from weightsync.tensors.shards import Shard, manifest_of
from weightsync.tracing.tracer import ShardsByTracing, Traced, trace_loader

transformers = pytest.importorskip("transformers")

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, HEAD = 101, 64, 48, 2, 8, 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": HEAD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: configuration class, its arguments, and what the engine is told
    "dense, grouped query": ("Qwen2Config", {"num_key_value_heads": 2}, {"kv_heads": 2}),
    "tied, padded vocabulary": (
        "Qwen2Config",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"kv_heads": 1, "tied": True},
    ),
    "experts": (
        "MixtralConfig",
        {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"kv_heads": 4, "experts": 4},
    ),
    "fused in the checkpoint": ("Phi3Config", {"num_key_value_heads": 2}, {"kv_heads": 2, "fused": True}),
    "all experts in one tensor": (
        "GptOssConfig",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"kv_heads": 2, "experts": 4, "interleaved": True},
    ),
}

ENGINE_LACKS = (".sinks", "o_proj.bias", "down_proj_bias", "router.bias", "q_norm", "k_norm")
RENAMED = {".block_sparse_moe.": ".mlp.", ".mlp.router.": ".mlp.gate."}


def config_of(name: str) -> Any:
    kind, more, _ = MODELS[name]
    return getattr(transformers, kind)(**(COMMON | more))


def model_of(name: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def known_to_the_engine(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The toy engines have no place for some of the odder tensors, and one name for the experts' part."""
    found = {}
    for name, tensor in checkpoint.items():
        if not any(part in name for part in ENGINE_LACKS):
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            found[name] = tensor
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_engine_like_loaders(name: str, ranks: int, seed: int, tmp_path: Path) -> None:
    checkpoint = known_to_the_engine(saved(model_of(name, seed), tmp_path))
    manifest = manifest_of(checkpoint)
    sizes = Sizes(VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, head=HEAD, **MODELS[name][2])
    shards: list[list[Shard]] = []
    engines: list[LikeAnEngine] = []
    for rank in range(ranks):
        twin = LikeAnEngine(sizes, rank, ranks, device="meta")
        traced = trace_loader(twin.load_weights, twin.parameters, manifest)
        assert (traced.fallback, traced.unused) == ({}, {})
        engine = LikeAnEngine(sizes, rank, ranks)
        engine.load_weights(checkpoint.items())  # as every engine that serves once did; and so its padding is zero
        shards.append(traced.shards(engine.parameters))
        engines.append(engine)
        padding = max(engine.rows.stop - max(VOCABULARY, engine.rows.start), 0) * HIDDEN
        biases = {one: p.numel() for one, p in engine.parameters.items() if one.endswith(".bias") and one not in biased(checkpoint)}
        tables = [one for one in engine.parameters if one.endswith(("embed_tokens.weight", "lm_head.weight"))]
        assert traced.unwritten == biases | ({table: padding for table in tables} if padding else {})
    generator = torch.Generator().manual_seed(seed)
    for number in range(2):  # a second version, or stale bytes would stay invisible
        for tensor in checkpoint.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        for mine in shards:
            scramble(mine, generator)
        assert deliver(manifest, checkpoint, shards) >= manifest.nbytes
        for rank, engine in enumerate(engines):
            wanted = LikeAnEngine(sizes, rank, ranks)
            wanted.load_weights(checkpoint.items())
            for parameter, value in wanted.parameters.items():
                assert torch.equal(value.nan_to_num(7), engine.parameters[parameter].nan_to_num(7)), (number, rank, parameter)


def biased(checkpoint: dict[str, torch.Tensor]) -> set[str]:
    return {name.replace("q_proj", "qkv_proj") for name in checkpoint if name.endswith(".bias")}


def by_transformers(model: torch.nn.Module) -> Callable[[Iterable[tuple[str, torch.Tensor]]], object]:
    """Transformers' own loading code, without files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    device = str(next(model.parameters()).device)

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        mapping: Any = get_model_conversion_mapping(model)
        chosen = LoadStateDictConfig(weight_mapping=mapping, device_map={"": device}, dtype=torch.bfloat16)
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), chosen, None)
        model.tie_weights()  # type: ignore[operator]
        return info

    return load


@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_loading(name: str, seed: int, tmp_path: Path) -> None:
    checkpoint = saved(model_of(name, seed), tmp_path)
    manifest = manifest_of(checkpoint)
    with torch.device("meta"):
        twin = transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    traced = trace_loader(by_transformers(twin), twin, manifest)
    assert (traced.fallback, traced.unused, traced.partial, traced.unwritten) == ({}, {}, {}, {})
    assert traced.reason() is None
    wanted, engine = model_of(name, seed + 1), model_of(name, seed + 2)
    by_transformers(wanted)(checkpoint.items())
    assert deliver(manifest, checkpoint, [traced.shards(engine)]) == manifest.nbytes
    values = dict(engine.named_parameters(remove_duplicate=False))
    for parameter, value in wanted.named_parameters(remove_duplicate=False):
        assert torch.equal(value, values[parameter]), parameter


class Converting(LikeAnEngine):
    """Does with some tensors what quantizing engines do."""

    def _load(self, name: str, loaded: torch.Tensor) -> str:
        if name.endswith("layers.0.self_attn.o_proj.weight"):
            scale = loaded.abs().amax(dim=1, keepdim=True)
            self.parameters[name].data.copy_(loaded / scale)
            return name
        if name.endswith("layers.0.mlp.down_proj.weight"):
            self.parameters[name].data.copy_((loaded.t() * 2).contiguous().t())
            return name
        if name == "model.norm.weight":
            self.parameters[name].data.copy_(loaded.float())
            return name
        if name == "model.layers.1.input_layernorm.weight" and loaded.max().item() > 0:
            self.parameters[name].data.copy_(loaded)
            return name
        return super()._load(name, loaded)


def test_what_a_loader_transforms_is_named_and_streamed(seed: int, tmp_path: Path) -> None:
    manifest = manifest_of(saved(model_of("dense, grouped query", seed), tmp_path))
    sizes = Sizes(VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, kv_heads=2, head=HEAD)
    twin = Converting(sizes, device="meta")
    traced = trace_loader(twin.load_weights, twin.parameters, manifest)
    assert traced.fallback == {
        "model.layers.0.mlp.down_proj.weight": "it goes through mul on its way to model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.o_proj.weight": "it goes through div on its way to model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.input_layernorm.weight": "the loader reads its values (local_scalar_dense)",
        "model.norm.weight": "it is converted from torch.bfloat16 to torch.float32 on its way to model.norm.weight",
    }
    assert {manifest[copy.tensor].name for copy in traced.copies} == {spec.name for spec in manifest} - set(traced.fallback)
    direct = ShardsByTracing(twin.load_weights, twin.parameters, manifest)
    assert direct.of(Converting(sizes).parameters) is None
    assert "model.layers.0.mlp.down_proj.weight (it goes through mul" in str(direct.reason)


class TracedAdapter(weightsync.EngineAdapter):
    """An engine-like model whose layout nobody wrote down."""

    def __init__(self, engine: LikeAnEngine, twin: LikeAnEngine, manifest: Manifest) -> None:
        self.engine, self._manifest = engine, manifest
        self.traced = ShardsByTracing(twin.load_weights, twin.parameters, manifest)

    def manifest(self) -> Manifest:
        return self._manifest

    def shards(self) -> list[Shard] | None:
        return self.traced.of(self.engine.parameters)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        pass

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine.load_weights(tensors)


@pytest.mark.parametrize(("kind", "delivery"), [(LikeAnEngine, "direct"), (Converting, "streamed")])
def test_rounds_into_a_traced_engine(kind: type[LikeAnEngine], delivery: str, seed: int, tmp_path: Path, no_leaks: None) -> None:
    model = model_of("dense, grouped query", seed)
    manifest = manifest_of(saved(model, tmp_path))
    sizes = Sizes(VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, kv_heads=2, head=HEAD)
    engine = kind(sizes)
    adapter = TracedAdapter(engine, kind(sizes, device="meta"), manifest)
    with weightsync.Trainer(model, transports=["inproc"]) as trainer:
        environment = trainer.environment
        where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
        with weightsync.Engine(adapter, replica="traced", coordinator=where, token=token):
            for number in (1, 2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(torch.randn(parameter.shape))
                result = trainer.publish(number, timeout=30)
                assert [(one.state, one.delivery) for one in result.replicas] == [("loaded", delivery)]
                wanted = kind(sizes)
                wanted.load_weights(model.state_dict().items())
                padding = wanted.rows.stop - VOCABULARY
                for name, value in wanted.parameters.items():
                    rows = slice(None, -padding) if name.endswith(("embed_tokens.weight", "lm_head.weight")) else slice(None)
                    assert torch.equal(value[rows], engine.parameters[name][rows]), name


def test_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/guides/tracing.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    namespace: dict[str, Any] = {"__name__": "guide_tracing"}
    exec(compile(code, "tracing.md", "exec"), namespace)
    assert "q_proj.weight[0, 0] -> qkv.weight at 0, strides (8, 1)\n" in capsys.readouterr().out
    model = namespace["TinyModel"]()
    adapter = namespace["TracedAdapter"](model)
    checkpoint = {spec.name: torch.randn(spec.shape) for spec in adapter.manifest()}
    deliver(adapter.manifest(), checkpoint, [adapter.shards()])
    wanted = namespace["TinyModel"]()
    wanted.load_weights(checkpoint.items())
    assert torch.equal(model.qkv.weight, wanted.qkv.weight)
    assert torch.equal(model.out.weight, wanted.out.weight)
    fields = {field.name for field in dataclasses.fields(Traced)} - {"manifest", "parameters"}
    assert fields <= set(re.findall(r"^\| `(\w+)[`(]", page, re.MULTILINE))
