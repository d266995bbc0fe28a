"""Packings: over all ranks, the pieces of a stack are its Hugging Face tensors, each element once."""

from __future__ import annotations

import pytest
import torch
from tests.unit.integrations.megatron_standins import llama_config

from weightsync.errors import LayoutError
from weightsync.integrations.megatron.blocks import attention, experts, gated_mlp, vocabulary, whole
from weightsync.integrations.megatron.packing import Packing, Part

CONFIG = llama_config(num_attention_heads=8, num_key_value_heads=4, intermediate_size=16)
PACKINGS = {
    "grouped": attention(CONFIG)["self_attention.linear_qkv.weight"],
    "grouped bias": attention(CONFIG, bias=True)["self_attention.linear_qkv.bias"],
    "gated": gated_mlp(CONFIG)["mlp.linear_fc1.weight"],
    "gated bias": gated_mlp(CONFIG, bias=True)["mlp.linear_fc1.bias"],
    "by columns": gated_mlp(CONFIG)["mlp.linear_fc2.weight"],
    "one expert of a stack": experts(CONFIG, 3, 16, stacked=True)["mlp.experts.1.linear_fc1.weight"],
    "its columns": experts(CONFIG, 3, 16, stacked=True)["mlp.experts.1.linear_fc2.weight"],
    "uncut": whole("norm", 8),
}


def cut_shape(packing: Packing, size: int) -> tuple[int, ...]:
    shape = list(packing.parts[0].local_shape(packing.dim))
    shape[packing.dim] = sum(part.extent(packing.dim) for part in packing.parts) // (size if packing.cut else 1)
    return tuple(shape)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_pieces_of_all_ranks_are_each_element_once(packing: Packing, size: int) -> None:
    shape = cut_shape(packing, size)
    seen = {part.name: torch.zeros(part.shape, dtype=torch.int64) for part in packing.parts}
    for rank in range(size if packing.cut else 1):
        places = torch.zeros(shape[packing.dim], dtype=torch.int64)
        for piece in packing.pieces(packing.runs(shape, rank, size)):
            region = tuple(map(slice, piece.box.starts, piece.box.stops))
            seen[piece.part.name][region] += 1
            places[piece.start : piece.stop] += 1
            assert piece.box.size == (piece.stop - piece.start) * torch.Size(shape).numel() // shape[packing.dim]
        assert places.eq(1).all()
    wanted = {part.name: torch.zeros(part.shape, dtype=torch.int64) for part in packing.parts}
    for part in packing.parts:
        box = part.box(packing.dim, 0, part.extent(packing.dim))
        wanted[part.name][tuple(map(slice, box.starts, box.stops))] = 1
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


def test_padding_belongs_to_nobody() -> None:
    packing = vocabulary(CONFIG)["embedding.word_embeddings.weight"]
    held = [
        [(piece.box.starts[0], piece.box.stops[0]) for piece in packing.pieces(packing.runs((4, 8), rank, 4))] for rank in range(4)
    ]
    assert held == [[(0, 4)], [(4, 8)], [(8, 10)], []]


def test_what_every_rank_holds_whole_is_not_cut() -> None:
    packing = whole("down", 6, 8, cut=True)
    assert [piece.box.stops for piece in packing.pieces(packing.runs((6, 8), 1, 2))] == [(6, 8)]
    assert [piece.box.starts for piece in packing.pieces(packing.runs((3, 8), 1, 2))] == [(3, 0)]


@pytest.mark.parametrize(
    ("packing", "shape"),
    [
        (PACKINGS["grouped"], (32, 7)),
        (PACKINGS["grouped"], (31, 8)),
        (PACKINGS["grouped"], (32,)),
        (PACKINGS["uncut"], (4,)),
        (vocabulary(CONFIG)["output_layer.weight"], (4, 8)),
        (Packing((Part("a", (3,)), Part("b", (3,))), interleaved=True), (3,)),
    ],
)
def test_a_shape_that_the_configuration_does_not_mean_is_refused(packing: Packing, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="the Hugging Face configuration means"):
        packing.runs(shape, 0, 2)
