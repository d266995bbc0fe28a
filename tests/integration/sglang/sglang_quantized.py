# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
"""Prints whether weights that the trainer quantized reach SGLang's quantized layers: ``python sglang_quantized.py FOLDER CASE``.

SGLang serves no FP8 on a CPU without AMX, so its layers do here to weights what they do on GPUs: for its Triton kernels and for
those of DeepGEMM that is plain torch. Nothing is computed with the model.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import sys
import threading
from pathlib import Path

import torch
from tests.integration.quantized_checkpoints import EXPERTS, SIZES, quantized
from tests.integration.sglang.sglang_scheduler import RunningScheduler, install_stubs, use_environment

UPDATES = 3
FOR_TWO = {"intermediate_size": 512, "moe_intermediate_size": 256, "num_key_value_heads": 4}
"""Sizes of which each of two ranks has whole blocks."""
REFUSED = ("cache", "derived", "streamed", "unsteady")


class Refusal(logging.Handler):
    """Waits for the reason why SGLang does not join."""

    def __init__(self) -> None:
        super().__init__()
        self._reason, self._there = "", threading.Event()
        logging.getLogger("weightsync.engines.sglang.plugin").addHandler(self)

    def emit(self, record):
        if record.exc_info:
            self._reason = str(record.exc_info[1])
            self._there.set()

    def reason(self):
        assert self._there.wait(120)
        return self._reason


def stand_in(case):
    """Let SGLang process FP8 layers on this CPU as it does on a GPU with the kernels of ``case``."""
    from sglang.srt.layers.quantization import fp8

    fp8._is_cpu = False
    own, factors = fp8.Fp8LinearMethod.process_weights_after_loading, itertools.count(2)
    if "deep" in case:
        deep_gemm()
    elif case in ("changed", "unsteady", "derived"):

        def process(self, layer):
            own(self, layer)
            layer.weight_scale_inv.data.mul_(next(factors) if case == "unsteady" else 2)
            if case == "derived":
                layer.largest_scale = layer.weight_scale_inv.max()

        fp8.Fp8LinearMethod.process_weights_after_loading = process


def deep_gemm():
    """Let SGLang take DeepGEMM's kernels for Blackwell. Their layout of scales is SGLang's own function in torch."""
    import deep_gemm
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8_utils

    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = True
    deep_gemm_wrapper.update_deep_gemm_config = lambda _: None
    deep_gemm.utils.align = lambda size, unit: -(-size // unit) * unit
    deep_gemm.utils.get_tma_aligned_size = lambda size, itemsize: deep_gemm.utils.align(size, 16 // itemsize)
    packed = fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    deep_gemm.utils.layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = packed


def compressed(strategy, routers):
    """The configuration of FP8 by compressed-tensors. SGLang takes the scheme for a GPU that computes in FP8.

    This build lacks an operator, with which SGLang gives fused matrices one scale. It is written in torch here.
    """
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    def quantize(values, data, scale, is_static):
        data.copy_((values / scale).clamp(-448, 448).to(torch.float8_e4m3fn))

    fp8_kernel.sgl_per_tensor_quant_fp8 = quantize
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    kind = {"type": "float", "num_bits": 8, "symmetric": True}
    weights = kind | {"strategy": strategy, "dynamic": False}
    inputs = kind | {"strategy": "token", "dynamic": True}
    if strategy == "block":
        weights, inputs = (
            weights | {"block_structure": [128, 128]},
            kind | {"strategy": "group", "group_size": 128, "dynamic": True},
        )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", *routers],
    }  # fmt: skip


def make_checkpoints(folder, case):
    """Save a random model, and the same quantized offline, as SGLang will serve it. Returns the former's tensors and the format."""
    import transformers
    from safetensors.torch import load_file

    family, more = ("Qwen3MoeConfig", EXPERTS) if "experts" in case else ("Qwen3Config", {})
    more |= FOR_TWO if "two" in case else {}
    config = getattr(transformers, family)(**SIZES | more)
    plain, served = folder / "plain", folder / "served"
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(plain)
    first = load_file(plain / "model.safetensors")
    routers = [name.removesuffix(".weight") for name in first if name.endswith("mlp.gate.weight")]
    kind = case.removesuffix("-experts") if case.startswith("fp8") else "fp8-block-e8m0" if "e8m0" in case else "fp8-block"
    if case.startswith("fp8"):
        method = compressed({"compressed": "block"}.get(name := kind.rpartition("-")[2], name), routers)
    else:
        method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        method |= {"scale_fmt": "ue8m0"} if "e8m0" in case else {}
        method["modules_to_not_convert"] = ["lm_head", *routers]
    scales = {f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale": torch.tensor(0.5) for layer in range(2) for kind in "kv"}
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": method}
    write(served, described, quantized(first, kind) | (scales if case == "cache" else {}))
    return first, kind


def write(folder, described, tensors):
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described))


