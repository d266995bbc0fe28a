"""Shards of real DTensors in real processes (gloo; 2 and 4 ranks): put together again, they are the full tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.digests import reference_digest

from weightsync.model import Manifest, TensorSpec

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(180)  # the ranks share two cores with whatever else runs
WORLDS = (2, 4)
CASES = ("experts", "fsdp", "hsdp", "tensor_parallel", "fsdp_tensor_parallel", "by_hand")

Arrays = dict[str, npt.NDArray[np.uint8]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks reported, in a folder for each world size."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.integration.rounds.dtensor_ranks", str(folder), *map(str, WORLDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


@pytest.fixture(scope="module", params=WORLDS, ids=[f"{world} ranks" for world in WORLDS])
def reported(request: pytest.FixtureRequest, folders: Path) -> tuple[int, Path]:
    return request.param, folders / str(request.param)


def read(folder: Path, case: str, rank: int) -> tuple[Manifest, list[str], Arrays]:
    specs, names = msgspec.msgpack.decode((folder / f"{case}-{rank}.msgpack").read_bytes(), type=tuple[list[TensorSpec], list[str]])
    with np.load(folder / f"{case}-{rank}.npz") as data:
        return Manifest(specs), names, dict(data)


@pytest.mark.parametrize("case", CASES)
def test_shards_are_the_tensor(reported: tuple[int, Path], case: str) -> None:
    world, folder = reported
    ranks = [read(folder, case, rank) for rank in range(world)]
    manifest, _, reference = ranks[0]
    assert len({manifest.fingerprint for manifest, _, _ in ranks}) == 1
    for spec in manifest:
        full = reference[f"full/{spec.name}"]
        seen = np.zeros(spec.shape, np.int64)
        built = np.zeros_like(full)
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for _, names, arrays in ranks:
            for row in (row for row, name in enumerate(names) if name == spec.name):
                starts, stops = tuple(arrays[f"starts/{row}"].tolist()), tuple(arrays[f"stops/{row}"].tolist())
                region = tuple(map(slice, starts, stops))
                values = arrays[f"bytes/{row}"].reshape(*(b - a for a, b in zip(starts, stops, strict=True)), full.shape[-1])
                digest = int(arrays["digests"][row])
                assert boxes.setdefault((starts, stops), digest) == digest
                assert np.array_equal(values, full[region])
                built[region] = values
                seen[region] = 1
        assert seen.all(), f"{spec.name} has holes"
        assert np.array_equal(built, full)
        volumes = sum(int(np.prod(np.subtract(stops, starts))) for starts, stops in boxes)
        assert volumes == spec.size, f"{spec.name}: distinct boxes overlap"
        assert sum(boxes.values()) % 2**64 == reference_digest(full, spec.dtype, spec.shape, (0,) * len(spec.shape))


def test_some_ranks_hold_nothing_of_small_tensors(reported: tuple[int, Path]) -> None:
    world, folder = reported
    holders = sum("gate.weight" in read(folder, "fsdp", rank)[1] for rank in range(world))
    assert holders == 1


def test_ties_and_buffers(reported: tuple[int, Path]) -> None:
    _, folder = reported
    for case in ("fsdp", "hsdp", "fsdp_tensor_parallel"):
        specs = {spec.name: spec for spec in read(folder, case, 0)[0]}
        assert specs["embed.weight"].aliases == ("head.weight",)
        assert specs["steps"].dtype == "int64"
