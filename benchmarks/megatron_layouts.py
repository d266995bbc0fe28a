"""Layouts of Megatron-core ranks from a Hugging Face configuration alone, by the rules that hf_state uses. Needs no Megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from weightsync.integrations.megatron.chunk import expert_number
from weightsync.integrations.megatron.families import FAMILIES
from weightsync.integrations.megatron.packing import Packing
from weightsync.integrations.megatron.state import ModelRules
from weightsync.model import Layout, Manifest

__all__ = ["EXPERTS", "OTHERS", "MegatronLayouts", "qwen3_30b_a3b_config", "stages"]

Cut = tuple[int, int]
"""Rank and size of a group."""
OTHERS, EXPERTS = 0, 1
"""Regions of a rank: what it shares with ranks that have other experts, and its experts."""
_NOT_CUT = ("linear_q_down_proj", "linear_kv_down_proj")
"""Every tensor-parallel rank has these whole in the layers of TransformerEngine."""


class MegatronLayouts:
    """Layouts of the ranks of one model in bfloat16. Parameters follow each other in a rank's memory."""

    def __init__(self, config: Any) -> None:
        self._rules = ModelRules(config, FAMILIES[config.model_type], "bfloat16", stacked=False)
        self.manifest: Manifest = self._rules.manifest

    def layout(
        self, layers: Collection[int], experts: Collection[int], *, tp: Cut = (0, 1), etp: Cut = (0, 1), first: bool, last: bool
    ) -> Layout:
        """Return what a rank holds of ``layers`` and ``experts``; the ``first`` and ``last`` stages have what is outside layers."""
        dims, sizes = self.manifest.dims, [0, 0]
        rows: list[tuple[int, list[int], list[int], int, int, list[int]]] = []
        for key, rule in self._held(layers, experts, first, last):
            in_experts = expert_number(key) is not None
            rank, size = etp if in_experts else tp
            if not rule.cut or any(name in key for name in _NOT_CUT):
                rank, size = 0, 1
            shape = list(rule.whole_shape)
            shape[rule.dim] = -(-shape[rule.dim] // size)
            itemsize = 4 if rule.dtype == "float32" else 2
            strides = [itemsize * int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
            region = EXPERTS if in_experts else OTHERS
            for piece in rule.pieces(rule.runs(tuple(shape), rank, size)):
                ahead = [0] * (dims - len(piece.part.shape))
                offset = sizes[region] + piece.start * strides[rule.dim]
                rows.append(
                    (
                        self.manifest.index[piece.part.name],
                        [*ahead, *piece.box.starts],
                        [*(1 for _ in ahead), *piece.box.stops],
                        region,
                        offset,
                        [*(strides[0] * shape[0] for _ in ahead), *strides],
                    )
                )
            sizes[region] += -(-strides[0] * shape[0] // 512) * 512
        rows.sort(key=lambda row: row[0])
        tensor, starts, stops, regions, offsets, strided = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        return Layout(
            self.manifest, tensor.astype(np.int32), starts, stops, regions.astype(np.int32), offsets, strided, tuple(sizes)
        )

    def _held(self, layers: Collection[int], experts: Collection[int], first: bool, last: bool) -> Iterator[tuple[str, Packing]]:
        seen = set[Any]()  # parameters that Megatron's own and TransformerEngine's modules name differently
        for (layer, key), rule in self._rules.packings.items():
            number = expert_number(key)
            outside = first if key.startswith("embedding") else last
            if (outside if layer is None else layer in layers) and (number is None or number in experts) and rule.parts not in seen:
                seen.add(rule.parts)
                yield key, rule


def stages(counts: Sequence[int]) -> list[range]:
    """Return the layers of each pipeline stage."""
    ends = np.cumsum(counts).tolist()
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def qwen3_30b_a3b_config(layers: int = 48, experts: int = 128) -> Any:
    """Return the configuration of Qwen3-30B-A3B, as far as rules read it."""
    return SimpleNamespace(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=layers,
        head_dim=128, num_attention_heads=32, num_key_value_heads=4, num_experts=experts, attention_bias=False, mlp_only_layers=[],
        decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
