# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
"""Quantizing on a GPU: ``python -m benchmarks.gpu_quantized bits|time [GB [FORMAT ...]]|serve [moe] [e8m0]``.

``bits``: every format on the GPU gives the bits of the CPU, for several cuts of a matrix and for streams.
``time``: quantizing so many GB of bfloat16 (default 8), in shapes of Qwen3-30B-A3B and in large matrices, against a copy of them
within the GPU: medians of nine times and their ranges, of every format or of those named. ``thirds`` are shards whose borders cut
blocks of 128 x 128; the exchange of their maxima is counted.
``serve``: a real vLLM with a checkpoint in FP8 blocks is updated by ``Trainer(quantize=)``, and answers as one that loaded the same
weights quantized offline; ``e8m0``: with scales in E8M0. Run it with ``VLLM_USE_DEEP_GEMM=0``, and again with 1.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.formats import FORMATS
from weightsync.tensors.quantization import QuantizedShards, formats_by_pattern
from weightsync.tensors.shards import Shard
from weightsync.trainer.stream_formats import StreamFormats

GO = np.zeros(1, np.int8)
E8M0 = "e8m0" in sys.argv
PATTERNS = {"*_proj.weight": "fp8-block-e8m0" if E8M0 else "fp8-block"}


def made(matrices, boxes, name):
    """Quantized shards of ``matrices``, each cut into ``boxes``, and memory for them on the same device."""
    manifest = Manifest(TensorSpec(key, tuple(value.shape), "bfloat16") for key, value in matrices.items())
    shards = [
        Shard(key, tuple(value.shape), box, value[tuple(map(slice, box.starts, box.stops))])
        for key, value in matrices.items()
        for box in boxes(tuple(value.shape))
    ]
    quantized = QuantizedShards(manifest, shards, formats_by_pattern(manifest, {"*": name}))
    device = next(iter(matrices.values())).device
    empty = (torch.empty(shard.box.shape, dtype=shard.tensor.dtype, device=device) for shard in quantized.shards)
    return quantized, tuple(zip(quantized.shards, empty, strict=True))


def whole(shape):
    return [Box.whole(shape)]


def thirds(shape):
    rows = [0, shape[0] // 3 + 5, 2 * shape[0] // 3 - 7, shape[0]]
    return [Box((start, 0), (stop, shape[1])) for start, stop in itertools.pairwise(rows)]


def raw(value):
    return bytes(value.reshape(-1).view(torch.uint8).numpy())


def check_bits():
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(777, 1280, generator=generator) * torch.exp(3 * torch.randn(777, 1, generator=generator))
    matrix[:200, :128] = 0
    matrix[500] = torch.randint(-24, 25, (1280,), generator=generator) * 0.25
    matrix[501] = (torch.arange(1280) % 29 - 14) * 1e-39
    matrix[502] = (torch.arange(1280) % 32 + 16) * 0.4375
    matrix = matrix.bfloat16()
    for name in FORMATS:
        held = {}
        for device in ("cpu", "cuda"):
            for cut in (whole, thirds):
                quantized, filled = made({"a.weight": matrix.to(device)}, cut, name)
                quantize(quantized, filled)
                tensors = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in quantized.manifest}
                for shard, memory in filled:
                    place = tuple(map(slice, shard.box.starts, shard.box.stops))
                    tensors[shard.name][place] = memory.cpu()
                held[device, cut.__name__] = {key: raw(value) for key, value in tensors.items()}
        for device in ("cpu", "cuda"):
            stream = StreamFormats(partial(formats_by_pattern, patterns={"*": name}), None)
            for place in ("first", "again"):
                parts = stream.published("a.weight", matrix.to(device)) + stream.rest()
                held[device, place] = {key: raw(value.cpu()) for key, value in parts}
        wrong = [key for key, value in held.items() if value != held["cpu", "whole"]]
        print(f"{name:16} {'equal' if not wrong else f'DIFFERS: {wrong}'}", flush=True)


def quantize(quantized, filled):
    quantized.exchange(Deadline(60))
    quantized.write(filled, GO)


def timed(work, times=9):
    """Milliseconds that ``work`` takes: median, least and most."""
    work()
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken), min(taken), max(taken)


def check_time(gigabytes, names):
    print(torch.cuda.get_device_name(), flush=True)
    kinds = {"experts of 768 x 2048": (768, 2048), "large, 8192 x 8192": (8192, 8192)}
    for kind, shape in kinds.items():
        count = max(int(gigabytes * 1e9 / (2 * shape[0] * shape[1])), 1)
        matrices = {f"layers.{index}.weight": torch.randn(shape, device="cuda").bfloat16() for index in range(count)}
        copies = [torch.empty_like(value) for value in matrices.values()]
        copy, *spread = timed(lambda copies=copies, matrices=matrices: torch._foreach_copy_(copies, list(matrices.values())))
        print(f"{kind}, {count}: a copy takes {copy:.1f} ms ({spread[0]:.1f} to {spread[1]:.1f})", flush=True)
        del copies
        for name in names:
            for cut in (whole, thirds):
                quantized, filled = made(matrices, cut, name)
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                took, least, most = timed(partial(quantize, quantized, filled))
                extra = torch.cuda.max_memory_allocated() - before
                print(
                    f"  {name:20} {cut.__name__:6} {took:5.1f} ms ({least:.1f} to {most:.1f}), {took / copy:.2f} copies; "
                    f"{extra / 1e6:.0f} MB more at its peak",
                    flush=True,
                )
                del quantized, filled


def offline(model, folder, quantize):
    """Save ``model`` as a checkpoint in FP8 blocks, with the cast of vLLM, or of DeepGEMM beside SGLang."""
    from safetensors.torch import save_file

    if find_spec("vllm"):
        from vllm.utils.deep_gemm import per_block_cast_to_fp8
    else:
        from deep_gemm.utils.math import per_block_cast_to_fp8

    model.save_pretrained(folder / "plain")
    config = json.loads((folder / "plain" / "config.json").read_text())
    from safetensors.torch import load_file

    tensors = {}
    for name, value in load_file(folder / "plain" / "model.safetensors").items():
        if "_proj.weight" in name and quantize:
            data, scales = per_block_cast_to_fp8(value, use_ue8m0=E8M0)
            scales = scales.to(torch.float8_e8m0fnu) if E8M0 else scales
            tensors[name], tensors[f"{name}_scale_inv"] = data.contiguous(), scales.contiguous()
        else:
            tensors[name] = value
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *routers],
    }  # fmt: skip
    (folder / "fp8").mkdir()
    save_file(tensors, folder / "fp8" / "model.safetensors")
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    return folder / "fp8"


def answers(llm):
    from vllm import SamplingParams

    from benchmarks.gpu_vllm import PROMPTS

    wanted = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[:8]], wanted, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def check_serving(moe):
    import gc

    from vllm import LLM

    import weightsync
    from benchmarks.gpu_vllm import PROMPTS, change, tiny, tokens, vllm_joined
    from weightsync.config import ServerSettings
    from weightsync.server.server import BackgroundServer

    with tempfile.TemporaryDirectory() as made_here:
        folder = Path(made_here)
        model = tiny(folder / "first", moe)
        served = offline(model, folder / "first_q", True)
        change(model, 5)
        wanted = LLM(
            model=str(offline(model, folder / "second_q", True)), skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            gpu_memory_utilization=0.1, max_model_len=256, max_num_seqs=4, enforce_eager=False,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        )  # fmt: skip
        expected = answers(wanted)
        del wanted
        gc.collect()
        torch.cuda.empty_cache()
        with BackgroundServer(ServerSettings.load({}, port=0)) as server, vllm_joined(served, False, server) as joined:
            llm, attached, _ = joined
            with weightsync.Trainer(model, server.url, token=server.token, quantize=PATTERNS) as trainer:
                trainer.wait_for_replicas(1, timeout=60)
                first = answers(llm)
                for number in (1, 2, 3):
                    result = trainer.publish(number, timeout=120)
                    (replica,) = result.replicas
                    print(
                        f"version {number}: {replica.delivery} ({replica.delivery_reason}) by {replica.transports}, "
                        f"{replica.verified}, paused {replica.paused_seconds * 1e3:.1f} ms, {result.nbytes:,} bytes",
                        flush=True,
                    )
                _, found, _ = tokens(llm, attached, PROMPTS[:8])
                print("RESULT answers changed:", found != first, "; as quantized offline:", found == expected, flush=True)


if __name__ == "__main__":
    what, *more = sys.argv[1:]
    if what == "bits":
        check_bits()
    elif what == "time":
        check_time(float(more[0]) if more else 8.0, more[1:] or FORMATS)
    else:
        check_serving("moe" in more)
