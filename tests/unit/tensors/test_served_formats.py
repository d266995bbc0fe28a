"""Formats by a model's quantization_config, as Transformers and compressed-tensors write it, and by the tensors of an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import FineGrainedFP8Config

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.formats import FORMATS
from weightsync.tensors.served_formats import choose_formats, formats_as_served

ATTENTION, EXPERT, GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.gate"
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
MANIFEST = Manifest(
    [
        *(TensorSpec(f"{name}.weight", (256, 256), "bfloat16") for name in (ATTENTION, EXPERT, GATE, HEAD, EMBEDDING)),
        TensorSpec("model.norm.weight", (256,), "bfloat16"),
        TensorSpec("visual.patch_embed.proj.weight", (64, 3, 2, 16, 16), "bfloat16"),
        TensorSpec("model.layers.0.A_log", (16, 16), "bfloat16"),
    ]
)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def chosen(config: Mapping[str, Any], manifest: Manifest = MANIFEST) -> dict[str, str]:
    """The format of each module that is quantized."""
    return {name.removesuffix(".weight"): each.name for name, each in choose_formats(config)(manifest).items()}


def arguments(bits: int, kind: str, strategy: str, **others: object) -> dict[str, object]:
    """Weights of a group, as ``QuantizationArgs.model_dump()`` of compressed-tensors 0.17 writes them."""
    empty = dict.fromkeys(("group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype"))
    given = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **empty}
    return {**given, "observer": "memoryless_minmax", "observer_kwargs": {}, **others}


def compressed(
    weights: Mapping[str, object] | None,
    stored: str | None,
    *,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] | None = ("lm_head",),
    **others: object,
) -> dict[str, Any]:
    """A configuration of one group, as compressed-tensors 0.17 writes it."""
    group = {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None, "format": None}
    known = {"quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None, "version": "0.17.0"}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": stored, "ignore": ignore,
        "sparsity_config": {}, "transform_config": {}, **known, **others,
    }  # fmt: skip


def test_blocks_of_fp8_as_deepseek_and_transformers_write_them() -> None:
    linear = [ATTENTION, EXPERT]
    assert chosen(FP8 | {"fmt": "e4m3"}) == dict.fromkeys(linear, "fp8-block")
    assert chosen(FP8 | {"fmt": "e4m3", "scale_fmt": "ue8m0"}) == dict.fromkeys(linear, "fp8-block-e8m0")
    assert chosen(FineGrainedFP8Config().to_dict()) == dict.fromkeys(linear, "fp8-block")
    assert chosen(FineGrainedFP8Config(scale_fmt="ue8m0").to_dict()) == dict.fromkeys(linear, "fp8-block-e8m0")


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("skipped", "left"),
    [
        ([ATTENTION, "model.layers.1.mlp.gate"], [EXPERT]),
        (["q_proj"], [EXPERT]),
        (["proj", "layers.1"], [ATTENTION, EXPERT]),  # of names, only whole parts count
        (["model.layers.1"], [ATTENTION]),
        ([r"re:.*\.experts\..*"], [ATTENTION]),
        (["visual", "model.layers.61"], [ATTENTION, EXPERT]),  # what this trainer does not have
        (None, [ATTENTION, EXPERT]),
    ],
)
def test_modules_that_are_not_converted(field: str, skipped: list[str] | None, left: list[str]) -> None:
    assert list(chosen(FP8 | {field: skipped})) == left


@pytest.mark.parametrize(
    ("weights", "stored", "name"),
    [
        (arguments(8, "float", "channel"), "float-quantized", "fp8-channel"),
        (arguments(8, "float", "tensor"), "float-quantized", "fp8-tensor"),
        (arguments(8, "float", "tensor"), "naive-quantized", "fp8-tensor"),
        (arguments(8, "float", "block", block_structure=[128, 128]), "float-quantized", "fp8-block-compressed"),
        (arguments(8, "float", "block", block_structure="128x128"), "float-quantized", "fp8-block-compressed"),
        (arguments(4, "int", "group", group_size=32), "pack-quantized", "int4-group32"),
        (arguments(4, "int", "group", group_size=128), "pack-quantized", "int4-group128"),
        (arguments(4, "int", "group", group_size=128, actorder="static"), "pack-quantized", "int4-group128"),
        (arguments(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"), "nvfp4-pack-quantized", "nvfp4"),
        (arguments(4, "float", "group", group_size=32, scale_dtype="torch.uint8"), "mxfp4-pack-quantized", "mxfp4"),
        (arguments(8, "float", "group", group_size=32, scale_dtype="torch.uint8"), "mxfp8-quantized", "mxfp8"),
        ({"num_bits": 4, "group_size": 128}, None, "int4-group128"),  # the rest are defaults
        ({"type": "float"}, None, "fp8-tensor"),
        ({"type": "float", "group_size": -1}, None, "fp8-channel"),
    ],
)
def test_each_format_of_compressed_tensors(weights: Mapping[str, object], stored: str | None, name: str) -> None:
    assert chosen(compressed(weights, stored)) == dict.fromkeys([ATTENTION, EXPERT], name)
    assert HEAD in chosen(compressed(weights, stored, ignore=None))


def test_groups_names_and_regular_expressions_of_compressed_tensors() -> None:
    int4, fp8 = arguments(4, "int", "group", group_size=128), arguments(8, "float", "channel")
    config = compressed(fp8, "mixed-precision", ignore=["lm_head", "re:.*embed", "re:visual"])
    config["config_groups"]["group_1"] = {"targets": ["re:.*experts.*"], "weights": int4, "format": "pack-quantized"}
    config["config_groups"]["group_2"] = {"targets": ["Qwen3Attention"], "weights": None}  # of the KV cache alone
    assert chosen(config) == {ATTENTION: "fp8-channel", EXPERT: "int4-group128"}
    assert chosen(compressed(fp8, "float-quantized", targets=[GATE, "model.layers.7.mlp.gate"])) == {GATE: "fp8-channel"}
    assert chosen(compressed(fp8, "float-quantized", ignore=["re:.*q_proj", "layers.0"])) == dict.fromkeys(
        [EXPERT, HEAD], "fp8-channel"
    )


def test_a_head_tied_to_the_embedding_is_none_of_the_linear_layers() -> None:
    tied = TensorSpec(f"{HEAD}.weight", (256, 256), "bfloat16", (f"{EMBEDDING}.weight",))
    manifest = Manifest([tied, TensorSpec(f"{EXPERT}.weight", (256, 256), "bfloat16")])
    assert list(chosen(compressed(arguments(8, "float", "channel"), None, ignore=[]), manifest)) == [EXPERT]


INT4 = arguments(4, "int", "group", group_size=128)
REFUSED: list[tuple[Mapping[str, Any], str]] = [
    *(
        ({"quant_method": name}, f"'{name}': its scales depend on more")
        for name in ("gguf", "awq", "awq_marlin", "gptq", "bitsandbytes")
    ),
    (
        {"quant_method": "mxfp4"},
        "cannot write quant_method 'mxfp4': no format is its. Configurations of fp8 and compressed-tensors",
    ),
    ({"quant_method": "quip"}, "cannot write quant_method 'quip'"),
    ({"quant_method": None}, "cannot write quant_method None"),
    (
        FP8 | {"weight_block_size": [64, 128]},
        r"weight_block_size of quantization_config says, \[64, 128\]; it can for \[128, 128\]",
    ),
    (FP8 | {"weight_block_size": None}, "weight_block_size of quantization_config says, None"),
    (FP8 | {"scale_fmt": "e5m2"}, "scale_fmt of quantization_config says, 'e5m2'; it can for 'float' or 'ue8m0'"),
    (FP8 | {"fmt": "e5m2"}, "fmt of quantization_config says, 'e5m2'"),
    (FP8 | {"expert_dtype": "fp4"}, "expert_dtype of quantization_config says, 'fp4'"),
    (FP8 | {"modules_to_convert": ["embed"]}, "modules_to_convert of quantization_config says"),
    (FP8 | {"modules_to_not_convert": ["model"]}, r"\(fp8\) quantizes none of this trainer's 8 tensors"),
    (FP8 | {"modules_to_not_convert": ["re:("]}, r"\(fp8\) is malformed: .*unterminated subpattern"),
    (FP8 | {"modules_to_not_convert": "visual"}, r"\(fp8\) is malformed: TypeError: a list of modules is wanted, not 'visual'"),
    (FP8 | {"modules_to_not_convert": [HEAD], "ignored_layers": [GATE]}, "ignored_layers of quantization_config says"),
    (compressed(INT4, None) | {"ignore": "lm_head"}, r"\(compressed-tensors\) is malformed: TypeError: a list"),
    (FP8 | {"modules_to_not_convert": 7}, r"\(fp8\) is malformed: TypeError"),
    ({"quant_method": "compressed-tensors"}, r"\(compressed-tensors\) is malformed: KeyError: 'config_groups'"),
    (compressed(INT4, None) | {"config_groups": {"W4A16": ["Linear"]}}, r"\(compressed-tensors\) is malformed: TypeError"),
    (compressed(INT4 | {"symmetric": False}, "pack-quantized"), "symmetric of group_0 says, False"),
    (compressed(INT4 | {"actorder": "group"}, "pack-quantized"), "actorder of group_0 says, 'group'"),
    (compressed(INT4 | {"actorder": "dynamic"}, "pack-quantized"), "actorder of group_0 says, 'dynamic'"),
    (compressed(INT4 | {"actorder": True}, "pack-quantized"), "actorder of group_0 says, True"),
    (compressed(INT4 | {"dynamic": True}, "pack-quantized"), "dynamic of group_0 says, True"),
    (compressed(INT4 | {"group_size": 64}, "pack-quantized"), "weights of group_0, .* int, 4, group, 64; formats: fp8-block,"),
    (compressed(INT4 | {"num_bits": 8}, "pack-quantized"), "weights of group_0, .* int, 8, group, 128"),
    (compressed(INT4, "marlin-24"), "format of group_0 says, 'marlin-24'; it can for 'pack-quantized'"),
    (compressed(arguments(8, "int", "channel"), "int-quantized"), "weights of group_0, .* int, 8, channel, None"),
    (compressed(arguments(8, "float", "block", block_structure=[1, 128]), "float-quantized"), r"block, \(1, 128\)"),
    (compressed(INT4, None, targets=["Embedding"]), "targets of group_0 says, 'Embedding'; it can for 'Linear'"),
    (compressed(INT4, None, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config of quantization_config"),
    (compressed(INT4, None, transform_config={"config_groups": {"u": {}}}), "transform_config of quantization_config"),
    (compressed(None, None), r"\(compressed-tensors\) quantizes none"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_no_format_has_is_refused_by_its_field(config: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choose_formats(config)(MANIFEST)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["Linear", "re:.*", "re:(", "128x128", "", "block", "é"]),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["format", "weights", "targets", "x"]), values, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data())
def test_any_value_of_any_field_is_understood_or_a_configuration_error(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from([json.dumps(FP8), json.dumps(compressed(INT4, "pack-quantized"))]).map(json.loads))
    place = config
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    with suppress(ConfigurationError):
        choose_formats(config)(MANIFEST)


def test_a_matrix_whose_blocks_do_not_divide_is_refused_by_its_name() -> None:
    manifest = Manifest([TensorSpec("a.weight", (64, 48), "bfloat16")])
    with pytest.raises(
        ConfigurationError, match=r"a\.weight cannot be quantized to int4-group128: .* do not divide its 48 columns"
    ):
        chosen(compressed(INT4, "pack-quantized"), manifest)


def test_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config in ({"quantization_config": FP8}, {"text_config": {"quantization_config": FP8}}):
        file.write_text(json.dumps(config))
        assert (
            set(choose_formats(tmp_path)(MANIFEST))
            == set(choose_formats(str(tmp_path))(MANIFEST))
            == set(choose_formats(FP8)(MANIFEST))
        )
    for text in ('{"hidden_size": 8}', "[]", "{", '{"text_config": null}'):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"config\.json holds no quantization_config \("):
            choose_formats(tmp_path)
    with pytest.raises(ConfigurationError, match=r"quantize='fp8-block' is neither 'as-served' nor the folder .* go with patterns"):
        choose_formats("fp8-block")


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_known_by_the_tensors_that_an_engine_holds(name: str) -> None:
    quantized = [spec for spec in MANIFEST if spec.name.startswith((ATTENTION, EXPERT))]
    served = [part for spec in quantized for part in FORMATS[name].specs(spec)] + [
        each for each in MANIFEST if each not in quantized
    ]
    found = formats_as_served(MANIFEST, "a", served)
    assert {tensor: each.name for tensor, each in found.items()} == {spec.name: name for spec in quantized}


def test_what_an_engine_holds_in_no_format_is_refused_by_the_names_of_its_tensors(caplog: pytest.LogCaptureFixture) -> None:
    (spec,) = manifest = Manifest([TensorSpec("a.weight", (256, 256), "bfloat16", ("b.weight",))])
    gptq = [
        TensorSpec("a.qweight", (32, 256), "int32"),
        TensorSpec("a.qzeros", (2, 32), "int32"),
        TensorSpec("a.scales", (2, 256), "float16"),
    ]
    with pytest.raises(
        ConfigurationError, match=r"replica r holds a.weight \(bfloat16 \[256, 256\]\) in no format .*: a.qweight \(int32 \["
    ):
        formats_as_served(manifest, "r", gptq)
    with pytest.raises(ConfigurationError, match=r"a.weight \(float8_e4m3fn \[256, 256\]\), a.weight_scale \(float32 \[\]\)"):
        formats_as_served(
            manifest, "r", [TensorSpec("a.weight", (256, 256), "float8_e4m3fn"), TensorSpec("a.weight_scale", (), "float32")]
        )
    with caplog.at_level("INFO"):
        assert formats_as_served(manifest, "r", [spec]) == {}
    assert "0 of 1 tensors are published quantized, because replica r holds no quantized ones" in caplog.text
    assert formats_as_served(manifest, "r", []) == {}  # joining says that it lacks the tensor


def test_thousands_of_tensors_of_other_names_take_no_time() -> None:
    manifest = Manifest([TensorSpec(f"layers.{number}.weight", (256, 256), "bfloat16") for number in range(8000)])
    other = [TensorSpec(f"blocks.{number}.weight", (256, 256), "bfloat16") for number in range(8000)]
    begun = time.process_time()
    assert not formats_as_served(manifest, "r", other)
    assert time.process_time() - begun < 5
