"""Staging layout for streamed delivery: whole tensors, packed into buckets in canonical order."""

from __future__ import annotations

import numpy as np

from weightsync.errors import ConfigurationError
from weightsync.model import Layout, Manifest
from weightsync.model.layout import packed_strides

_ALIGNMENT = 512  # bytes


def staging_layout(manifest: Manifest, bucket_bytes: int) -> Layout:
    """Pack whole tensors into buckets of at most ``bucket_bytes``: region ``k`` is bucket ``k``, each tensor is one contiguous row.

    Every tensor starts at a multiple of 512 bytes. A tensor larger than ``bucket_bytes`` gets a bucket of its own size.
    Tensors without elements have no row.

    Raises:
        ConfigurationError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise ConfigurationError(f"bucket_bytes must be a positive number of bytes, not {bucket_bytes}")
    tensor, region, offset = [], [], []
    regions: list[int] = []
    for index, spec in enumerate(manifest):
        nbytes = spec.nbytes
        if not nbytes:
            continue
        begin = -(-regions[-1] // _ALIGNMENT) * _ALIGNMENT if regions else 0
        if not regions or begin + nbytes > bucket_bytes:
            regions.append(0)
            begin = 0
        regions[-1] = begin + nbytes
        tensor.append(index)
        region.append(len(regions) - 1)
        offset.append(begin)
    chosen = np.array(tensor, np.int32)
    stops = manifest.shapes[chosen]
    return Layout(
        manifest,
        chosen,
        np.zeros_like(stops),
        stops,
        np.array(region, np.int32),
        np.array(offset, np.int64),
        packed_strides(stops, manifest.itemsizes[chosen]),
        tuple(regions),
    )
