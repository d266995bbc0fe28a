"""Pure functions of layouts and manifests, computed once for each input: in thousands of schedules the same few come again.

Only results that nobody changes are kept. How much memory the machine has is asked once: no schedule depends on it. Nor is
any of the simulated parameters in a mapping that cannot be written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import weightsync.coordinator.agent_messages
import weightsync.coordinator.planner
import weightsync.engine.engine_role
import weightsync.engine.fill.filler
import weightsync.engine.fill.streamed
import weightsync.engine.fill.windows
import weightsync.engine.lora_role
import weightsync.engine.read_back
import weightsync.protocol.dial
import weightsync.publishing.listed_changes
import weightsync.publishing.published_shards
import weightsync.trainer.stream_plan
import weightsync.trainer.trainer_role
import weightsync.transports.host.mapped
import weightsync.transports.host.memory
from weightsync.coordinator import negotiation
from weightsync.model import Layout, Manifest
from weightsync.model.window import WindowPart, window_layout
from weightsync.planning.buckets import staging_layout
from weightsync.planning.coverage import Coverage, coverage_of
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import Plan, plan_transfer
from weightsync.protocol.dial import proving_connection
from weightsync.tensors.copies import check_tiles
from weightsync.tensors.copy_table import CopyTable, tiles_of
from weightsync.tensors.digest import DigestConstants
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.shards import Shard
from weightsync.transports.host.memory import available_bytes

__all__ = ["REMEMBERED"]

_MOST_RESULTS = 1 << 14
_REGION_BITS = 40
"""Regions of fewer bytes than 2 to this power."""

Key = Callable[..., tuple[Hashable, ...]]


def _remembering(work: Callable[..., Any], key: Key) -> Callable[..., Any]:
    """``work``, done once for each key of its arguments. An error is not kept."""
    results: dict[tuple[Hashable, ...], Any] = {}

    @functools.wraps(work)
    def remembered(*arguments: Any, **options: Any) -> Any:
        known = key(*arguments, **options)
        if known not in results:
            if len(results) >= _MOST_RESULTS:
                results.clear()
            results[known] = work(*arguments, **options)
        return results[known]

    return remembered


def _ranks(ranks: Sequence[Any]) -> tuple[Hashable, ...]:
    return tuple((rank.member, rank.host, rank.layout.digest) for rank in ranks)


def _planned(manifest: Manifest, sources: Sequence[Any], targets: Sequence[Any], **_: object) -> Plan:
    """A plan that nobody stops, and whose memory nobody counts."""
    plan = plan_transfer(manifest, sources, targets)
    plan.pieces = functools.cache(plan.pieces)  # type: ignore[method-assign]
    return plan


def _covered(manifest: Manifest, layouts: Mapping[str, Layout], whose: str, **_: object) -> Coverage:
    return coverage_of(manifest, layouts, whose)


def _cover_key(manifest: Manifest, layouts: Mapping[str, Layout], whose: str, **_: object) -> tuple[Hashable, ...]:
    return manifest, whose, *((name, layout.digest) for name, layout in layouts.items())


def _boxes(manifest: Manifest, shards: Sequence[Shard]) -> tuple[Hashable, ...]:
    return manifest, *((one.name, one.shape, one.box) for one in shards)


def _offsets(manifest: Manifest, shards: Sequence[Shard], block_bytes: int | None = 1 << 20) -> tuple[Hashable, ...]:
    """How shards lie in the one storage that they share."""
    tensors = [one.tensor for one in shards]
    storage = tensors[0].untyped_storage()
    base = storage.data_ptr()
    lie = ((one.data_ptr() - base, one.dtype, one.stride()) for one in tensors)
    return *_boxes(manifest, shards), block_bytes, storage.nbytes(), *lie


_layout_in_place = _remembering(lambda *given, **options: layout_in_place(*given, **options)[0], _offsets)


def _in_place(manifest: Manifest, shards: Sequence[Shard], **options: Any) -> tuple[Layout, tuple[int, ...]]:
    bases = {one.tensor.untyped_storage().data_ptr() for one in shards}
    if len(bases) != 1:
        return layout_in_place(manifest, shards, **options)
    return _layout_in_place(manifest, shards, **options), tuple(bases)


def _tiles_key(manifest: Manifest, pieces: Pieces, layout: Layout, addresses: Sequence[int], groups: Any) -> tuple[Hashable, ...]:
    return manifest, pieces.digest, len(pieces.sources), layout.digest, len(addresses), tuple(groups)


_tiles_anywhere = _remembering(
    lambda manifest, pieces, layout, addresses, groups: tiles_of(
        manifest, pieces, layout, [index << _REGION_BITS for index in range(len(addresses))], groups
    ),
    _tiles_key,
)


def _tiles(manifest: Manifest, pieces: Pieces, layout: Layout, addresses: Sequence[int], groups: Any) -> list[list[CopyTable]]:
    """The same tiles wherever the regions begin: made once, and moved there."""
    made, bases = _tiles_anywhere(manifest, pieces, layout, addresses, groups), np.array(addresses, np.int64)
    return [[_moved(tiles, bases) for tiles in row] for row in made]


def _moved(tiles: CopyTable, bases: npt.NDArray[np.int64]) -> CopyTable:
    return replace(tiles, target=bases[tiles.target >> _REGION_BITS] + (tiles.target & ((1 << _REGION_BITS) - 1)))


def _tile_columns(tiles: CopyTable, sizes: Sequence[int]) -> tuple[Hashable, ...]:
    """What the check of a table's sources looks at."""
    columns = tiles.region, tiles.source, tiles.source_stride, tiles.rows, tiles.row_bytes
    return len(tiles.target), tuple(sizes), *(column.tobytes() for column in columns)


