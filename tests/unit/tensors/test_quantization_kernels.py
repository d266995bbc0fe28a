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

from weightsync.errors import ConfigurationError
from weightsync.tensors import quantization
from weightsync.tensors.cuda.quantization import DeviceBatch

from .quantized_references import NAMES, reference
from .test_quantization import CUTS, cut, hard, quantize, rows_of, same

pytest.importorskip("triton", reason="needs Triton")

GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
WEIGHT = "layers.{}.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Quantize by kernels only, and count launches. The interpreter runs one at a time."""
    known, one_at_a_time = list[str](), threading.Lock()

    def counted(name: str) -> Callable[..., Any]:
        launch = getattr(DeviceBatch, name)

        def locked(*arguments: Any) -> Any:
            with one_at_a_time:
                known.append(name)
                return launch(*arguments)

        return locked

    for name in ("maxima", "encode"):
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


def test_batches_are_bounded(seed: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_MOST_CELLS", 1000)
    check("nvfp4", [hard(60, 128, torch.bfloat16, seed + number) for number in range(5)], CUTS["gathered"])
    assert launches.count("encode") == 3


@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_inf_and_nan_are_an_error_with_the_name(name: str, bad: float) -> None:
    matrices = {WEIGHT.format(number): torch.ones(200, 128).bfloat16() for number in range(3)}
    matrices[WEIGHT.format(1)][150, 5] = bad
    held = {key: value.to(GPU) for key, value in matrices.items()}
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp.* holds Inf or NaN"):
        quantize(held, cut(held, CUTS["gathered"](200, 128)), {"*": name})
