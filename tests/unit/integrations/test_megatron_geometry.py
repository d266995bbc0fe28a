"""Rules against what a model's sharded_state_dict() says: what shapes alone cannot tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.integrations.megatron_standins import llama_config

from weightsync.errors import LayoutError
from weightsync.integrations.megatron.blocks import attention, gated_mlp, vocabulary
from weightsync.integrations.megatron.packing import Packing
from weightsync.integrations.megatron.state import check_geometry

CONFIG = llama_config(num_attention_heads=8, num_key_value_heads=4, intermediate_size=16)
GATED, DOWN = gated_mlp(CONFIG)["mlp.linear_fc1.weight"], gated_mlp(CONFIG)["mlp.linear_fc2.weight"]
QKV, OUTPUT = attention(CONFIG)["self_attention.linear_qkv.weight"], vocabulary(CONFIG)["output_layer.weight"]


def box(local: tuple[int, ...], whole: tuple[int, ...], at: tuple[int, ...], layer: int = 3, ahead: tuple[int, ...] = ()) -> Any:
    """A ShardedTensor, as far as it is looked at."""
    return SimpleNamespace(
        key=f"decoder.layers.{layer}.x", local_shape=local, global_shape=(*(8 for _ in ahead), *whole), global_offset=(*ahead, *at),
        prepend_axis_num=len(ahead),
    )  # fmt: skip


AGREEING: dict[str, tuple[Packing, tuple[int, ...], int, list[int], list[Any]]] = {
    "a run": (QKV, (8, 8), 1, [3], [box((8, 8), (32, 8), (8, 0))]),
    "columns": (DOWN, (8, 4), 3, [3], [box((8, 4), (8, 16), (0, 12))]),
    "two halves": (GATED, (8, 8), 2, [3], [box((4, 8), (32, 8), (8, 0)), box((4, 8), (32, 8), (24, 0))]),
    "all of it": (GATED, (32, 8), 2, [3], [box((16, 8), (32, 8), (0, 0)), box((16, 8), (32, 8), (16, 0))]),
    "an expert": (DOWN, (8, 4), 0, [3, 6], [box((8, 4), (8, 16), (0, 0), ahead=(6,))]),
    "a layer as an axis": (DOWN, (8, 4), 0, [3], [box((8, 4), (8, 16), (0, 0), ahead=(3,))]),
    "padding": (OUTPUT, (4, 8), 2, [3], [box((4, 8), (16, 8), (8, 0))]),
}
AGREEING["a layer as an axis"][4][0].key = "decoder.layers.x"


@pytest.mark.parametrize(("rule", "shape", "rank", "numbers", "declared"), AGREEING.values(), ids=AGREEING)
def test_geometry_that_agrees(rule: Packing, shape: tuple[int, ...], rank: int, numbers: list[int], declared: list[Any]) -> None:
    check_geometry(rule, rule.runs(shape, rank, 4), numbers, declared)


CONTRADICTING: dict[str, tuple[Packing, tuple[int, ...], list[int], list[Any], str]] = {
    "another rank's run": (QKV, (8, 8), [3], [box((8, 8), (32, 8), (16, 0))], r"\[\(8, 16\)\] of .* but \[\(16, 24\)\]"),
    "a part of a wider tensor": (GATED, (32, 8), [3], [box((16, 8), (64, 8), (0, 0))], r"says \[64, 8\]"),
    "a part of a narrower one": (QKV, (8, 8), [3], [box((8, 8), (16, 8), (8, 0))], r"says \[16, 8\]"),
    "cut elsewhere": (QKV, (8, 8), [3], [box((8, 8), (8, 32), (0, 8))], r"says \[8, 32\]"),
    "halves as one run": (GATED, (8, 8), [3], [box((8, 8), (32, 8), (8, 0))], r"\[\(4, 8\), \(20, 24\)\] .* but \[\(8, 16\)\]"),
    "another layer": (DOWN, (8, 4), [2], [box((8, 4), (8, 16), (0, 4))], r"are \[2\] by their modules, but \[3\]"),
    "another expert": (DOWN, (8, 4), [3, 5], [box((8, 4), (8, 16), (0, 4), ahead=(6,))], r"are \[3, 5\] .* but \[3, 6\]"),
    "fewer rows than the vocabulary": (OUTPUT, (4, 8), [3], [box((4, 8), (8, 8), (4, 0))], r"says \[8, 8\]"),
    "unknown to it": (DOWN, (8, 4), [3], [], "does not have it"),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "shape", "numbers", "declared", "said"), CONTRADICTING.values(), ids=CONTRADICTING)
def test_geometry_that_contradicts_the_rules(
    rule: Packing, shape: tuple[int, ...], numbers: list[int], declared: list[Any], said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        check_geometry(rule, rule.runs(shape, 1, 4), numbers, declared)
