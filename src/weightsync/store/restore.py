"""Whole tensors of a stored version, verified: for ``weightsync store verify`` and ``export``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from weightsync.arrays import Bytes
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, VerificationError
from weightsync.model import TensorSpec
from weightsync.model.dtypes import SAFETENSORS_DTYPES
from weightsync.model.stored import StoredObject
from weightsync.planning.buckets import staging_layout
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.store.containers import safetensors_header
from weightsync.store.objects import ObjectStore
from weightsync.store.region import StoredRegion, verified_chunk
from weightsync.store.signing import StoredVersion
from weightsync.tensors.copy_table import tiles_of

_NOWHERE = Host("", "")


def check_object(store: ObjectStore, item: StoredObject) -> None:
    """Read an object. Raises :class:`~weightsync.errors.VerificationError` unless it is what was stored."""
    if store.size(item.path) != item.nbytes:
        raise VerificationError(f"{item.path} in the store {store.url} does not have {item.nbytes:,} bytes: it was changed")
    for chunk in range(item.chunks):
        verified_chunk(store, item, chunk)


def tensors_of(
    store: ObjectStore, version: StoredVersion, deadline: Deadline, bucket_bytes: int = 1 << 30
) -> Iterator[list[tuple[TensorSpec, Bytes]]]:
    """Yield all tensors of a version, as many at a time as have ``bucket_bytes`` together, or one that is larger.

    Their memory is used again for the next ones.

    Raises:
        VerificationError: An object, or the digest of a tensor, is not what was stored.
        LayoutError: The ranks do not hold every element of every tensor.
        WeightSyncError: What reading raises.
    """
    manifest = version.manifest
    target = staging_layout(manifest, bucket_bytes)
    sources = {str(rank): layout for rank, layout in enumerate(version.layouts)}
    plan = plan_transfer(
        manifest,
        [SourceRank(member, _NOWHERE, layout) for member, layout in sources.items()],
        [TargetRank("restore", _NOWHERE, target)],
    )
    pieces = plan.pieces("restore")
    memory = np.empty(max(target.regions, default=0), np.uint8)
    first = np.searchsorted(target.region, np.arange(len(target.regions) + 1)).tolist()
    groups = list(pairwise(first))
    tables = tiles_of(manifest, pieces, target, [memory.ctypes.data] * len(target.regions), groups)
    with ExitStack() as opened:
        regions = []
        for member, tiles in zip(pieces.sources, tables, strict=True):
            region = StoredRegion(store, version.stored.ranks[int(member)].chain, sources[member].regions[0])
            opened.callback(region.close)
            region.prepare(tiles)
            regions.append(region)
        digests = np.zeros(len(target), np.uint64)
        for group, (begin, end) in enumerate(groups):
            for region in regions:
                region.read(group, deadline, digests)
            tensors = target.tensor[begin:end]
            wrong = np.flatnonzero(digests[begin:end] != version.digests[tensors])
            if len(wrong):
                name = manifest[int(tensors[wrong[0]])].name
                raise VerificationError(f"{len(wrong)} tensors of version {version.version} are not what was published: {name}")
            specs = [manifest[int(tensor)] for tensor in tensors]
            starts = target.offset[begin:end].tolist()
            yield [(spec, memory[start : start + spec.nbytes]) for spec, start in zip(specs, starts, strict=True)]


def export(store: ObjectStore, version: StoredVersion, folder: Path, deadline: Deadline, file_bytes: int = 4 << 30) -> list[Path]:
    """Write a version as a checkpoint of Hugging Face's form, the index last. Returns the files; if it fails, none is left.

    Raises:
        ConfigurationError: ``folder`` has a checkpoint, or cannot be written.
        WeightSyncError: What :func:`tensors_of` raises.
    """
    index = folder / "model.safetensors.index.json"
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.safetensors")) or index.exists():
            raise ConfigurationError(f"{folder} has a checkpoint already: give another folder")
        weights: dict[str, str] = {}
        count = len(staging_layout(version.manifest, file_bytes).regions)
        for number, tensors in enumerate(tensors_of(store, version, deadline, file_bytes), 1):
            written.append(folder / (f"model-{number:05d}-of-{count:05d}.safetensors"))
            _write(written[-1], tensors, str(version.version))
            weights |= dict.fromkeys((spec.name for spec, _ in tensors), written[-1].name)
        total = sum(spec.nbytes for spec in version.manifest)
        written.append(index)
        index.write_bytes(msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weights}))
    except BaseException as error:
        for path in written:  # part of a checkpoint would be taken for one
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigurationError(f"cannot write to {folder}: {error.strerror or error}") from None
        raise
    return written


def _write(path: Path, tensors: list[tuple[TensorSpec, Bytes]], version: str) -> None:
    entries, end = [], 0
    for spec, _ in tensors:
        entries.append((spec.name, SAFETENSORS_DTYPES[spec.dtype], spec.shape, end, end + spec.nbytes))
        end += spec.nbytes
    with path.open("xb") as file:
        file.write(safetensors_header(entries, {"format": "pt", "weightsync_version": version}))
        for _, data in tensors:
            file.write(data.data)
