"""The references of the quantized formats are what DeepGEMM, compressed-tensors and torchao compute.

The first two are in vLLM's environment. torchao is not: its results are recorded (`RECORDED`), and compared with it where it is
installed (`pip install --no-deps torchao==0.18.0`).
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from tests.unit.tensors.quantized_references import reference

pytestmark = pytest.mark.filterwarnings("ignore")  # of what these packages import

DTYPES = [torch.bfloat16, torch.float32]

RECORDED: dict[str, str] = {
    "mxfp8 torch.bfloat16": "4ff5ea7e90172df0369f573e9c8e1ed5",
    "mxfp4 torch.bfloat16": "49c01f7eeb970704e1d154f041e00593",
    "nvfp4-modelopt torch.bfloat16": "c406c37d021685ea201021ba51d26a1a",
    "mxfp8 torch.float32": "c6f87928cebbf7bd976785c2b71f4e6b",
    "mxfp4 torch.float32": "6d8a393c5ceb11ba4264a4f125042a1a",
    "nvfp4-modelopt torch.float32": "9806a63a0b809d682605cbebfe9262cd",
}
"""Digests of what torchao 0.18.0 makes of :func:`matrix`, by format and dtype."""


def matrix(dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes, ties, zeros and denormals; the same for ever."""
    number = torch.arange(256 * 512, dtype=torch.int64)
    mixed = (number * 2654435761 % 1048573).double() / 1048573 - 0.5
    values = (mixed * 2.0 ** (number // 512 % 23 - 11).double()).reshape(256, 512)
    values[:128, :128] = 0
    values[140] = (torch.arange(512) % 49 - 24) * 0.25
    values[141] = (torch.arange(512) % 29 - 14) * 1e-39
    values[142] = (torch.arange(512) % 32 + 16) * 0.4375
    values[143, ::3] = -0.0
    return values.to(dtype)


def digest(parts: tuple[torch.Tensor, ...]) -> str:
    return hashlib.sha256(b"".join(bytes(part.contiguous().view(-1).view(torch.uint8).tolist()) for part in parts)).hexdigest()[:32]


def assert_same(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for part, other in zip(mine, theirs, strict=True):
        assert (part.shape, part.dtype) == (other.shape, other.dtype)
        assert torch.equal(part.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@pytest.mark.vllm
@pytest.mark.rare  # because of what it imports
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [False, True])
def test_deep_gemm(dtype: torch.dtype, power: bool) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    data, scales = per_block_cast_to_fp8(matrix(dtype)[:200, :400], use_ue8m0=power)
    mine = reference("fp8-block-e8m0" if power else "fp8-block", matrix(dtype)[:200, :400])
    assert_same((mine[0], mine[1].float()), (data, scales))


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8-block-compressed", "fp8-channel", "fp8-tensor", "int4-group32", "int4-group128"])
def test_compressed_tensors(dtype: torch.dtype, name: str) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    values = matrix(dtype)[:200, :384] if name == "fp8-block-compressed" else matrix(dtype)
    integers = name.startswith("int4")
    group = int(name.removeprefix("int4-group")) if integers else None
    strategy = "group" if integers else name.split("-")[1]
    args = QuantizationArgs(
        num_bits=4 if integers else 8, type="int" if integers else "float", strategy=strategy, group_size=group, symmetric=True,
        block_structure=[128, 128] if strategy == "block" else None,
    )  # fmt: skip
    cut = values.view(256, -1, group) if group else values
    if strategy == "block":
        cut = torch.nn.functional.pad(values, (0, 0, 0, 56)).view(2, 128, 3, 128)
    dims = {"tensor": (0, 1), "block": (1, 3)}.get(strategy, (cut.dim() - 1,))
    keep = strategy == "channel"
    scale, _ = calculate_qparams(cut.amin(dims, keepdim=keep), cut.amax(dims, keepdim=keep), args)
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % 128)) if strategy == "block" else values
    data = quantize(padded, scale, None, args, dtype=torch.int8 if integers else torch.float8_e4m3fn)[: len(values)]
    theirs = (pack_to_int32(data, 4), scale, torch.tensor(values.shape)) if integers else (data, scale)
    assert_same(reference(name, values), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4-modelopt"])
def test_torchao_as_recorded(dtype: torch.dtype, name: str) -> None:
    assert digest(reference(name, matrix(dtype))) == RECORDED[f"{name} {dtype}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4-modelopt"])
def test_torchao(dtype: torch.dtype, name: str) -> None:
    pytest.importorskip("torchao", reason="torchao is in no environment of this project; its results are recorded")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    values = matrix(dtype)
    if name == "nvfp4-modelopt":
        whole = per_tensor_amax_to_scale(values.abs().max().float())
        scales, data = nvfp4_quantize(values, 16, whole)
        theirs: tuple[torch.Tensor, ...] = (data, scales, whole)
    else:
        element = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
        scales, data = to_mx(values, element, 32, ScaleCalculationMode.RCEIL)
        theirs = (data, scales.view(torch.uint8))
    assert digest(theirs) == RECORDED[f"{name} {dtype}"]
    assert_same(reference(name, values), theirs)
