"""The bits that each format of quantized weights must give, computed plainly from whole matrices.

`tests/integration/vllm/test_quantized_references.py` compares these with the functions of DeepGEMM, compressed-tensors and torchao.
"""

from __future__ import annotations

import math

import torch

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1, by code."""

NAMES = {
    "fp8-block": ("weight", "weight_scale_inv"),
    "fp8-block-e8m0": ("weight", "weight_scale_inv"),
    "fp8-block-compressed": ("weight", "weight_scale"),
    "fp8-channel": ("weight", "weight_scale"),
    "fp8-tensor": ("weight", "weight_scale"),
    "mxfp8": ("weight", "weight_scale"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "int4-group32": ("weight_packed", "weight_scale", "weight_shape"),
    "int4-group128": ("weight_packed", "weight_scale", "weight_shape"),
}
"""Names of a checkpoint's tensors in each format."""


def reference(name: str, matrix: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Quantize a whole matrix. ``largest`` is the largest absolute value of all fused matrices; by default, of this one."""
    largest = matrix.abs().max() if largest is None else largest
    if name == "fp8-block-compressed":
        return _compressed_blocks(matrix)
    if name.startswith("fp8-block"):
        return _deepseek(matrix, power=name.endswith("e8m0"))
    if name == "fp8-channel":
        return _compressed(matrix, matrix.abs().amax(1, keepdim=True))
    if name == "fp8-tensor":
        return _compressed(matrix, largest.reshape(1))
    if name.startswith("int4"):
        return _int4(matrix, int(name.removeprefix("int4-group")))
    if name.startswith("mx"):
        return _mx(matrix, 448.0 if name == "mxfp8" else 6.0)
    return _nvfp4(matrix, largest.float(), inverse=name == "nvfp4")


def _deepseek(matrix: torch.Tensor, *, power: bool) -> tuple[torch.Tensor, ...]:
    data = torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            scale = matrix[block].abs().max().float().clamp(min=1e-4) / 448
            if power:
                mantissa, exponent = math.frexp(float(scale))
                scale = torch.tensor(2.0 ** (exponent - (mantissa == 0.5)))
            scales[row, column] = scale
            data[block] = (matrix[block].float() * (1.0 / scale)).to(torch.float8_e4m3fn)
    return data, scales.to(torch.float8_e8m0fnu) if power else scales


def _compressed(matrix: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = (maxima.float() / 448).to(matrix.dtype)  # what an operation on bfloat16 does
    scale[scale == 0] = torch.finfo(matrix.dtype).eps
    return (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _compressed_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    data = torch.zeros(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128), dtype=matrix.dtype)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            data[block], scale = _compressed(matrix[block], matrix[block].abs().max().reshape(1))
            scales[row, column] = scale
    return data, scales


def _int4(matrix: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    groups = matrix.reshape(matrix.shape[0], -1, group)
    scale = (groups.abs().amax(2).float() / 7.5).to(matrix.dtype)
    scale[scale == 0] = torch.finfo(matrix.dtype).eps
    codes = ((groups / scale[:, :, None]).round().clamp(-8, 7).long() + 8).reshape(matrix.shape[0], -1, 8)
    packed = sum((codes[:, :, place] << 4 * place for place in range(8)), torch.zeros(codes.shape[:2], dtype=torch.int64))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return packed, scale, torch.tensor(matrix.shape)


def _mx(matrix: torch.Tensor, top: float) -> tuple[torch.Tensor, ...]:
    blocks = matrix.float().reshape(matrix.shape[0], -1, 32)
    exponents = torch.zeros(blocks.shape[:2], dtype=torch.uint8)
    scaled = torch.zeros(blocks.shape)
    for row in range(blocks.shape[0]):
        for column in range(blocks.shape[1]):
            quotient = float(blocks[row, column].abs().max() / torch.tensor(top))
            exponent = 0
            if quotient > 0:
                mantissa, power = math.frexp(quotient)
                exponent = max(power - (mantissa == 0.5) + 127, 0)
            exponents[row, column] = exponent
            scaled[row, column] = blocks[row, column] * (2.0 ** (127 - exponent) if exponent else 1.0)
    scaled = scaled.reshape(matrix.shape).clamp(-top, top)
    return scaled.to(torch.float8_e4m3fn) if top > 6 else _float4(scaled), exponents


def _nvfp4(matrix: torch.Tensor, largest: torch.Tensor, *, inverse: bool) -> tuple[torch.Tensor, ...]:
    whole = largest / (448 * 6) if largest else torch.ones(())
    blocks = matrix.float().reshape(matrix.shape[0], -1, 16)
    scales = (blocks.abs().amax(2) / 6 / whole).clamp(2.0**-6, 448).to(torch.float8_e4m3fn)
    scaled = blocks * ((1 / whole) / scales.float())[:, :, None]
    return _float4(scaled.reshape(matrix.shape)), scales, (1 / whole).reshape(1) if inverse else whole.reshape(())


def _float4(values: torch.Tensor) -> torch.Tensor:
    """Two codes of E2M1 in a byte, each of the nearest value; of two, of the one with an even code."""
    distances = (values.double().abs()[..., None] - torch.tensor(FLOAT4, dtype=torch.float64)).abs()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # argmin takes the first
    codes = torch.tensor(order)[distances[..., order].argmin(-1)] + 8 * values.signbit().long()
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
