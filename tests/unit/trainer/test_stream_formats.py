"""What is published for each tensor of a stream: at once, with its group, or at the end. No tensor is kept."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from weightsync.errors import ConfigurationError
from weightsync.tensors.quantization import formats_by_pattern
from weightsync.trainer.stream_formats import StreamFormats


def formats(name: str) -> StreamFormats:
    return StreamFormats(partial(formats_by_pattern, patterns={"*_proj.weight": name}), torch.bfloat16)


def names(parts: list[tuple[str, torch.Tensor]]) -> list[str]:
    return sorted(name for name, _ in parts)


def test_matrices_that_share_a_scale_wait_for_one_another_and_others_come_at_once() -> None:
    stream = formats("fp8-tensor")
    for _ in range(2):
        stream.begin()
        sizes = {"a.3.q_proj": 1.0, "a.3.o_proj": 2.0, "a.3.v_proj": 3.0, "a.4.k_proj": 5.0, "a.3.k_proj": 4.0, "norm": 1.0}
        given = {name: size * torch.ones(4, 16) for name, size in sizes.items()}
        came = {name: stream.published(f"{name}.weight", matrix) for name, matrix in given.items()}
        assert [name for name in came if not came[name]] == ["a.3.q_proj", "a.3.v_proj", "a.4.k_proj"]
        assert names(came["a.3.o_proj"]) == ["a.3.o_proj.weight", "a.3.o_proj.weight_scale"]
        group = dict(came["a.3.k_proj"])
        assert sorted(group) == sorted(f"a.3.{name}_proj.weight{part}" for name in "qkv" for part in ("", "_scale"))
        assert len({float(group[f"a.3.{name}_proj.weight_scale"]) for name in "qkv"}) == 1
        assert [(name, tensor.dtype) for name, tensor in came["norm"]] == [("norm.weight", torch.bfloat16)]
        assert names(stream.rest()) == ["a.4.k_proj.weight", "a.4.k_proj.weight_scale"]


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4"])
def test_neither_what_came_nor_what_was_published_stays_alive(name: str) -> None:
    stream = formats(name)
    for _ in range(2):
        matrix = torch.ones(128, 128, dtype=torch.bfloat16)
        parts = stream.published("down_proj.weight", matrix)
        alive = [weakref.ref(matrix), *(weakref.ref(part) for _, part in parts)]
        del matrix, parts
        assert [each() for each in alive] == [None] * len(alive)


def test_what_a_failed_publication_held_is_dropped() -> None:
    stream = formats("nvfp4")
    assert stream.published("0.gate_proj.weight", torch.ones(4, 16)) == []
    stream.begin()
    assert stream.published("0.up_proj.weight", torch.full((4, 16), torch.inf)) == []
    with pytest.raises(ConfigurationError, match=r"0\.up_proj\.weight holds Inf or NaN"):
        stream.rest()


@pytest.mark.parametrize("kind", ["fp8-tensor", "nvfp4"])
def test_names_that_differ_in_a_digit_only_are_different_matrices(kind: str) -> None:
    """Mixtral and MiniMax call gate and up ``w1`` and ``w3``: they share a scale, and no name."""

    def published(gate: str, up: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        matrices = {f"layers.3.experts.7.{name}.weight": torch.randn(64, 64, generator=generator) for name in (up, gate)}
        stream = StreamFormats(partial(formats_by_pattern, patterns={"*.weight": kind}), torch.bfloat16)
        parts = dict(part for name, matrix in matrices.items() for part in stream.published(name, matrix))
        assert {name.rpartition(".")[0] for name in parts} == {name.removesuffix(".weight") for name in matrices}
        return [parts[name] for name in sorted(parts)]

    mixtral, llama = published("w1", "w3"), published("gate_proj", "up_proj")
    assert all(torch.equal(own.view(torch.uint8), other.view(torch.uint8)) for own, other in zip(mixtral, llama, strict=True))
