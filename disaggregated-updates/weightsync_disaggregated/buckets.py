"""Tensors of a manifest in buckets, each of which is sent with one request."""

from __future__ import annotations

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, TensorSpec


def buckets_of(manifest: Manifest, bucket_bytes: int) -> list[list[TensorSpec]]:
    """All tensors in buckets of one dtype and at most ``bucket_bytes``; a larger tensor has a separate bucket.

    One bucket is open for each dtype, so a checkpoint that alternates between weights and scales does not fall into small ones. In
    the order in which they are filled, which depends on nothing but the arguments.
    """
    if bucket_bytes < 1:
        raise ConfigurationError(f"a bucket has a positive number of bytes, not {bucket_bytes}")
    done: list[list[TensorSpec]] = []
    filling: dict[str, tuple[list[TensorSpec], int]] = {}
    for spec in manifest:
        bucket, size = filling.get(spec.dtype, ([], 0))
        if bucket and size + spec.nbytes > bucket_bytes:
            done.append(bucket)
            bucket, size = [], 0
        bucket.append(spec)
        filling[spec.dtype] = (bucket, size + spec.nbytes)
    return done + [bucket for bucket, _ in filling.values()]
