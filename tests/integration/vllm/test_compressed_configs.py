"""Every preset of compressed-tensors, as the package writes its configuration and compresses a layer, is a format or is refused."""

from __future__ import annotations

import pytest
import torch

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.served_formats import formats_as_served, formats_of_config
from weightsync.tensors.shards import dtype_name

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PRESETS = {
    "FP8": "fp8-tensor",
    "FP8_DYNAMIC": "fp8-channel",
    "FP8_BLOCK": "fp8-block-compressed",
    "NVFP4A16": "nvfp4",
    "NVFP4": "nvfp4",
    "MXFP4A16": "mxfp4",
    "MXFP4": "mxfp4",
    "MXFP8A16": "mxfp8",
    "MXFP8": "mxfp8",
    "W4A16": "int4-group128",
    "W4A16_ASYM": "symmetric of group_0 says, False",
    "W4A8": "format of group_0 says, 'int-quantized'",
    "W4AFP8": "format of group_0 says, 'int-quantized'",
    "W8A16": "weights of group_0, .* int, 8, group, 128",
    "W8A8": "weights of group_0, .* int, 8, channel, None",
    "INT8": "weights of group_0, .* int, 8, channel, None",
    "UNQUANTIZED": "quantizes none",
}
"""The format of each preset, or what the error says."""


def test_no_preset_is_new() -> None:
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert PRESET_SCHEMES.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_compressed_layer_and_its_configuration(preset: str) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    plain = Manifest([TensorSpec("0.weight", (256, 256), "bfloat16")])
    config = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])}, ignore=["lm_head"])
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False)).bfloat16()
    if preset != "UNQUANTIZED":
        apply_quantization_config(model, config)
        for name, parameter in model.named_parameters():
            if "scale" in name:
                parameter.data.fill_(1)
        compressor = ModelCompressor.from_pretrained_model(model)
        with torch.compiler.set_stance("force_eager"):
            compressor.compress_model(model)
        config = compressor.quantization_config
    written = config.model_dump(mode="json")
    held = [TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in model.state_dict().items()]
    if " " in PRESETS[preset]:
        with pytest.raises(ConfigurationError, match=PRESETS[preset]):
            formats_of_config(plain, written)
        return
    (found,) = formats_of_config(plain, written).values()
    assert (found.name, {"0.weight": found}) == (PRESETS[preset], formats_as_served(plain, "r", held))
    left = {spec.name for spec in held} - {part.name for part in found.specs(plain[0])}
    assert left <= {"0.input_scale", "0.input_global_scale"}  # of activations
