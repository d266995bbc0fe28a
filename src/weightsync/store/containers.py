"""Headers of key frames and deltas. Both are safetensors files (https://huggingface.co/docs/safetensors) that any reader opens.

=========  ========================================================================================================================
object     its tensors
=========  ========================================================================================================================
key frame  the rank's shards, where they are in its region. A shard that is a whole tensor has the tensor's name; a box of one has
           its bounds behind the name, as in ``model.embed_tokens.weight[0:1024, 0:512]``
delta      ``ends`` and ``lists``: the words of the region that changed since the object before it
=========  ========================================================================================================================

A delta cuts the region into blocks of 8 KiB, and these into words of two bytes, whatever the dtypes. ``ends[block]`` is
where the block's list ends, in words. A list has the n places of the words in the block, ascending, then their n values; or
it is the block, where half of its words or more changed.

Bytes between two shards are tensors, too, as the format allows no gaps: ``_padding.0``, ``_padding.1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from weightsync.model import Layout, Manifest, Version
from weightsync.model.dtypes import SAFETENSORS_DTYPES
from weightsync.model.stored import STORED_BLOCK
from weightsync.tensors.change_kernels import CHANGE_BLOCK

_LINE = 64


def blocks_of(nbytes: int) -> int:
    """Number of blocks of a region of ``nbytes``."""
    return -(-nbytes // CHANGE_BLOCK)


Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype, shape, and the first and last byte of the data."""


def safetensors_header(entries: Iterable[Entry], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """Return the bytes of a file before its data, a multiple of ``align``. ``entries`` are in the order of their bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end, paddings = 0, 0
    for name, dtype, shape, first, last in entries:
        if first > end:
            header[f"_padding.{paddings}"] = {"dtype": "U8", "shape": (first - end,), "data_offsets": (end, first)}
            paddings += 1
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (first, last)}
        end = last
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def key_header(manifest: Manifest, layout: Layout, version: Version) -> bytes:
    """Header of the key frame of a rank whose shards are laid out by ``layout``, one region of contiguous rows."""
    entries: list[Entry] = []
    for row in range(len(layout)):
        spec, box, first = manifest[int(layout.tensor[row])], layout.box(row, manifest), int(layout.offset[row])
        bounds = ", ".join(f"{start}:{stop}" for start, stop in zip(box.starts, box.stops, strict=True))
        name = spec.name if box.shape == spec.shape else f"{spec.name}[{bounds}]"
        last = first + box.size * (spec.nbytes // max(spec.size, 1))
        entries.append((name, SAFETENSORS_DTYPES[spec.dtype], box.shape, first, last))
    end = entries[-1][4] if entries else 0
    if layout.regions[0] > end:
        entries.append(("_padding", "U8", (layout.regions[0] - end,), end, layout.regions[0]))
    return safetensors_header(entries, {"weightsync": "key frame", "version": str(version)}, STORED_BLOCK)


def lists_offset(ends: int) -> int:
    """First byte of the lists in a delta's data, behind ``ends`` numbers of four bytes."""
    return -(-4 * ends // _LINE) * _LINE


def delta_header(ends: int, words: int, version: Version, base: tuple[int, int]) -> bytes:
    """Header of a delta with so many ends of lists and so many words in them."""
    first = lists_offset(ends)
    entries = [("ends", "U32", (ends,), 0, 4 * ends), ("lists", "U16", (words,), first, first + 2 * words)]
    metadata = {"weightsync": "delta", "version": str(version), "base_epoch": str(base[0]), "base_number": str(base[1])}
    return safetensors_header(entries, metadata, STORED_BLOCK)