def loaded(runner, folder, tensors):
    """SGLang's own loading of a checkpoint with these tensors, as at its start: the parameters and buffers of a new model."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model

    config = copy.copy(runner.model_config)
    write(folder, json.loads((Path(config.model_path) / "config.json").read_text()), tensors)
    config.model_path = str(folder)
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    return held(model)


def held(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def different(model, wanted):
    """Names of tensors that are not bit for bit what is wanted, in the same form."""
    own = held(model)
    assert own.keys() == wanted.keys()
    return [
        name
        for name, tensor in own.items()
        if (tensor.shape, tensor.dtype, tensor.stride()) != (wanted[name].shape, wanted[name].dtype, wanted[name].stride())
        or not torch.equal(bits(tensor), bits(wanted[name]))
    ]


def fill(state, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def arguments(case):
    experts = {"moe_runner_backend": "deep_gemm"} if "deep" in case and "experts" in case else {}
    return {"dtype": "bfloat16", "context_length": 64, **experts}


def publish_a_wrong_scale(trainer, tensors):
    """Change a bit of a scale after it was digested, and publish. Returns whether the failure names it, and what follows."""
    from weightsync import failpoints
    from weightsync.errors import RoundFailed

    name, scale = next((name, tensor) for name, tensor in tensors.items() if name.endswith("o_proj.weight_scale_inv"))

    def change(point):
        if point == "round.placed":
            payload = trainer._role.region.payload.reshape(-1)
            payload[payload.tobytes().index(scale.numpy().tobytes())] ^= 1

    failpoints.install(change)
    try:
        trainer.publish(timeout=60.0)
    except RoundFailed as error:
        failpoints.install(lambda point: None)
        return [name in str(error), trainer.publish(timeout=60.0).replicas[0].state]


def reason_of_stream(server, tensors):
    """Publish a stream, which goes through loaders, and return why it failed."""
    from weightsync import Stream
    from weightsync.errors import WeightSyncError
    from weightsync.trainer.trainer import Trainer

    with Trainer(Stream(), server.url, token=server.token, rank=0, world_size=1) as trainer:
        try:
            trainer.wait_for_replicas(timeout=30.0, refused="raise")
            return str(trainer.publish_stream(tensors.items(), timeout=60.0).replicas)
        except WeightSyncError as error:
            return str(error)


def main(folder, case):
    from weightsync.config import ServerSettings
    from weightsync.engines.sglang import joining
    from weightsync.server.server import BackgroundServer
    from weightsync.trainer.trainer import Trainer

    torch.set_num_threads(1)
    install_stubs()
    refusal = Refusal()
    with BackgroundServer(ServerSettings.load({}, port=0)) as server:
        delivery = "streamed" if case == "streamed" else "auto"
        use_environment(WEIGHTSYNC_COORDINATOR=server.url, WEIGHTSYNC_TOKEN=server.token, WEIGHTSYNC_DELIVERY=delivery)
        state, kind = make_checkpoints(folder, case)
        stand_in(case)
        before, why_refused = {}, joining.why_refused

        def keep(scheduler):
            """Keep what the model holds when SGLang begins to join."""
            before.update({name: tensor.detach().clone() for name, tensor in held(scheduler.tp_worker.model_runner.model).items()})
            return why_refused(scheduler)

        joining.why_refused = keep
        with RunningScheduler(str(folder / "served"), **arguments(case)) as running:
            runner = running.scheduler.tp_worker.model_runner
            model = runner.model
            addresses = {name: tensor.data_ptr() for name, tensor in held(model).items()}
            if case in REFUSED:
                return {"reason": refusal.reason(), "changed": different(model, before)}
            if case == "stream":
                return {"reason": reason_of_stream(server, quantized(state, kind)), "changed": different(model, before)}
            updates = []
            with Trainer(state, server.url, token=server.token, dtype=torch.bfloat16, quantize="as-served") as trainer:
                for seed in range(UPDATES):
                    fill(state, seed)
                    replica = trainer.publish(timeout=60.0).replicas[0]
                    wanted = loaded(runner, folder / str(seed), quantized(state, kind))
                    updates.append([replica.state, replica.delivery, replica.verified, different(model, wanted)])
                fault = publish_a_wrong_scale(trainer, quantized(state, kind)) if kind == "fp8-block" else None
            moved = [name for name, tensor in held(model).items() if addresses[name] != tensor.data_ptr()]
            kinds = {
                str(kind): sum(tensor.dtype is kind for tensor in held(model).values())
                for kind in (torch.float8_e4m3fn, torch.int32)
            }
            return {"updates": updates, "moved": moved, "fault": fault, **kinds}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), sys.argv[2])), flush=True)
