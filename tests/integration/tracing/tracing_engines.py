"""Engines for the tests of tracing: parameters and loaders as serving engines have them, written from their public contracts.

Query, key and value in one parameter, gate and up in one, all experts in two, an embedding padded to a round number of rows, each
cut over tensor-parallel ranks; loaders that take checkpoint tensors one by one, whatever their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

ROUND_ROWS = 32

Loaded = torch.Tensor


@dataclass(frozen=True)
class Sizes:
    """What the engines need to know of a model."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    experts: int = 0
    tied: bool = False
    fused: bool = False
    """The checkpoint holds query, key and value as one tensor, and gate and up as one."""
    interleaved: bool = False
    """The checkpoint holds all experts as one tensor, input dimension first, gate and up columns alternating."""


class LikeAnEngine:
    """One tensor-parallel rank."""

    def __init__(self, sizes: Sizes, rank: int = 0, ranks: int = 1, device: str = "cpu") -> None:
        self.sizes, self.rank, self.ranks = sizes, rank, ranks
        self.heads = sizes.heads // ranks
        self.kv_heads = max(sizes.kv_heads // ranks, 1)  # fewer heads than ranks: neighbours hold the same one
        self.kv_rank = rank * self.kv_heads if sizes.kv_heads >= ranks else rank * sizes.kv_heads // ranks
        self.inner = sizes.inner // ranks
        padded = -(-sizes.vocabulary // (ROUND_ROWS * ranks)) * ROUND_ROWS
        self.rows = range(rank * padded, (rank + 1) * padded)
        self.parameters: dict[str, torch.Tensor] = {}
        self._device = device
        self._make()

    def _new(self, name: str, *shape: int) -> None:
        data = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self._device)
        self.parameters[name] = torch.nn.Parameter(data, requires_grad=False)

    def _make(self) -> None:
        s = self.sizes
        self._new("model.embed_tokens.weight", len(self.rows), s.hidden)
        self._new("model.norm.weight", s.hidden)
        if not s.tied:
            self._new("lm_head.weight", len(self.rows), s.hidden)
        for layer in range(s.layers):
            at = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._new(f"{at}{norm}.weight", s.hidden)
            qkv = (self.heads + 2 * self.kv_heads) * s.head
            self._new(f"{at}self_attn.qkv_proj.weight", qkv, s.hidden)
            self._new(f"{at}self_attn.qkv_proj.bias", qkv)
            self._new(f"{at}self_attn.o_proj.weight", s.hidden, self.heads * s.head)
            if s.experts:
                self._new(f"{at}mlp.gate.weight", s.experts, s.hidden)
                self._new(f"{at}mlp.experts.w13_weight", s.experts, 2 * self.inner, s.hidden)
                self._new(f"{at}mlp.experts.w2_weight", s.experts, s.hidden, self.inner)
                if s.interleaved:
                    self._new(f"{at}mlp.experts.w13_bias", s.experts, 2 * self.inner)
            else:
                self._new(f"{at}mlp.gate_up_proj.weight", 2 * self.inner, s.hidden)
                self._new(f"{at}mlp.down_proj.weight", s.hidden, self.inner)

    def load_weights(self, tensors: Iterable[tuple[str, Loaded]]) -> set[str]:
        """Take checkpoint tensors under their names, in any order; return the parameters that were filled."""
        filled: set[str] = set()
        for name, loaded in tensors:
            if name == "lm_head.weight" and self.sizes.tied:
                continue
            filled.add(self._load(name, loaded))
        return filled

    def _load(self, name: str, loaded: Loaded) -> str:
        if ".mlp.experts." in name:
            return self._load_expert(name, loaded)
        for part, whole, shard in (
            ("q_proj", "qkv_proj", 0),
            ("k_proj", "qkv_proj", 1),
            ("v_proj", "qkv_proj", 2),
            ("gate_proj", "gate_up_proj", 0),
            ("up_proj", "gate_up_proj", 1),
        ):
            if f".{part}." in name:
                target = name.replace(part, whole)
                self._load_part(self.parameters[target].data, loaded, whole, shard)
                return target
        parameter = self.parameters[name].data
        if ".qkv_proj." in name:
            sizes = [self.sizes.heads * self.sizes.head, *[self.sizes.kv_heads * self.sizes.head] * 2]
            for shard, one in enumerate(torch.split(loaded, sizes)):
                self._load_part(parameter, one, "qkv_proj", shard)
        elif ".gate_up_proj." in name:
            for shard, one in enumerate(loaded.chunk(2)):
                self._load_part(parameter, one, "gate_up_proj", shard)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            mine = loaded[self.rows.start : self.rows.stop]
            parameter[: len(mine)].copy_(mine)
            parameter[len(mine) :].fill_(0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            width = parameter.shape[1]
            parameter.copy_(loaded.narrow(1, self.rank * width, width))
        else:
            parameter.copy_(loaded)
        return name

    def _load_part(self, parameter: torch.Tensor, loaded: Loaded, whole: str, shard: int) -> None:
        if whole == "qkv_proj":
            heads = [self.heads, self.kv_heads, self.kv_heads]
            first = sum(heads[:shard]) * self.sizes.head
            begin = (self.rank * self.heads if shard == 0 else self.kv_rank) * self.sizes.head
            count = heads[shard] * self.sizes.head
        else:
            first, begin, count = shard * self.inner, self.rank * self.inner, self.inner
        parameter.narrow(0, first, count).copy_(loaded.narrow(0, begin, count))

    def _load_expert(self, name: str, loaded: Loaded) -> str:
        at, _, rest = name.partition("mlp.experts.")
        at += "mlp.experts."
        mine = slice(self.rank * self.inner, (self.rank + 1) * self.inner)
        if self.sizes.interleaved:
            return self._load_all_experts(at, rest, loaded, mine)
        number, kind, _ = rest.split(".")
        target = at + ("w2_weight" if kind in ("down_proj", "w2") else "w13_weight")
        parameter = self.parameters[target].data[int(number)]
        if kind in ("down_proj", "w2"):
            parameter.copy_(loaded[:, mine])
        else:
            first = self.inner if kind in ("up_proj", "w3") else 0
            parameter[first : first + self.inner].copy_(loaded[mine])
        return target

    def _load_all_experts(self, at: str, rest: str, loaded: Loaded, mine: slice) -> str:
        target = at + {"gate_up_proj": "w13_weight", "gate_up_proj_bias": "w13_bias", "down_proj": "w2_weight"}[rest]
        parameter = self.parameters[target].data
        if rest == "down_proj":  # experts, inner, hidden
            parameter.copy_(loaded[:, mine].transpose(1, 2).contiguous())
        else:
            columns = loaded if rest.endswith("bias") else loaded.transpose(1, 2)
            for first, one in ((0, columns[:, ::2]), (self.inner, columns[:, 1::2])):
                parameter[:, first : first + self.inner].copy_(one[:, mine])
        return target
