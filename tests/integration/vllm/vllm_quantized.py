# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, ANN206
"""Prints whether weights that the trainer quantized reach vLLM's own FP8 layers directly: ``python vllm_quantized.py FOLDER CASE``.

vLLM's CPU build has no kernel for blocks without AMX, so its Triton kernel's class stands in: what it does to weights after loading
is plain torch. Nothing is computed with the model.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.update(TORCHDYNAMO_DISABLE="1")  # vLLM compiles its cast to FP8

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.integration.quantized_checkpoints import EXPERTS, SIZES, quantized
from tests.integration.vllm.vllm_tracing import build

from weightsync.deadline import Deadline


def packed_scales(sf, mn, k, recipe, num_groups, is_sfa):
    """DeepGEMM's layout of scales on Blackwell: a power of two for each row and 128 columns, four to a word, columns first."""
    rows = sf.repeat_interleave(recipe[1], 1)[:, :mn]
    exponents = torch.nn.functional.pad((rows.view(torch.int32) >> 23).to(torch.uint8), (0, -rows.shape[2] % 4))
    words = exponents.contiguous().view(torch.int32)
    aligned = torch.zeros(num_groups, words.shape[2], -(-mn // 4) * 4, dtype=torch.int32)
    aligned[:, :, :mn] = words.transpose(1, 2)
    return aligned.transpose(1, 2)[:, :mn]


def deep_gemm(blackwell):
    """Let vLLM take its kernels of DeepGEMM for this CPU, whose functions for the layout of scales are written in torch here."""
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.layers.quantization.utils.fp8_utils as processing
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.platforms import PlatformEnum

    class DeepKernel(DeepGemmFp8BlockScaledMMKernel):
        is_supported = can_implement = classmethod(lambda cls, *_: (True, None))

        def __init__(self, config) -> None:
            super().__init__(config)
            self.use_deep_gemm_e8m0 = self.is_deep_gemm_supported = True

    processing.is_deep_gemm_e8m0_used = lambda: True
    processing.transform_sf_into_required_layout = packed_scales if blackwell else lambda sf, **_: sf
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [DeepKernel]
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.DEEPGEMM, object)


def compressed(strategy):
    """The configuration of FP8 by compressed-tensors. vLLM's CPU build refuses it, because it asks for a GPU's capability, and
    lacks an operator, with which vLLM gives fused matrices one scale."""
    import vllm._custom_ops as operators
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    operators.scaled_fp8_quant = lambda values, scale: ((values / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale)
    kind = {"type": "float", "num_bits": 8, "symmetric": True}
    weights = kind | {"strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": kind | {"strategy": "token", "dynamic": True}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def stand_in(change, copies):
    """Let vLLM take its Triton kernels for this CPU, of which ``change`` changes layers; with ``copies``, experts' kernels compute
    with a copy of theirs."""
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.layers.utils as layers
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.platforms import PlatformEnum

    class Kernel(kernels.TritonFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        @classmethod
        def can_implement(cls, config):
            return True, None

        def process_weights_after_loading(self, layer):
            super().process_weights_after_loading(layer)
            change(layer)

    # As on GPUs: on some CPUs it packs a weight for its own multiplication and leaves nothing in the parameter.
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Kernel]
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, object)

    def configure(self, layer):
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        if copies:
            self.moe_quant_config._w1.scale = layer.w13_weight_scale_inv * 2

    fp8.Fp8MoEMethod._init_moe_kernel = configure


def published(plain, served, method, kind):
    """What a trainer publishes, by name: in the formats that the engine holds, which its configuration and patterns give, too."""
    from weightsync.tensors.quantization import QuantizedShards, formats_by_pattern
    from weightsync.tensors.served_formats import formats_as_served, formats_of_config
    from weightsync.tensors.shards import shards_of

    manifest, shards = shards_of(plain)
    formats = formats_as_served(manifest, "replica", served)
    assert formats == formats_of_config(manifest, method) == formats_by_pattern(manifest, {"*_proj.weight": kind})
    made = QuantizedShards(manifest, shards, formats)
    made.exchange(Deadline(60))
    filled = [
        (shard, torch.empty(shard.box.shape, dtype=shard.tensor.dtype) if shard.tensor.is_meta else shard.tensor)
        for shard in made.shards
    ]
    made.write(filled, np.zeros(1, np.int8))
    return made.manifest, {shard.name: memory for shard, memory in filled}


def requantized():
    """Whether a layout step requantizes as vLLM does, for some shapes and kinds of scales, and the rows that vLLM got for it."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from weightsync.engines.vllm.loading import _requantized_at_once

    own, rows, generator = fp8_utils.requant_weight_ue8m0_inplace, [], torch.Generator().manual_seed(3)
    fp8_utils.requant_weight_ue8m0_inplace = lambda weight, *rest: rows.append(weight.shape[-2]) or own(weight, *rest)
    shapes, kinds = ((3, 256, 384), (256, 256), (200, 256), (2, 192, 256)), ("float", "power", "tiny")
    for shape, kind in itertools.product(shapes, kinds):
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        bits[(bits & 127) == 127] = 0
        bits[..., 1, :128], bits[..., :128, :128] = 127, bits[..., :128, :128] & 191  # one has small values only, and NaN before
        bits[..., 128:, :128], bits[..., 129, 5] = 0x76, 0x77  # 224, and the next larger value
        scales = torch.rand((*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128), generator=generator) + 0.1
        scales = scales if kind == "float" else 2.0 ** (scales * 10).round() * (2.0**-30 if kind == "tiny" else 1)
        first, second = [(bits.view(torch.float8_e4m3fn).clone(), scales.clone()) for _ in range(2)]
        own(*first)
        with _requantized_at_once():
            fp8_utils.requant_weight_ue8m0_inplace(*second, block_size=(128, 128))
        if any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, second, strict=True)):
            return {"differs": [shape, kind]}
    return {"rows": rows}


def main(folder, case):
    torch.set_num_threads(1)
    if case == "requantized":
        return requantized()
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
    from weightsync.engines.vllm import direct as vllm_direct
    from weightsync.engines.vllm.loading import install_some

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig())):
        init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)
    factors = {"changed": itertools.repeat(2), "unsteady": itertools.count(1)}.get(case, itertools.repeat(1))
    stand_in(lambda layer: layer.weight_scale_inv.data.mul_(next(factors)), case == "copies")
    if "deep" in case:
        deep_gemm("packed" in case)
    stored = case if case in ("fp8-channel", "fp8-tensor") else "fp8-block-e8m0" if "e8m0" in case else "fp8-block"
    many = "experts" in case or case in ("contradicts", "copies")
    kind, more = ("Qwen3MoeConfig", EXPERTS) if many else ("Qwen3Config", {})
    config = getattr(transformers, kind)(**SIZES, **more)
    plain, served = folder / "plain", folder / "fp8"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(plain)
    first = load_file(plain / "model.safetensors")
    served.mkdir()
    save_file(quantized(first, stored), served / "model.safetensors")
    routers = [name.removesuffix(".weight") for name in first if name.endswith("mlp.gate.weight")]
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    method |= {"scale_fmt": "ue8m0"} if "e8m0" in case else {}
    method["modules_to_not_convert"] = ["lm_head", *([] if case == "contradicts" else routers)]
    if stored == case:
        method = compressed(case.removeprefix("fp8-"))
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": method}
    (served / "config.json").write_text(json.dumps(described))
    chosen = EngineArgs(model=str(served), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32).create_engine_config()
    with set_current_vllm_config(chosen):
        model = build(chosen, "cpu")
        model.load_weights(load_file(served / "model.safetensors").items())
        process_weights_after_loading(model, chosen.model_config, torch.device("cpu"))
        before = {name: (value.data_ptr(), value.detach().clone()) for name, value in model.named_parameters()}
        manifest = checkpoint_of(str(served), None, chosen.model_config.hf_config).manifest
        methods = [vars(layer.quant_method) | {} for layer in model.modules() if hasattr(layer, "quant_method")]
        vllm_direct.why_streamed = lambda config, device: None  # which refuses CPUs
        direct = vllm_direct.direct_shards(chosen, model, torch.device("cpu"), HfCheckpoint(manifest, ()), 1)
        assert methods == [vars(layer.quant_method) for layer in model.modules() if hasattr(layer, "quant_method")]
        kept = same(model, {name: value for name, (_, value) in before.items()})
        if isinstance(direct, str):
            return {"reason": direct, "kept": kept}
        generator = torch.Generator().manual_seed(5)
        changed = {name: torch.randn(value.shape, generator=generator).bfloat16() for name, value in first.items()}
        known, tensors = published(changed, manifest, method, stored)
        for shard in direct.now():
            place = tuple(map(slice, shard.box.starts, shard.box.stops))
            shard.tensor.copy_(tensors[shard.name][place])
        direct.process()
        assert methods == [vars(layer.quant_method) for layer in model.modules() if hasattr(layer, "quant_method")]
        delivered = {name: value.detach().clone() for name, value in model.named_parameters()}
        install_some(
            model, chosen.model_config, quantized(changed, stored).items()
        )  # vLLM's own loading, of the one quantized offline
        moved = [name for name, value in model.named_parameters() if value.data_ptr() != before[name][0]]
    return {
        "reason": None, "kept": kept, "manifest": known == manifest, "same": same(model, delivered), "moved": moved,
        "fp8": sum(value.dtype == torch.float8_e4m3fn for value in delivered.values()),
        "processed": len(direct.steps.layers), "separate": sum(value.nbytes for value in direct._separate.values()),
    }  # fmt: skip


def same(model, values):
    held = dict(model.named_parameters())
    return held.keys() == values.keys() and all(
        torch.equal(held[name].detach().reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        for name, value in values.items()
    )


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), sys.argv[2])), flush=True)
