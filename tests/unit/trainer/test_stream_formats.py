"""Formats of a stream's matrices, without ranks: which matrices share a scale, by their names."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from weightsync.tensors.quantization import formats_by_pattern
from weightsync.trainer.stream_formats import StreamFormats


@pytest.mark.parametrize("kind", ["fp8-tensor", "nvfp4"])
def test_names_that_differ_in_a_digit_only_are_different_matrices(kind: str) -> None:
    """Mixtral and MiniMax call gate and up ``w1`` and ``w3``: they share a scale, and no name."""

    def published(gate: str, up: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        matrices = {f"layers.3.experts.7.{name}.weight": torch.randn(64, 64, generator=generator) for name in (up, gate)}
        formats = StreamFormats(partial(formats_by_pattern, patterns={"*.weight": kind}), torch.bfloat16)
        parts = dict(part for name, matrix in matrices.items() for part in formats.published(name, matrix))
        assert {name.rpartition(".")[0] for name in parts} == {name.removesuffix(".weight") for name in matrices}
        return [parts[name] for name in sorted(parts)]

    mixtral, llama = published("w1", "w3"), published("gate_proj", "up_proj")
    assert all(torch.equal(own.view(torch.uint8), other.view(torch.uint8)) for own, other in zip(mixtral, llama, strict=True))