def _window(parts: Sequence[WindowPart], nbytes: int, *, assembled: bool = False) -> tuple[Hashable, ...]:
    return *parts, nbytes, assembled


def _pieces_key(manifest: Manifest, layout: Layout, *rest: Any) -> tuple[Hashable, ...]:
    return manifest, layout.digest, *rest


def _columns_of(layout: Layout, manifest: Manifest) -> tuple[Hashable, ...]:
    columns = layout.tensor, layout.starts, layout.stops, layout.region, layout.offset, layout.strides
    return manifest, layout.regions, *(column.tobytes() for column in columns)


_cover = _remembering(_covered, _cover_key)
_available = functools.cache(available_bytes)
_constants = functools.lru_cache(maxsize=64)(DigestConstants)
_window_layout = _remembering(window_layout, _window)

REMEMBERED: tuple[tuple[Any, str, Any], ...] = (
    (negotiation, "coverage_of", _cover),
    (negotiation, "plan_transfer", _remembering(_planned, lambda manifest, *sides, **_: (manifest, *map(_ranks, sides)))),
    (negotiation, "staging_layout", _remembering(staging_layout, lambda *given: given)),
    (weightsync.protocol.dial, "proving_connection", _remembering(proving_connection, lambda *given: given)),
    (weightsync.coordinator.agent_messages, "Manifest", _remembering(Manifest, lambda specs: specs)),
    (weightsync.engine.engine_role, "layout_in_place", _in_place),
    (weightsync.engine.engine_role, "check_writable", lambda *_: None),
    (weightsync.engine.read_back, "layout_in_place", _in_place),
    (weightsync.engine.fill.filler, "coverage_of", _cover),
    (weightsync.engine.fill.filler, "tiles_of", _tiles),
    (weightsync.engine.fill.windows, "tiles_of", _tiles),
    (weightsync.engine.fill.windows, "window_layout", _window_layout),
    (weightsync.trainer.stream_plan, "window_layout", _window_layout),
    (weightsync.transports.host.mapped, "check_tiles", _remembering(check_tiles, _tile_columns)),
    (weightsync.engine.engine_role, "DigestConstants", _constants),
    (weightsync.trainer.trainer_role, "DigestConstants", _constants),
    (weightsync.engine.fill.streamed, "available_bytes", _available),
    (weightsync.engine.fill.windows, "available_bytes", _available),
    (weightsync.engine.lora_role, "available_bytes", _available),
    (weightsync.publishing.listed_changes, "available_bytes", _available),
    (weightsync.publishing.published_shards, "packed_layout", _remembering(packed_layout, _boxes)),
    (weightsync.transports.host.memory, "available_bytes", _available),
    (weightsync.coordinator.planner, "_memory", functools.cache(weightsync.coordinator.planner._memory)),
    (Layout, "_check", _remembering(Layout._check, _columns_of)),
    (Layout, "from_columns", staticmethod(_remembering(Layout.from_columns, lambda *given: given))),
    (Layout, "to_columns", _remembering(Layout.to_columns, lambda layout: (layout,))),
    (Pieces, "from_columns", staticmethod(_remembering(Pieces.from_columns, _pieces_key))),
    (Pieces, "to_columns", _remembering(Pieces.to_columns, lambda pieces: (pieces,))),
)
"""Object, name of an attribute, and what takes its place while schedules run."""
