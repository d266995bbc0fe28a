"""What the tests of tensors share: all dtypes, and tensors of random bits (NaN payloads included) in awkward memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
)

MEMORIES = ("plain", "transposed", "sliced", "shifted")


def random_bits(shape: Sequence[int], dtype: torch.dtype, generator: np.random.Generator) -> torch.Tensor:
    """Any bit pattern that ``dtype`` has."""
    most = 2 if dtype == torch.bool else 256
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = generator.integers(0, most, count, np.uint8)
    return torch.from_numpy(data).view(dtype).view(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def stored(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """The same values in other memory: transposed, every other element of a larger one, or at an odd byte address."""
    shape = tuple(tensor.shape)
    if memory == "transposed" and tensor.dim() > 1:
        return tensor.view(_carrier(tensor)).transpose(0, -1).contiguous().transpose(0, -1).view(tensor.dtype)
    if memory == "sliced" and tensor.dim():
        wide = torch.empty((*shape[:-1], 2 * shape[-1] + 1), dtype=tensor.dtype)
        view = wide[..., 1::2]
        view.view(_carrier(tensor)).copy_(tensor.view(_carrier(tensor)))
        return view
    if memory == "shifted":
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        view = flat[1:].view(shape)
        view.view(_carrier(tensor)).copy_(tensor.view(_carrier(tensor)))
        return view
    return tensor


def _carrier(tensor: torch.Tensor) -> torch.dtype:
    """An integer type of the same width, so that copying keeps every bit."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def raw(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Bytes of each element, ``uint8[*shape, itemsize]``."""
    integers = np.array(tensor.detach().view(_carrier(tensor)).numpy(), order="C")
    return integers.reshape(*tensor.shape, 1).view(np.uint8)
