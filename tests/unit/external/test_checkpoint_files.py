"""Holds the checkpoint reader to the format, to its memory, and against headers and indexes that somebody forged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weightsync.errors import ConfigurationError
from weightsync.external.checkpoint_files import INDEX, CheckpointFiles
from weightsync.model import Manifest, TensorSpec
from weightsync_disaggregated.buckets import buckets_of

pytestmark = pytest.mark.usefixtures("no_leaks")


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 3, generator=generator).bfloat16(),
        "b.weight": torch.randn(7, generator=generator),
        "c.codes": torch.randint(-9, 9, (4, 2), generator=generator, dtype=torch.int8),
        "d.scale": torch.randn((), generator=generator),
        "e.empty": torch.zeros(0, 4),
        "f.eight": torch.randn(6, 2, generator=generator).to(torch.float8_e4m3fn),
        "g.mask": torch.randint(0, 2, (9,), generator=generator, dtype=torch.bool),
        "h.long": torch.randint(0, 99, (3,), generator=generator),
    }


def _sharded(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    names = list(tensors)
    mapped: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        mapped |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapped}))
    return mapped


def _read(checkpoint: CheckpointFiles, bucket_bytes: int) -> dict[str, bytes]:
    found = {}
    for bucket in buckets_of(checkpoint.manifest, bucket_bytes):
        memory = np.full(sum(spec.nbytes for spec in bucket), 255, np.uint8)
        checkpoint.read(bucket, memory)
        place = 0
        for spec in bucket:
            found[spec.name] = memory[place : place + spec.nbytes].tobytes()
            place += spec.nbytes
    return found


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 20])
def test_every_tensor_is_read_bit_for_bit(tmp_path: Path, seed: int, sharded: bool, bucket_bytes: int) -> None:
    tensors = _tensors(seed)
    if sharded:
        _sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointFiles(tmp_path) as checkpoint:
        specs = {spec.name: (spec.shape, f"torch.{spec.dtype}") for spec in checkpoint.manifest}
        assert specs == {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
        assert _read(checkpoint, bucket_bytes) == {
            name: bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()
        }


def test_one_file_by_any_name_and_one_of_a_cache(tmp_path: Path, seed: int) -> None:
    save_file(_tensors(seed), tmp_path / "policy.safetensors")
    with CheckpointFiles(tmp_path) as one, CheckpointFiles(tmp_path / "policy.safetensors") as other:
        assert one.manifest == other.manifest
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(_tensors(seed), blobs / "abcdef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcdef")  # Hugging Face's cache
    with CheckpointFiles(snapshot) as checkpoint:
        assert len(checkpoint.manifest) == 8


def test_buckets_have_one_dtype_their_size_and_everything_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = ["float32", "bfloat16", "float8_e4m3fn"]
    manifest = Manifest(
        TensorSpec(f"t.{i}", (int(rng.integers(0, 300)),), kinds[int(rng.integers(3))]) for i in range(200)
    )  # fmt: skip
    buckets = buckets_of(manifest, 10_000)
    assert sorted(spec.name for bucket in buckets for spec in bucket) == sorted(spec.name for spec in manifest)
    for bucket in buckets:
        assert len({spec.dtype for spec in bucket}) == 1
        assert len(bucket) == 1 or sum(spec.nbytes for spec in bucket) <= 10_000
    assert len(buckets) < 25  # not one for each change of dtype


def _write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def _entry(first: int = 0, last: int = 8, **change: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [first, last]} | change


FORGED: dict[str, tuple[Any, int, int | None, str]] = {
    "huge header": ({"a": _entry()}, 8, 1 << 62, "not a safetensors file"),
    "header longer than the file": ({"a": _entry()}, 8, 4096, "not a safetensors file"),
    "no json": (b"{{{{", 8, None, "JSON"),
    "deep json": (b"[" * 100_000, 8, None, "JSON"),
    "a list": (b"[]", 0, None, "Expected `object`"),
    "twice": (b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": {}}', 8, None, "'a' occurs twice"),
    "twice inside": (b'{"a": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, None, "occurs twice"),
    "overlap": ({"a": _entry(), "b": _entry(4, 12)}, 12, None, "overlaps"),
    "the same bytes": ({"a": _entry(), "b": _entry()}, 8, None, "overlaps"),
    "gap": ({"a": _entry(), "b": _entry(12, 20)}, 20, None, "after a gap"),
    "more bytes": ({"a": _entry()}, 12, None, "belong to no tensor"),
    "past the end": ({"a": _entry()}, 4, None, "after the file"),
    "huge offset": ({"a": _entry(1 << 61, (1 << 61) + 8)}, 8, None, "after the file"),
    "beyond 64 bits": ({"a": _entry(1 << 70, (1 << 70) + 8)}, 8, None, "impossible"),
    "negative": ({"a": _entry(-8, 0)}, 8, None, "impossible"),
    "backwards": ({"a": _entry(8, 0)}, 8, None, "bytes has"),
    "bool offset": ({"a": _entry(data_offsets=[False, 8])}, 8, None, "Expected `int`"),
    "float shape": ({"a": _entry(shape=[2.5])}, 8, None, "Expected `int`"),
    "negative shape": ({"a": _entry(shape=[-2])}, 8, None, "impossible"),
    "huge shape": ({"a": _entry(shape=[1 << 40, 1 << 40])}, 8, None, "bytes has"),
    "shape of many dimensions": ({"a": _entry(shape=[1] * 17)}, 8, None, "impossible"),
    "wrong size": ({"a": _entry(shape=[3])}, 8, None, "bytes has 8"),
    "dtype": ({"a": _entry(dtype="F31")}, 8, None, "known"),
    "dtype that is none": ({"a": _entry(dtype=["F32"])}, 8, None, "Expected `int`"),
    "field missing": ({"a": {"dtype": "F32"}}, 8, None, "not a tensor"),
    "text for a place": ({"a": _entry(data_offsets="0, 8")}, 8, None, "impossible"),
    "a fourth field": ({"a": _entry(more="x")}, 8, None, "not a tensor"),
    "no name": ({"": _entry()}, 8, None, "not a tensor"),
    "nothing": ({"__metadata__": {}}, 0, None, "no tensors"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, size, length, complaint = FORGED[case]
    _write(tmp_path / "model.safetensors", header, bytes(size), length)
    with pytest.raises(ConfigurationError, match=complaint):
        CheckpointFiles(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/b.safetensors",
        "..",
        "x.bin",
        "",
        ".safetensors",
        "a\0.safetensors",
        7,
    ],
)
def test_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ConfigurationError, match="files of this directory"):
        CheckpointFiles(inner)


def test_index_and_files_that_disagree_are_refused(tmp_path: Path, seed: int) -> None:
    mapped = _sharded(tmp_path, _tensors(seed))
    index = tmp_path / INDEX

    def says(change: dict[str, str], drop: str = "") -> None:
        index.write_text(json.dumps({"weight_map": {k: v for k, v in (mapped | change).items() if k != drop}}))

    says({"z.more": mapped["a.weight"]})
    with pytest.raises(ConfigurationError, match=r"z\.more"):
        CheckpointFiles(tmp_path)
    says({}, drop="a.weight")
    with pytest.raises(ConfigurationError, match=r"does not say that tensor 'a\.weight' is here"):
        CheckpointFiles(tmp_path)
    says({"a.weight": mapped["b.weight"]})
    with pytest.raises(ConfigurationError, match="does not say"):
        CheckpointFiles(tmp_path)
    says({"a.weight": "model-00009-of-00009.safetensors"})
    with pytest.raises(ConfigurationError, match=r"cannot open|does not say"):
        CheckpointFiles(tmp_path)
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(ConfigurationError, match="occurs twice"):
        CheckpointFiles(tmp_path)
    index.write_text("{}")
    with pytest.raises(ConfigurationError, match="weight_map"):
        CheckpointFiles(tmp_path)


def test_directories_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither"):
        CheckpointFiles(tmp_path)
    with pytest.raises(ConfigurationError, match="not a checkpoint"):
        CheckpointFiles(tmp_path / "nowhere")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ConfigurationError, match="2 other"):
        CheckpointFiles(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")  # opening one waits for a writer, unless asked not to
    with pytest.raises(ConfigurationError, match="not a regular file"):
        CheckpointFiles(tmp_path)


def test_file_that_becomes_shorter_is_an_error(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 16)}, path)
    with CheckpointFiles(tmp_path) as checkpoint:
        os.truncate(path, 1 << 17)
        with pytest.raises(ConfigurationError, match="ended in the middle of a"):
            _read(checkpoint, 1 << 30)
        with pytest.raises(ConfigurationError, match="not enough"):
            checkpoint.read(checkpoint.manifest.tensors, np.empty(8, np.uint8))


_MEASURE = """
import sys
from pathlib import Path
import torch
from weightsync.deadline import Deadline
from weightsync.external.checkpoint_files import CheckpointFiles
from weightsync_disaggregated.buckets import buckets_of
from weightsync_disaggregated.push import _Reading

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

def run(path):
    with CheckpointFiles(Path(path)) as checkpoint:
        buckets = buckets_of(checkpoint.manifest, 2 << 20)
        with _Reading(checkpoint, buckets) as reading:
            return sum(sum(s.nbytes for s in b.specs) for b in reading.in_order(lambda: Deadline(50)))

run(sys.argv[1])                      # a small one first: what is imported and compiled once is not staging
before = peak()
print(run(sys.argv[2]), peak() - before)
"""


def test_never_more_than_the_staging_is_in_memory(tmp_path: Path) -> None:
    for name, count in (("small", 1), ("large", 96)):
        (tmp_path / name).mkdir()
        save_file(
            {f"layers.{i}": torch.full((1 << 18,), i, dtype=torch.float32) for i in range(count)},
            tmp_path / name / "model.safetensors",
        )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    nbytes, grown = map(int, done.stdout.split())
    assert nbytes == 96 << 20
    assert grown < 24 << 20, f"{grown:,} bytes more for two buckets of 2 MiB"
