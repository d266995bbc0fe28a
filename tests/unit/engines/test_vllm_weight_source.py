"""Holds which part of a ``WeightSource`` each trainer rank publishes, in both shapes. vLLM 0.33 itself was not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.engines.weight_sources import TENSORS, EarlierSource, Meta, NewerSource, Replicate, Shard

from weightsync.engines.vllm.weight_source import StagedSource
from weightsync.errors import ConfigurationError
from weightsync.model import Box


def held(source: StagedSource) -> dict[str, tuple[Box, torch.Tensor]]:
    manifest, shards = source.declare()
    assert {spec.name: spec.shape for spec in manifest} == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    return {shard.name: (shard.box, shard.tensor) for shard in shards}


def whole(name: str) -> tuple[Box, torch.Tensor]:
    return Box.whole(tuple(TENSORS[name].shape)), TENSORS[name]


def same(one: dict[str, tuple[Box, torch.Tensor]], other: dict[str, tuple[Box, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        one[name][0] == other[name][0] and torch.equal(one[name][1], other[name][1]) for name in one
    )


@pytest.mark.parametrize("newer", [False, True], ids=["until 0.32", "from 0.33"])
def test_whole_tensors_without_owners_are_published_by_rank_zero(newer: bool) -> None:
    for rank in (0, 1):
        source = StagedSource(NewerSource(EarlierSource().metadata(), rank, None) if newer else EarlierSource(), rank)
        source.stage()
        assert source.alone
        assert same(held(source), {name: whole(name) for name in TENSORS} if rank == 0 else {})


def test_whole_tensors_are_published_by_the_first_of_their_owners() -> None:
    owners = {"first.weight": (0, 1), "second.weight": (1,), "third.bias": (1, 0)}
    metas = [Meta(name, tensor.dtype, tuple(tensor.shape), owners[name]) for name, tensor in TENSORS.items()]
    for rank, mine in ((0, ["first.weight", "third.bias"]), (1, ["second.weight"])):
        source = StagedSource(NewerSource(metas, rank, None), rank)
        source.stage()
        assert not source.alone
        assert same(held(source), {name: whole(name) for name in mine})


def test_pieces_are_published_where_their_placements_say() -> None:
    """Rows over two ranks (uneven), columns over one axis of a mesh whose other axis replicates, and a plain tensor."""
    metas = [
        Meta("first.weight", torch.float32, (7, 5), (0, 1), (2,), (Shard(0),)),
        Meta("second.weight", torch.float32, (3, 4), (2, 3, 0, 1), (2, 2), (Replicate(), Shard(1))),
        Meta("third.bias", torch.float32, (3,)),
    ]

    def piece(meta: Meta, rank: int) -> torch.Tensor:
        tensor = TENSORS[meta.name]
        if meta.name == "first.weight":
            return tensor.chunk(2)[rank]
        return tensor.chunk(2, 1)[rank % 2] if meta.name == "second.weight" else tensor

    columns = {0: Box((0, 0), (3, 2)), 1: Box((0, 2), (3, 4))}
    rows = {0: Box((0, 0), (4, 5)), 1: Box((4, 0), (7, 5))}
    for rank in range(4):
        source = StagedSource(NewerSource(metas, rank, piece), rank)
        source.stage()
        assert not source.alone
        expected = {"second.weight": (columns[rank % 2], TENSORS["second.weight"].chunk(2, 1)[rank % 2])}
        if rank in rows:
            expected["first.weight"] = (rows[rank], TENSORS["first.weight"].chunk(2)[rank])
        if rank == 0:
            expected["third.bias"] = whole("third.bias")
        assert same(held(source), expected)


def test_the_same_memory_is_filled_again() -> None:
    source = StagedSource(EarlierSource(), 0)
    source.stage()
    before = source.declare()
    TENSORS["third.bias"].add_(1)
    source.stage()
    assert source.declare() is not None
    assert all(one is other for one, other in zip(before, source.declare(), strict=True))
    assert torch.equal(held(source)["third.bias"][1], TENSORS["third.bias"])


@pytest.mark.parametrize(
    ("walked", "message"),
    [
        ({"first.weight": (7, 5), "second.weight": (3, 4)}, "third.bias was declared and did not come"),
        (
            {"first.weight": (7, 5), "second.weight": (1, 4), "third.bias": (3,)},
            r"second.weight has shape \[1, 4\] instead of \[3, 4\]",
        ),
        ({"first.weight": (7, 5), "second.weight": (3, 4), "third.bias": (3,), "odd": (1,)}, "odd is not in its metadata"),
    ],
)
def test_a_source_that_yields_otherwise_than_it_declares_is_refused_after_its_walk(walked: dict[str, Any], message: str) -> None:
    ended = []

    class Wrong(EarlierSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from ((name, torch.zeros(shape)) for name, shape in walked.items())
            ended.append(True)

    with pytest.raises(ConfigurationError, match=message):
        StagedSource(Wrong(), 0).stage()
    assert ended


def test_a_source_whose_ranks_hold_parts_by_name_is_refused() -> None:
    class Parts(EarlierSource):
        def held_names(self) -> set[str] | None:
            return {"third.bias"}

    with pytest.raises(ConfigurationError, match="ModuleSource"):
        StagedSource(Parts(), 0)
