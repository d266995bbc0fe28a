"""Pure functions of layouts and manifests, computed once for each input: in thousands of schedules the same few come again.

Only results that nobody changes are kept. How much memory the machine has is asked once: no schedule depends on it. Nor is
any of the simulated parameters in a mapping that cannot be written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import weightsync.coordinator.agent_messages
import weightsync.engine.engine_role
import weightsync.engine.fill.filler
import weightsync.engine.read_back
import weightsync.protocol.dial
import weightsync.publishing.published_shards
import weightsync.transports.host.memory
from weightsync.coordinator import negotiation
from weightsync.model import Layout, Manifest
from weightsync.planning.buckets import staging_layout
from weightsync.planning.coverage import Coverage, coverage_of
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import Plan, plan_transfer
from weightsync.protocol.agent_proof import proving_connection
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.shards import Shard
from weightsync.transports.host.memory import available_bytes

__all__ = ["REMEMBERED"]

_MOST_RESULTS = 1 << 14

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
    return manifest, pieces.digest, len(pieces.sources), layout.digest, tuple(addresses), tuple(groups)


def _pieces_key(manifest: Manifest, layout: Layout, *rest: Any) -> tuple[Hashable, ...]:
    return manifest, layout.digest, *rest


def _columns_of(layout: Layout, manifest: Manifest) -> tuple[Hashable, ...]:
    columns = layout.tensor, layout.starts, layout.stops, layout.region, layout.offset, layout.strides
    return manifest, layout.regions, *(column.tobytes() for column in columns)


_cover = _remembering(_covered, _cover_key)

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
    (weightsync.engine.fill.filler, "tiles_of", _remembering(tiles_of, _tiles_key)),
    (weightsync.publishing.published_shards, "packed_layout", _remembering(packed_layout, _boxes)),
    (weightsync.transports.host.memory, "available_bytes", functools.cache(available_bytes)),
    (Layout, "_check", _remembering(Layout._check, _columns_of)),
    (Layout, "from_columns", staticmethod(_remembering(Layout.from_columns, lambda *given: given))),
    (Layout, "to_columns", _remembering(Layout.to_columns, lambda layout: (layout,))),
    (Pieces, "from_columns", staticmethod(_remembering(Pieces.from_columns, _pieces_key))),
    (Pieces, "to_columns", _remembering(Pieces.to_columns, lambda pieces: (pieces,))),
)
"""Object, name of an attribute, and what takes its place while schedules run."""
