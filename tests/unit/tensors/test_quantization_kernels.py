"""The kernels that quantize in GPU memory give the bits of the references: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where kernels are imported

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors import quantization
from weightsync.tensors.cuda.quantization import DeviceBatch
from weightsync.tensors.quantization import QuantizedShards, formats_by_pattern
from weightsync.tensors.shards import Shard

from .quantized_references import NAMES, reference
from .test_quantization import CUTS, GO, cut, hard, quantize, rows_of, same

pytest.importorskip("triton", reason="needs Triton")

GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
WEIGHT = "layers.{}.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Quantize by kernels only, and count launches. The interpreter runs one at a time."""
    known, one_at_a_time = list[str](), threading.Lock()

    def counted(name: str) -> Callable[..., Any]:
        launch = getattr(DeviceBatch, name)

        def locked(*arguments: Any, **more: Any) -> Any:
            with one_at_a_time:
                known.append(name)
                return launch(*arguments, **more)

        return locked

    for name in ("maxima", "encode", "place"):
        monkeypatch.setattr(DeviceBatch, name, counted(name))
    monkeypatch.setattr(quantization, "KERNELS_ON", {GPU.type})
    return known


def check(name: str, matrices: list[torch.Tensor], cuts: Callable[[int, int], Any], dtype: torch.dtype | None = None) -> None:
    held = {WEIGHT.format(number): matrix.to(GPU) for number, matrix in enumerate(matrices)}
    boxes = cuts(*matrices[0].shape)
    published = quantize(held, cut(held, boxes), {"*": name}, dtype)
    for number, matrix in enumerate(matrices):
        for part, expected in zip(NAMES[name], reference(name, matrix.to(dtype or matrix.dtype)), strict=True):
            assert same(published[WEIGHT.format(number).replace("weight", part)], expected), (number, part)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", ["gathered", "fsdp3", "tp4", "megatron"])
def test_any_cut_gives_the_bits_of_the_reference(name: str, cuts: str, seed: int, launches: list[str]) -> None:
    check(name, [hard(200, 384, torch.bfloat16, seed + number) for number in range(2)], CUTS[cuts])
    ranks = len(CUTS[cuts](200, 384))
    assert launches.count("encode") == ranks, "one launch for both matrices"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("held", "published"), [("float32", "float32"), ("float16", "float16"), ("float32", "bfloat16"), ("float32", "float16")]
)
def test_any_dtype(name: str, held: str, published: str, seed: int) -> None:
    matrix = hard(130, 256, torch.float32, seed)
    if "float16" in (held, published):
        matrix = matrix.clamp(-30000, 30000)
    check(name, [matrix.to(getattr(torch, held))], lambda *shape: rows_of(3, *shape), getattr(torch, published))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (129, 384)])
def test_blocks_that_do_not_divide_and_zeros(name: str, rows: int, columns: int) -> None:
    for matrix in (torch.zeros(rows, columns).bfloat16(), torch.full((rows, columns), -3.5).bfloat16()):
        check(name, [matrix], CUTS["tp2"])


def test_batches_that_keep_maxima_are_bounded(seed: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 and 1 hold 5 x (72 + 144) blocks of 1 x 16, some of which columns cut, and rank 2 half of that."""
    monkeypatch.setattr(quantization, "_MOST_CELLS", 500)
    matrices = [hard(60, 128, torch.bfloat16, seed + number) for number in range(5)]
    check("nvfp4", matrices, CUTS["megatron"])
    assert launches.count("encode") == 3 + 3 + 2
    launches.clear()
    check("nvfp4", matrices, CUTS["gathered"])
    assert (launches.count("encode"), launches.count("maxima")) == (1, 1), "of whole matrices only"


@pytest.mark.parametrize("name", ["fp8-channel", "int4-group128"])
def test_every_quotient_of_bfloat16_is_rounded_as_a_division_rounds_it(name: str) -> None:
    """Scales and values of every mantissa, and of magnitudes where a reciprocal overflows or a value is denormal."""
    values = (torch.arange(128) + 128).float()
    columns = torch.cat([values * 2.0**-power for power in range(8, 16)])  # below 1
    for power in (0, 120, -122):
        matrix = torch.empty(128, 1024)
        for row in range(128):
            matrix[row] = columns * 2.0**power
            matrix[row, ::32] = values[row] * 2.0 ** (power - 7)  # the largest, from 1 on
        matrix[:, 1::2] *= -1
        check(name, [matrix.bfloat16()], CUTS["gathered"])


@pytest.mark.parametrize("columns", [2048, 2056, 5000])
def test_rows_longer_than_a_tile(columns: int, seed: int) -> None:
    check("fp8-channel", [hard(11, columns, torch.bfloat16, seed)], lambda *shape: rows_of(2, *shape))


def test_addresses_are_looked_up_when_memory_moved(seed: int, launches: list[str]) -> None:
    matrices = {WEIGHT.format(number): hard(128, 256, torch.bfloat16, seed + number).to(GPU) for number in range(2)}
    manifest = Manifest(TensorSpec(name, (128, 256), "bfloat16") for name in matrices)
    (shards,) = cut(matrices, CUTS["gathered"](128, 256))
    made = QuantizedShards(manifest, shards, formats_by_pattern(manifest, {"*": "fp8-block"}))

    def memory() -> tuple[tuple[Shard, torch.Tensor], ...]:
        return tuple((shard, torch.empty(shard.box.shape, dtype=shard.tensor.dtype, device=GPU)) for shard in made.shards)

    def written(targets: tuple[tuple[Shard, torch.Tensor], ...]) -> bool:
        made.exchange(Deadline(20))
        made.write(targets, GO)
        expected = {name: reference("fp8-block", matrix.cpu()) for name, matrix in matrices.items()}
        return all(
            same(target.cpu(), expected[shard.name.removesuffix("_scale_inv")][int(shard.name.endswith("_scale_inv"))])
            for shard, target in targets
        )

    first, second = memory(), memory()
    assert written(first)
    for matrix in matrices.values():
        matrix.mul_(-2)
    assert written(first)
    assert launches.count("place") == 1
    assert written(second)
    assert launches.count("place") == 2
    for shard in shards:
        shard.tensor.data = matrices[shard.name] = torch.roll(shard.tensor, 1)  # as frameworks do with parameters
    assert written(second)
    assert launches.count("place") == 3
    moved = [Shard(shard.name, shard.shape, shard.box, shard.tensor.t().contiguous().t()) for shard in shards]
    made.derive(manifest, moved)
    assert written(second)


@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_inf_and_nan_are_an_error_with_the_name(name: str, bad: float) -> None:
    matrices = {WEIGHT.format(number): torch.ones(200, 128).bfloat16() for number in range(3)}
    matrices[WEIGHT.format(1)][150, 5] = bad
    held = {key: value.to(GPU) for key, value in matrices.items()}
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp.* holds Inf or NaN"):
        quantize(held, cut(held, CUTS["gathered"](200, 128)), {"*": name})
