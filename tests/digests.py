"""The digest by its definition (``docs/digest.md``), in plain NumPy: what the compiled loops are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.model import itemsize
from weightsync.tensors.digest import PUBLIC, DigestConstants
from weightsync.tensors.kernels import BLOCK


def _mixed(x: npt.NDArray[np.uint64], seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(seeds[0])
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(seeds[1])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def reference_digest(
    values: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int], starts: Sequence[int], constants: DigestConstants = PUBLIC
) -> int:
    """Compute the definition in plain NumPy, slowly.

    ``values`` are the bytes of the box, ``uint8[*box shape, itemsize]``.
    """
    size = itemsize(dtype)
    whole, first = tuple(shape) or (1,), tuple(starts) or (0,)
    box = values.reshape(*(values.shape[:-1] or (1,)), size)
    blocks = -(-whole[-1] * size // (4 * BLOCK))
    total = 0
    leading = np.ndindex(*box.shape[:-2])
    for index in leading:
        row = 0
        for position, start, extent in zip(index, first[:-1], whole[:-1], strict=True):
            row = row * extent + start + position
        data = np.zeros(-(-whole[-1] * size // 4) * 4, np.uint8)
        data[first[-1] * size : (first[-1] + box.shape[-2]) * size] = box[index].reshape(-1)
        words = data.view("<u4").astype(np.uint64)
        word = np.arange(len(words), dtype=np.uint64)
        seeds = constants.words[BLOCK:].view(np.uint64).tolist()
        factors = _mixed(np.uint64(row * blocks) + word // np.uint64(BLOCK), seeds) | np.uint64(1)
        total += int((factors * constants.words[word % np.uint64(BLOCK)].astype(np.uint64) * words).sum(dtype=np.uint64))
    return total % 2**64
