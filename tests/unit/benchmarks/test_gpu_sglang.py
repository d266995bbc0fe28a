"""The GPU benchmark of SGLang: its arguments, its buckets, and the checkpoint of a dense model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_sglang, gpu_vllm

from weightsync.engines.hf_checkpoint import checkpoint_of
from weightsync_bench.gpu_job import manifest_for

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs Transformers 5, which packs experts")


def test_the_configuration_of_a_dense_model_makes_the_tensors_of_its_checkpoint(tmp_path: Path) -> None:
    manifest = manifest_for("qwen3-8b")
    gpu_vllm.shapes_only(tmp_path, manifest)  # type: ignore[no-untyped-call]
    config = transformers.Qwen3Config.from_dict(json.loads((tmp_path / "config.json").read_text()))
    assert checkpoint_of(str(tmp_path), None, config).manifest.nbytes == manifest.nbytes
    with torch.device("meta"):
        made = transformers.Qwen3ForCausalLM(config)
    assert {name: tuple(value.shape) for name, value in made.named_parameters()} == {spec.name: spec.shape for spec in manifest}


def test_settings_for_sglang_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_DELIVERY", "auto")
    given = ["tiny", "--delivery", "streamed", "--set", 'attention_backend="fa3"', "--set", "disable_cuda_graph=true"]
    options, settings = gpu_sglang.arguments(given)  # type: ignore[no-untyped-call]
    assert (options.model, settings) == ("tiny", {"attention_backend": "fa3", "disable_cuda_graph": True})
    assert os.environ["WEIGHTSYNC_DELIVERY"] == "streamed"


def test_only_the_last_bucket_is_the_last_and_none_is_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sglang, "BUCKET", 100)
    weights = [(str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate((60, 40, 1, 200, 5))]
    made = list(gpu_sglang.buckets(weights))  # type: ignore[no-untyped-call]
    assert [([name for name, _ in held], last) for held, last in made] == [
        (["0", "1"], False), (["2"], False), (["3"], False), (["4"], True)
    ]  # fmt: skip
