"""Pure functions of layouts and manifests, computed once for each input: in thousands of schedules the same few come again.

Only results that nobody changes are kept. How much memory the machine has is asked once: no schedule depends on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import weightsync.agents.dial
import weightsync.control.remote
import weightsync.roles.engine
import weightsync.roles.read_back
import weightsync.roles.route
import weightsync.roles.trainer
import weightsync.transports.memory
from weightsync.agents.proving import proving
from weightsync.control import agreement
from weightsync.model import Layout, Manifest
from weightsync.planning.buckets import staging_layout
from weightsync.planning.cover import Cover, cover
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import Plan, plan_transfer
from weightsync.tensors.memory import layout_in_place, packed_layout
from weightsync.tensors.shards import Shard
from weightsync.tensors.tiles import tiles_of
from weightsync.transports.memory import available_bytes

__all__ = ["REMEMBERED"]

_MOST_RESULTS = 1 << 14

Key = Callable[..., tuple[Hashable, ...]]


def _remembering(work: Callable[..., Any], key: Key) -> Callable[..., Any]:
    """``work``, done once for each key of its arguments. An error is not kept."""
    results: dict[tuple[Hashable, ...], Any] = {}

    @functools.wraps(work)
    def remembered(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
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


def _covered(manifest: Manifest, layouts: Mapping[str, Layout], whose: str, **_: object) -> Cover:
    return cover(manifest, layouts, whose)


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


def _in_place(manifest: Manifest, shards: Sequence[Shard], **options: Any) -> tuple[Layout, tuple[int, ...]]:  # noqa: ANN401
    bases = {one.tensor.untyped_storage().data_ptr() for one in shards}
    if len(bases) != 1:
        return layout_in_place(manifest, shards, **options)
    return _layout_in_place(manifest, shards, **options), tuple(bases)


def _tiles_key(manifest: Manifest, pieces: Pieces, layout: Layout, addresses: Sequence[int], groups: Any) -> tuple[Hashable, ...]:  # noqa: ANN401
    return manifest, pieces.digest, len(pieces.sources), layout.digest, tuple(addresses), tuple(groups)


def _pieces_key(manifest: Manifest, layout: Layout, *rest: Any) -> tuple[Hashable, ...]:  # noqa: ANN401
    return manifest, layout.digest, *rest


def _columns_of(layout: Layout, manifest: Manifest) -> tuple[Hashable, ...]:
    columns = layout.tensor, layout.starts, layout.stops, layout.region, layout.offset, layout.strides
    return manifest, layout.regions, *(column.tobytes() for column in columns)


_cover = _remembering(_covered, _cover_key)

REMEMBERED: tuple[tuple[Any, str, Any], ...] = (
    (agreement, "cover", _cover),
    (agreement, "plan_transfer", _remembering(_planned, lambda manifest, *sides, **_: (manifest, *map(_ranks, sides)))),
    (agreement, "staging_layout", _remembering(staging_layout, lambda *given: given)),
    (weightsync.agents.dial, "proving", _remembering(proving, lambda *given: given)),
    (weightsync.control.remote, "Manifest", _remembering(Manifest, lambda specs: specs)),
    (weightsync.roles.engine, "layout_in_place", _in_place),
    (weightsync.roles.read_back, "layout_in_place", _in_place),
    (weightsync.roles.route, "cover", _cover),
    (weightsync.roles.route, "tiles_of", _remembering(tiles_of, _tiles_key)),
    (weightsync.roles.trainer, "packed_layout", _remembering(packed_layout, _boxes)),
    (weightsync.transports.memory, "available_bytes", functools.cache(available_bytes)),
    (Layout, "_check", _remembering(Layout._check, _columns_of)),
    (Layout, "from_columns", staticmethod(_remembering(Layout.from_columns, lambda *given: given))),
    (Layout, "to_columns", _remembering(Layout.to_columns, lambda layout: (layout,))),
    (Pieces, "from_columns", staticmethod(_remembering(Pieces.from_columns, _pieces_key))),
    (Pieces, "to_columns", _remembering(Pieces.to_columns, lambda pieces: (pieces,))),
)
"""Object, name of an attribute, and what takes its place while schedules run."""
