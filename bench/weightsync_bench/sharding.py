"""Layouts of FSDP, tensor and expert parallelism, computed from shapes alone: inputs of planning benchmarks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides

Int64 = npt.NDArray[np.int64]
Cut = tuple[Int64, int, int]
"""One mesh dimension: the padded dimension of each tensor that it cuts (-1 for none), this rank's index in it, and its size."""

_COLUMN = re.compile(
    r"\.(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|embed_tokens|lm_head)\.weight$|^lm_head\.weight$"
)
_ROW = re.compile(r"\.(o_proj|down_proj)\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def outermost(manifest: Manifest) -> Int64:
    """Return the padded index of each tensor's first dimension, ``int64[tensors]``. For a scalar it is the last dimension."""
    return manifest.dims - np.array([max(len(spec.shape), 1) for spec in manifest], np.int64)


def packed(manifest: Manifest, tensor: Int64, starts: Int64, stops: Int64, alignment: int = 512) -> Layout:
    """Pack contiguous shards one after the other into one region, each aligned to ``alignment`` bytes. Empty shards are omitted."""
    extents = stops - starts
    if extents.size and extents.min() < 1:
        full = np.all(extents > 0, axis=1)
        tensor, starts, stops, extents = tensor[full], starts[full], stops[full], extents[full]
    strides = packed_strides(extents, manifest.itemsizes[tensor])
    padded = -(-strides[:, 0] * extents[:, 0] // alignment) * alignment
    ends = np.cumsum(padded)
    total = int(ends[-1]) if len(ends) else 0
    region = np.zeros(len(tensor), np.int32)
    return Layout(manifest, tensor.astype(np.int32), starts, stops, region, ends - padded, strides, (total,))


def sharded(manifest: Manifest, cuts: Sequence[Cut], keep: npt.NDArray[np.bool_] | None = None) -> Layout:
    """Return one rank's layout after applying ``cuts`` to every tensor in turn, with the chunk sizes of ``torch.chunk``.

    ``keep`` (``bool[tensors]``) selects the tensors that this rank holds.
    """
    starts = np.zeros_like(manifest.shapes)
    stops = manifest.shapes.copy()
    for dim, place, count in cuts:
        rows = np.flatnonzero(dim >= 0)
        cells = rows * manifest.dims + dim[rows]
        begin, end = starts.ravel()[cells], stops.ravel()[cells]
        chunk = -(-(end - begin) // count)
        starts.ravel()[cells] = np.minimum(begin + place * chunk, end)
        stops.ravel()[cells] = np.minimum(begin + (place + 1) * chunk, end)
    if keep is None:
        return packed(manifest, np.arange(len(manifest)), starts, stops)
    tensor = np.flatnonzero(keep)
    return packed(manifest, tensor, starts[tensor], stops[tensor])


def fsdp(manifest: Manifest, ranks: int) -> list[Layout]:
    """Return the layouts of FSDP: every tensor is cut along its first dimension over ``ranks``."""
    first = outermost(manifest)
    return [sharded(manifest, [(first, rank, ranks)]) for rank in range(ranks)]


def parallel_dims(manifest: Manifest) -> Int64:
    """Return the padded dimension that tensor parallelism cuts of each tensor, -1 for none, ``int64[tensors]``."""
    first = outermost(manifest)
    dims = np.full(len(manifest), -1, np.int64)
    for index, spec in enumerate(manifest):
        if _COLUMN.search(spec.name):
            dims[index] = first[index]
        elif _ROW.search(spec.name):
            dims[index] = manifest.dims - 1
    return dims


def tensor_parallel(manifest: Manifest, ranks: int) -> list[Layout]:
    """Return Megatron's layouts: columns of q, k, v, gate, up and the vocabulary, rows of o and down, and the rest whole."""
    dims = parallel_dims(manifest)
    return [sharded(manifest, [(dims, rank, ranks)]) for rank in range(ranks)]


def expert_numbers(manifest: Manifest) -> Int64:
    """Return the number of the expert that each tensor belongs to, -1 for none, ``int64[tensors]``."""
    matches = [_EXPERT.search(spec.name) for spec in manifest]
    return np.array([int(match.group(1)) if match else -1 for match in matches], np.int64)


def expert_parallel(manifest: Manifest, ranks: int) -> list[Layout]:
    """Return layouts with whole experts in blocks by rank. All other tensors are as in :func:`tensor_parallel`."""
    expert = expert_numbers(manifest)
    dims = np.where(expert >= 0, -1, parallel_dims(manifest))
    each = -(-(int(expert.max()) + 1) // ranks) if len(expert) else 1
    return [sharded(manifest, [(dims, rank, ranks)], keep=(expert < 0) | (expert // max(each, 1) == rank)) for rank in range(ranks)]
