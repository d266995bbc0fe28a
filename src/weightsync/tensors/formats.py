"""Formats of quantized weights: how a block of a matrix becomes scales and codes, and under which names a checkpoint stores them.

Each format gives the bits of one reference implementation, on every device and for every part of a matrix, because it uses only
operations that IEEE 754 defines. The maximum of a block is an argument: it may span several ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weightsync.errors import ConfigurationError
from weightsync.model import TensorSpec
from weightsync.tensors.shards import dtype_name

_FP8, _FP4 = 448.0, 6.0
_SMALLEST_MAXIMUM = 1e-4  # DeepSeek's, of a block of zeros
_LEAST_FP8_SCALE = 2.0**-6  # torchao's, the smallest normal number of float8_e4m3fn
_HALF_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the values of E2M1
_WEIGHT = "weight"


@dataclass(frozen=True)
class Format(ABC):
    """A format for matrices of ``float32``, ``bfloat16`` or ``float16``."""

    name: str
    reference: str
    """Implementation whose bits this format gives."""
    block: tuple[int, int]
    """Rows and columns of the block that shares a scale; 0 stands for all of them."""
    data_name: str
    scale_name: str
    """Last part of the names of data and scales. It replaces ``weight``."""
    packed: int = 1
    """Values in one element of the data."""

    uses_whole = False
    """Whether the maximum of the whole matrix is needed, too."""
    inverse = False
    """Whether the scale of the whole matrix is published as its reciprocal."""
    rule = ""
    """Rule of scales and codes in the kernel: ``block``, ``power``, ``divide``, ``mx`` or ``nvfp4``."""

    @property
    def fuses(self) -> bool:
        """Whether matrices that engines fuse (q, k and v; gate and up) must share a scale of the whole matrix."""
        return self.uses_whole or self.block == (0, 0)

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a block of a matrix of ``shape``."""
        rows, columns = self.block
        return rows or max(shape[0], 1), columns or max(shape[1], 1)

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Number of blocks in each dimension."""
        rows, columns = self.blocks(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def check(self, spec: TensorSpec) -> None:
        """Check that ``spec`` can be quantized.

        Raises:
            ConfigurationError: It is no matrix of floating-point numbers named ``weight``, or its columns do not divide.
        """
        if len(spec.shape) != 2 or spec.dtype not in ("float32", "bfloat16", "float16") or not prod(spec.shape):
            raise ConfigurationError(
                f"{spec.name} cannot be quantized to {self.name}: it is {spec.dtype} of shape {list(spec.shape)}, not a matrix of "
                "float32, bfloat16 or float16. Let the pattern match less"
            )
        if not all(name.endswith(f".{_WEIGHT}") or name == _WEIGHT for name in spec.names):
            raise ConfigurationError(
                f"{spec.name} cannot be quantized to {self.name}: the names of its scales follow from one that ends with .{_WEIGHT}"
            )
        rows, columns = self.block
        if rows == 1 and columns and spec.shape[1] % columns:
            raise ConfigurationError(
                f"{spec.name} cannot be quantized to {self.name}: blocks of {columns} do not divide its {spec.shape[1]} columns"
            )

    def specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Tensors that take the place of ``spec``: data, scales, and what else the checkpoint has."""
        rows, columns = spec.shape
        data = self._spec(spec, self.data_name, (rows, columns // self.packed), dtype_name(self.data_dtype))
        shape = self.grid((rows, columns)) if self.block != (0, 0) else (1,)
        return data, self._spec(spec, self.scale_name, shape, self.scale_dtype(spec.dtype)), *self._more(spec)

    @staticmethod
    def _spec(spec: TensorSpec, part: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
        name, *aliases = (name.removesuffix(_WEIGHT) + part for name in (spec.name, *spec.aliases))
        return TensorSpec(name, shape, dtype, tuple(aliases))

    def _more(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return ()

    def more(self, shapes: Sequence[tuple[int, ...]], wholes: torch.Tensor) -> Sequence[torch.Tensor]:
        """Contents of the tensor after data and scales, for each matrix of these shapes, if there is one.

        Args:
            shapes: Of the matrices.
            wholes: Largest absolute value of each of them, if the format needs it.
        """
        return ()

    @property
    @abstractmethod
    def data_dtype(self) -> torch.dtype:
        """Dtype of the published data."""

    @abstractmethod
    def scale_dtype(self, dtype: str) -> str:
        """Dtype of the published scales of a matrix of ``dtype``."""

    @abstractmethod
    def scales(self, maxima: torch.Tensor, dtype: torch.dtype, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of blocks, as published, and the factors with which :meth:`codes` encodes their values.

        Args:
            maxima: Largest absolute values of the blocks, ``float32``.
            dtype: Dtype of the matrix.
            whole: Largest absolute values of the whole matrices, of the shape of ``maxima``; ``maxima`` if the format needs none.
        """

    @abstractmethod
    def codes(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Encode ``values``, one element for each."""

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack a matrix of codes as it is published."""
        if self.packed == 1:
            return codes
        dtype = self.data_dtype
        shifts = torch.arange(0, 4 * self.packed, 4, dtype=dtype, device=codes.device)
        return (codes.view(codes.shape[0], -1, self.packed).to(dtype) << shifts).sum(-1, dtype=dtype)


@dataclass(frozen=True)
class _BlockFp8(Format):
    """DeepSeek's cast, as in DeepGEMM's ``per_block_cast_to_fp8``. With the rule ``power`` scales are powers of two."""

    rule: str = "block"

    data_dtype = torch.float8_e4m3fn

    def scale_dtype(self, dtype: str) -> str:
        return "float8_e8m0fnu" if self.rule == "power" else "float32"

    def scales(self, maxima: torch.Tensor, dtype: torch.dtype, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = maxima.clamp(min=_SMALLEST_MAXIMUM) / _constant(_FP8, maxima)
        if self.rule == "block":
            return scales, scales.reciprocal()
        exponents = _ceiling_exponents(scales)
        return exponents.view(torch.float8_e8m0fnu), _power(254 - exponents.int())

    def codes(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return (values * factors).to(self.data_dtype)


@dataclass(frozen=True)
class _Scaled(Format):
    """Compressed-tensors' symmetric quantization, which computes in the dtype of the matrix."""

    half_range: float = _FP8
    lowest: float = -_FP8
    highest: float = _FP8

    rule = "divide"

    @property
    def data_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.packed == 1 else torch.int32

    def scale_dtype(self, dtype: str) -> str:
        return dtype

    def _more(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return () if self.packed == 1 else (self._spec(spec, "weight_shape", (2,), "int64"),)

    def more(self, shapes: Sequence[tuple[int, ...]], wholes: torch.Tensor) -> Sequence[torch.Tensor]:
        return () if self.packed == 1 else torch.tensor(shapes, device=wholes.device).unbind()

    def scales(self, maxima: torch.Tensor, dtype: torch.dtype, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = maxima.to(dtype) / _constant(self.half_range, maxima)
        scales = torch.where(scales == 0, _constant(torch.finfo(dtype).eps, scales), scales)
        return scales, scales

    def codes(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        scaled = (values / factors).clamp(self.lowest, self.highest)
        return scaled.to(self.data_dtype) if self.packed == 1 else (scaled.round() - self.lowest).to(torch.uint8)


@dataclass(frozen=True)
class _Mx(Format):
    """The OCP's microscaling formats, with scales rounded up (``RCEIL``), as torchao quantizes weights for inference."""

    rule = "mx"

    @property
    def data_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.packed == 1 else torch.uint8

    def scale_dtype(self, dtype: str) -> str:
        return "uint8"

    def scales(self, maxima: torch.Tensor, dtype: torch.dtype, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = _ceiling_exponents(maxima / _constant(_FP8 if self.packed == 1 else _FP4, maxima))
        return exponents, torch.where(exponents == 0, _constant(1.0, maxima), _power(254 - exponents.int()))

    def codes(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        scaled = values.float() * factors
        return scaled.clamp(-_FP8, _FP8).to(self.data_dtype) if self.packed == 1 else _e2m1(scaled)


@dataclass(frozen=True)
class _Nvfp4(Format):
    """NVIDIA's FP4: a scale for each block, relative to one of the whole matrix, as torchao quantizes it.

    ``inverse`` publishes the reciprocal of the scale of the matrix, as compressed-tensors stores it. A matrix of zeros, for which
    torchao computes NaN, has the scale 1.
    """

    whole_name: str = "weight_global_scale"
    inverse: bool = True

    rule, uses_whole = "nvfp4", True
    data_dtype = torch.uint8

    def scale_dtype(self, dtype: str) -> str:
        return "float8_e4m3fn"

    def _more(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (self._spec(spec, self.whole_name, (1,) if self.inverse else (), "float32"),)

    def more(self, shapes: Sequence[tuple[int, ...]], wholes: torch.Tensor) -> Sequence[torch.Tensor]:
        scales = self._of_whole(wholes)
        return torch.split(scales.reciprocal(), 1) if self.inverse else scales.unbind()

    @staticmethod
    def _of_whole(whole: torch.Tensor) -> torch.Tensor:
        scale = whole / _constant(_FP8 * _FP4, whole)
        return torch.where(scale == 0, _constant(1.0, whole), scale)

    def scales(self, maxima: torch.Tensor, dtype: torch.dtype, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_whole = self._of_whole(whole)
        scales = (maxima / _constant(_FP4, maxima) / of_whole).clamp(_LEAST_FP8_SCALE, _FP8).to(torch.float8_e4m3fn)
        return scales, of_whole.reciprocal() / scales.float()

    def codes(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return _e2m1(values.float() * factors)


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """``value`` on the device of ``like``. Torch multiplies by the reciprocal of a Python number on CUDA, which rounds twice."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _ceiling_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Biased exponents of the smallest powers of two that are not below ``scales``, ``uint8``; 0 up to 2^-127."""
    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) > 0).int()
    return torch.where(bits > 1 << 22, exponents, 0).to(torch.uint8)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """``float32`` of biased exponents."""
    return (exponents << 23).view(torch.float32)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest values of E2M1; of two as near, the one with the even mantissa. Saturates."""
    steps = torch.tensor(_HALF_STEPS, dtype=torch.float32, device=values.device)
    below = torch.nextafter(steps, torch.zeros_like(steps))
    odd = torch.arange(len(_HALF_STEPS), device=values.device) % 2 == 1
    codes = torch.bucketize(values.abs(), torch.where(odd, below, steps), out_int32=True).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3)


_DEEPSEEK, _COMPRESSED, _TORCHAO = "DeepGEMM per_block_cast_to_fp8", "compressed-tensors quantize", "torchao"
_FORMATS: tuple[Format, ...] = (
    _BlockFp8("fp8-block", _DEEPSEEK, (128, 128), "weight", "weight_scale_inv"),
    _BlockFp8("fp8-block-e8m0", _DEEPSEEK, (128, 128), "weight", "weight_scale_inv", rule="power"),
    _Scaled("fp8-block-compressed", _COMPRESSED, (128, 128), "weight", "weight_scale"),
    _Scaled("fp8-channel", _COMPRESSED, (1, 0), "weight", "weight_scale"),
    _Scaled("fp8-tensor", _COMPRESSED, (0, 0), "weight", "weight_scale"),
    _Mx("mxfp8", f"{_TORCHAO} to_mx (RCEIL)", (1, 32), "weight", "weight_scale"),
    _Mx("mxfp4", f"{_TORCHAO} to_mx (RCEIL)", (1, 32), "weight_packed", "weight_scale", 2),
    _Nvfp4("nvfp4", f"{_TORCHAO} nvfp4_quantize", (1, 16), "weight_packed", "weight_scale", 2),
    _Nvfp4("nvfp4-modelopt", f"{_TORCHAO} nvfp4_quantize", (1, 16), "weight", "weight_scale", 2, "weight_scale_2", inverse=False),
    *(
        _Scaled(
            f"int4-group{group}", _COMPRESSED, (1, group), "weight_packed", "weight_scale", 8,
            half_range=7.5, lowest=-8.0, highest=7.0,
        )
        for group in (32, 128)
    ),
)  # fmt: skip
FORMATS: Mapping[str, Format] = {format_.name: format_ for format_ in _FORMATS}
"""All formats by name."""

REFUSED = ("gguf", "awq", "bitsandbytes", "gptq")
"""Methods that a trainer cannot write."""


def format_of(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in FORMATS:
        why = " cannot be written by a trainer: its scales depend on more than the weights" if name in REFUSED else " is unknown"
        raise ConfigurationError(f"quantization format {name!r}{why}; formats: {', '.join(FORMATS)}")
    return FORMATS[name]
