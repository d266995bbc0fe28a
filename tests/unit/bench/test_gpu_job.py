"""Cases of the GPU suite: who is placed where, what their floor is, and what is refused. Pure arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightsync.errors import ConfigurationError
from weightsync_bench.gpu_job import Job, manifest_for, place
from weightsync_bench.gpu_suite import jobs_of
from weightsync_bench.options import BenchOptions


def test_ranks_are_placed() -> None:
    assert place("fsdp=4", "tp=4", "separate", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert place("fsdp=2", "tp=4", "colocated", 4) == ((0, 1), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("source", "target", "placement", "gpus", "said"),
    [
        ("fsdp=4", "tp=4", "separate", 4, "needs 8 GPUs"),
        ("fsdp=0", "tp=1", "colocated", 1, "fsdp=N"),
        ("tp=1", "tp=1", "colocated", 1, "fsdp=N"),
        ("fsdp=1", "tp=x", "colocated", 1, "tp=N"),
        ("fsdp=1", "tp=1", "beside", 1, "placement"),
    ],
)
def test_what_cannot_be_is_refused(source: str, target: str, placement: str, gpus: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        place(source, target, placement, gpus)


def test_floors_are_those_of_the_bytes() -> None:
    manifest = manifest_for("qwen3-8b")
    total = sum(spec.nbytes for spec in manifest)
    alone = Job(name="x", model="qwen3-8b", delivery="direct", on=(0,), to=(0,))
    assert alone.floor(manifest, 1e9, 1e9) == (total / 1e9, total, 0)
    streamed = Job(name="x", model="qwen3-8b", delivery="streamed", on=(0,), to=(0,))
    assert streamed.floor(manifest, 1e9, 1e9)[0] == pytest.approx(2 * total / 1e9)  # into the staging, and out of it
    apart = Job(name="x", model="qwen3-8b", delivery="direct", on=(0, 1), to=(2, 3))
    seconds, nbytes, far = apart.floor(manifest, 1e12, 1e9)
    assert far == nbytes
    assert seconds == pytest.approx(nbytes / 1e9)
    together = Job(name="x", model="qwen3-8b", delivery="direct", on=(0, 1), to=(0, 1))
    assert 0 < together.floor(manifest, 1e12, 1e9)[2] < nbytes / 2


def test_a_model_can_be_a_config(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100, "tie_word_embeddings": True,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    manifest = manifest_for(str(path))
    assert manifest[manifest.index["model.layers.1.self_attn.k_proj.weight"]].shape == (32, 64)
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"not a config\.json"):
        manifest_for(str(path))
    with pytest.raises(ConfigurationError, match="unknown model"):
        manifest_for("nothing")


def test_options_make_jobs() -> None:
    both = jobs_of(BenchOptions(suite="gpu", model="qwen3-8b"), 1)
    assert [job.delivery for job in both] == ["direct", "streamed"]
    (one,) = jobs_of(BenchOptions(suite="gpu", delivery="streamed", buffers=1, bucket_bytes=1 << 20), 1)
    assert (one.buffers, one.bucket_bytes) == (1, 1 << 20)
    with pytest.raises(ConfigurationError, match="delivery"):
        BenchOptions(suite="gpu", delivery="both")
