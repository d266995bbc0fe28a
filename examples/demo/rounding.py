"""How far a token is from the likeliest one, beside what rounding alone can do to that distance.

Two right implementations of a model sum in different orders. Where two tokens are all but equally likely, they may then choose
differently, and both are right. The distance is taken from the same checkpoint in float64, the rounding from what float32 makes of
the very same prefix: weights that are not the checkpoint's shift logits by orders of magnitude more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

__all__ = ["Shortfall", "shortfall_of"]

_ALLOWANCE = 8.0
"""Both of two tokens' logits are off by some rounding (2), and the other implementation's may be a few times ours (4)."""


@dataclass(frozen=True)
class Shortfall:
    """Of the worst token of a run: where it is, how far its logit is below the likeliest token's, and the rounding of logits."""

    position: int
    gap: float
    """In units of logits, computed in float64; 0 if it is the likeliest."""
    rounding: float
    """The largest difference between any logit of this run in float32 and in float64."""

    @property
    def within_rounding(self) -> bool:
        """Whether another order of summing explains the choice."""
        return self.gap <= _ALLOWANCE * self.rounding

    def __str__(self) -> str:
        return f"token {self.position} is {self.gap:.2g} below the likeliest, rounding is {self.rounding:.2g}"


def shortfall_of(model: PreTrainedModel, prefix: Sequence[int], tokens: Sequence[int]) -> Shortfall:
    """Take ``tokens`` as given after ``prefix``, one by one, and find the one that ``model`` likes least against its best.

    ``model`` computes in float32 and is left as it is.
    """
    ids = torch.tensor([[*prefix, *tokens]], dtype=torch.long)
    made = slice(len(prefix) - 1, ids.shape[1] - 1)
    with torch.inference_mode():
        rounded = model(ids).logits[0, made].double()
        exact = torch.nn.Module.to(copy.deepcopy(model), dtype=torch.float64)(ids).logits[0, made]
    gaps = exact.max(dim=-1).values - exact.gather(1, ids[0, len(prefix) :, None])[:, 0]
    worst = int(gaps.argmax())
    return Shortfall(worst, float(gaps[worst]), float((rounded - exact).abs().max()))
