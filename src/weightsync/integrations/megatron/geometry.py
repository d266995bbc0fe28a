"""What a model's own ``sharded_state_dict()`` says of its parameters, compared with what the rules say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from weightsync.errors import LayoutError
from weightsync.integrations.megatron.packing import Packing

ShardedTensor: TypeAlias = Any
"""A ``megatron.core.dist_checkpointing.ShardedTensor``: a box of a tensor of the whole model."""
_NUMBERED = re.compile(r"^(?:decoder|mtp)\.layers\.([0-9]+)\.")


def sharded_tensors(model: nn.Module) -> Mapping[str, Sequence[ShardedTensor]]:
    """Return the boxes that each parameter of a GPTModel holds, by its local name: two for a gated MLP, which stacks two runs."""
    state: Any = model
    metadata = {
        "dp_cp_group": getattr(state.pg_collection, "dp_cp", None), "non_homogeneous_layers": True, "singleton_local_shards": False,
    }  # fmt: skip
    declared = state.sharded_state_dict(metadata=metadata)
    return {name: item.build() if hasattr(item, "build") else [item] for name, item in declared.items()}


def check_geometry(rule: Packing, runs: Sequence[tuple[int, int]], numbers: list[int], declared: Sequence[ShardedTensor]) -> None:
    """Check that ``rule`` and the model agree on a parameter's whole shape and on which part of it this rank holds.

    Args:
        rule: The rule of the parameter.
        runs: What this rank holds according to it.
        numbers: Layer and expert, as far as the parameter has any.
        declared: What the model declares.

    Raises:
        LayoutError: They do not agree.
    """
    if not declared:
        raise LayoutError("the model's own sharded_state_dict() does not have it")
    held = list[tuple[int, int]]()
    for item in declared:
        skipped = item.prepend_axis_num
        place = [*map(int, _NUMBERED.findall(item.key)), *item.global_offset[:skipped]]
        if place != numbers:
            raise LayoutError(f"layer and expert are {numbers} by their modules, but {place} in the model's sharded_state_dict()")
        starts, whole = item.global_offset[skipped:], list(item.global_shape[skipped:])
        held.append((starts[rule.dim], starts[rule.dim] + item.local_shape[rule.dim]))
        if rule.padded and whole[rule.dim] > rule.total:
            whole[rule.dim] = rule.total
        others = [starts[dim] for dim in range(len(starts)) if dim != rule.dim]
        if tuple(whole) != rule.whole_shape or any(others):
            raise LayoutError(
                f"the Hugging Face configuration means a whole of {list(rule.whole_shape)}, cut along dimension {rule.dim}, but "
                f"the model's sharded_state_dict() says {whole}, with this rank's part at {list(starts)}"
            )
    if _merged(held) != _merged(runs):
        raise LayoutError(
            f"this rank holds {_merged(runs)} of dimension {rule.dim} by the rules, but {_merged(held)} by the model's "
            "sharded_state_dict()"
        )


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = list[tuple[int, int]]()
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged
