"""GRPO: advantages relative to the group, the clipped ratio, a loss over tokens. No value model.

The method is that of DeepSeekMath (Shao et al. 2024), with DAPO's (Yu et al. 2025) mean over all tokens of a batch and its higher
upper bound of the ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightsync_rollouts import Sample

__all__ = ["Batch", "Loss", "advantages", "policy_loss"]

_LOWEST, _HIGHEST = 0.8, 1.28
_FLAT = 1e-6


@dataclass(frozen=True)
class Batch:
    """Samples as tensors, padded at their end; all ``[rows, length - 1]`` but :attr:`tokens`: the first has no probability."""

    tokens: torch.Tensor
    """``int64[rows, length]``: prompt and answer."""
    sampled: torch.Tensor
    """Log-probabilities under the weights that made each token, as the server reported them."""
    weight: torch.Tensor
    """The advantage of the row's sample, at the tokens of its answer."""
    mask: torch.Tensor
    """1 at the tokens of the answer, else 0."""

    @classmethod
    def of(cls, samples: Sequence[Sample], weights: Sequence[float]) -> Batch:
        """Lay out ``samples`` with an advantage each."""
        length = max(len(sample.prompt) + len(sample.tokens) for sample in samples)
        tokens = torch.zeros(len(samples), length, dtype=torch.long)
        sampled, weight, mask = (torch.zeros(len(samples), length - 1) for _ in range(3))
        for row, (sample, advantage) in enumerate(zip(samples, weights, strict=True)):
            both = [*sample.prompt, *sample.tokens]
            answer = slice(len(sample.prompt) - 1, len(both) - 1)
            tokens[row, : len(both)] = torch.tensor(both)
            sampled[row, answer] = torch.tensor(sample.logprobs)
            weight[row, answer] = advantage
            mask[row, answer] = 1.0
        return cls(tokens, sampled, weight, mask)

    def part(self, index: int, parts: int) -> Batch:
        """The rows of one rank."""
        return Batch(*(one[index::parts] for one in (self.tokens, self.sampled, self.weight, self.mask)))


@dataclass(frozen=True)
class Loss:
    """The sum over tokens, to be divided by :attr:`tokens` of all ranks together; how many ratios were cut off."""

    total: torch.Tensor
    tokens: int
    clipped: int


def advantages(rewards: Sequence[float]) -> list[float]:
    """By how many standard deviations each reward is above its group's mean; all zero where all are equal."""
    found = torch.tensor(rewards, dtype=torch.float64)
    spread = found.std(correction=0)
    return [0.0] * len(rewards) if spread < _FLAT else ((found - found.mean()) / spread).tolist()


def policy_loss(now: torch.Tensor, batch: Batch) -> Loss:
    """``now``: the log-probabilities of the same tokens under the weights that are being trained."""
    ratio = (now - batch.sampled).exp()
    gain = torch.minimum(ratio * batch.weight, ratio.clamp(_LOWEST, _HIGHEST) * batch.weight)
    cut = (ratio * batch.weight > gain) & (batch.mask > 0)
    return Loss(-(gain * batch.mask).sum(), int(batch.mask.sum()), int(cut.sum()))
