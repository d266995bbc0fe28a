"""Host memory in which an engine keeps one version of an adapter. It is received there, so nothing copies it a second time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides
from weightsync.tensors.shards import torch_dtype

_ALIGNMENT = 64


def stacked_layout(manifest: Manifest, stacks: Sequence[Sequence[str]], piece_bytes: int) -> Layout:
    """Lay out all tensors of ``manifest``, whole, in regions of about ``piece_bytes``: those of a stack one after the other.

    Args:
        manifest: Tensors, none of them empty.
        stacks: Names of tensors of one shape and dtype each. Every tensor is in one of them.
        piece_bytes: Bytes of a region. One for a larger stack is as large as that.
    """
    count, sizes = len(manifest), [0]
    region, offset = np.zeros(count, np.int32), np.zeros(count, np.int64)
    for stack in stacks:
        rows, nbytes = [manifest.index[name] for name in stack], manifest[manifest.index[stack[0]]].nbytes
        first = -(-sizes[-1] // _ALIGNMENT) * _ALIGNMENT
        if sizes[-1] and first + nbytes * len(rows) > piece_bytes:
            sizes.append(0)
            first = 0
        region[rows], offset[rows] = len(sizes) - 1, first + nbytes * np.arange(len(rows))
        sizes[-1] = first + nbytes * len(rows)
    tensors, starts, stops = np.arange(count, dtype=np.int32), np.zeros_like(manifest.shapes), manifest.shapes
    strides = packed_strides(stops, manifest.itemsizes)
    return Layout(manifest, tensors, starts, stops, region, offset, strides, tuple(sizes))


class LoraMemory(Mapping[str, torch.Tensor]):
    """The tensors of one version in ``pieces``, flat tensors of bytes in host memory, which are the regions of ``layout``.

    A tensor is made when it is asked for: that of each of 18,000 matrices would take longer than copying them.
    """

    def __init__(self, manifest: Manifest, layout: Layout, pieces: Sequence[torch.Tensor]) -> None:
        self._manifest, self.layout, self._pieces = manifest, layout, pieces

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each piece begins."""
        return tuple(piece.data_ptr() for piece in self._pieces)

    def stack(self, name: str, count: int) -> torch.Tensor:
        """Return ``count`` tensors as one, from ``name`` on: those of a stack."""
        row = self._manifest.index[name]
        spec, first = self._manifest[row], int(self.layout.offset[row])
        memory = self._pieces[int(self.layout.region[row])][first : first + count * spec.nbytes]
        return memory.view(torch_dtype(spec.dtype)).view(count, *spec.shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stack(name, 1)[0]

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self._manifest)

    def __len__(self) -> int:
        return len(self._manifest)
