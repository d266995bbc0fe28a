"""Stand-ins for Megatron-core models: modules with its names, shapes and attributes, those of TransformerEngine's modules too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

__all__ = ["Group", "Model", "llama_config", "place"]

Cut = tuple[int, int]
CUT = {"embeddings": 0, "output_layer": 0, "linear_qkv.weight": 0, "linear_fc1.weight": 0, "linear_proj": 1, "linear_fc2": 1}
"""Dimension that tensor parallelism cuts, by a part of the parameter's name."""


class Group:
    """A process group, as far as hf_state looks at one."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def llama_config(**changes: Any) -> Any:
    """The attributes of a Hugging Face configuration that the rules read."""
    given = dict(
        model_type="llama", vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=2, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def place(parent: nn.Module, path: str, value: nn.Module | torch.Tensor) -> None:
    """Put a module or parameter at a dotted path."""
    *way, last = path.split(".")
    for part in way:
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    if isinstance(value, nn.Module):
        parent.add_module(last, value)
    else:
        parent.register_parameter(last, value if isinstance(value, nn.Parameter) else nn.Parameter(value))


class Model(nn.Module):
    """A GPTModel of the given parameters, by name; ``layers`` are the numbers of its layers, from zero."""

    def __init__(
        self,
        hf: Any,
        parameters: dict[str, torch.Tensor],
        layers: Iterable[int] = (0, 1),
        *,
        tp: Cut = (0, 1),
        pp: Cut = (0, 1),
        ep: Cut = (0, 1),
        etp: Cut = (0, 1),
        first: bool = True,
        last: bool = True,
        **changes: Any,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = dict(
            num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, num_attention_heads=hf.num_attention_heads,
            num_query_groups=hf.num_key_value_heads, kv_channels=hf.head_dim, rotary_interleaved=False,
            multi_latent_attention=False,
            layernorm_zero_centered_gamma=False, virtual_pipeline_model_parallel_size=None, params_dtype=torch.float32,
            num_moe_experts=getattr(hf, "num_experts", None),
        )  # fmt: skip
        self.config = SimpleNamespace(**{**given, **changes})
        groups = {"tp": tp, "pp": pp, "ep": ep, "expt_tp": etp}
        self.pg_collection = SimpleNamespace(**{name: Group(*cut) for name, cut in groups.items()})
        self.pre_process, self.post_process = first, last
        self.share_embeddings_and_output_weights = hf.tie_word_embeddings
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()
        for number in layers:
            layer: Any = nn.Module()
            layer.layer_number = number + 1
            layer.mlp = nn.Module()
            count = (self.config.num_moe_experts or 0) // ep[1]
            layer.mlp.local_expert_indices = list(range(ep[0] * count, (ep[0] + 1) * count))
            self.decoder.layers.append(layer)
        self._layers = list(layers)
        for name, value in parameters.items():
            place(self, name, value)

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """What Megatron's checkpoints would call each parameter, and the box of it that this rank holds."""
        assert metadata["non_homogeneous_layers"]
        shards = {name: self._sharded(name, value.detach()) for name, value in self.named_parameters()}
        return {name.replace(".to_wrap.", "."): boxes for name, boxes in shards.items()}  # as Megatron-Bridge's wrapper does

    def _sharded(self, name: str, value: torch.Tensor) -> Any:
        key = re.sub(r"(?<=decoder\.layers\.)[0-9]+", lambda match: str(self._layers[int(match[0])]), name)
        expert = re.search(r"\.experts\..*?([0-9]+)$", name)
        group = self.pg_collection.expt_tp if expert else self.pg_collection.tp
        cut = next((dim for part, dim in CUT.items() if part in name), None)
        rank, size = (0, 1) if cut is None else (group.rank(), group.size())
        halves = value.chunk(2) if "linear_fc1.weight" in name else (value,)
        boxes = []
        for half, data in enumerate(halves):
            shape, offset = list(data.shape), [0] * value.ndim
            if cut is not None:
                offset[cut] = (half * size + rank) * shape[cut]
                shape[cut] *= size * len(halves)
            ahead = []
            if expert:
                layer: Any = self.get_submodule(".".join(name.split(".")[:3]))
                ahead = [layer.mlp.local_expert_indices[int(expert[1])]]
            boxes.append(
                SimpleNamespace(
                    key=key, local_shape=tuple(data.shape), global_shape=(*(8 for _ in ahead), *shape),
                    global_offset=(*ahead, *offset), prepend_axis_num=len(ahead),
                )
            )  # fmt: skip
        return SimpleNamespace(build=lambda: boxes) if len(boxes) > 1 else boxes[0]
