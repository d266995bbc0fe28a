"""The GPU benchmark of vLLM: its checkpoint, which has a size and no contents, is one that an engine can join with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import gpu_vllm

from weightsync.engines.hf_checkpoint import checkpoint_of
from weightsync_bench.gpu_job import manifest_for

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs Transformers 5, which packs experts")


def test_an_engine_joins_with_the_checkpoint_of_the_benchmark(tmp_path: Path) -> None:
    gpu_vllm.shapes_only(tmp_path, manifest_for("qwen3-30b-a3b"))  # type: ignore[no-untyped-call]
    config = transformers.Qwen3MoeConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))
    checkpoint = checkpoint_of(str(tmp_path), None, config)
    assert len(checkpoint.manifest) == 18_867
    assert checkpoint.manifest.nbytes > 61e9
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 16 << 20


def test_the_quantized_checkpoint_has_data_and_scales(tmp_path: Path) -> None:
    manifest = gpu_vllm.served(manifest_for("qwen3-30b-a3b"), "fp8-block")  # type: ignore[no-untyped-call]
    gpu_vllm.shapes_only(tmp_path, manifest, quantized=True)  # type: ignore[no-untyped-call]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert manifest.nbytes < 32e9
    expert = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert [manifest[manifest.index[name]].dtype for name in (expert, f"{expert}_scale_inv")] == ["float8_e4m3fn", "float32"]
    assert manifest[manifest.index["model.layers.0.mlp.gate.weight"]].dtype == "bfloat16"
