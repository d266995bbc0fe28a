"""What a run was: counted as it goes, summed up at its end."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import msgspec

from examples.grpo.reports import Progress
from examples.grpo.settings import Settings

__all__ = ["Outcome", "Record"]

_WINDOW = 20


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of ``--json``."""

    ok: bool
    """All steps were made, and no sample was beyond the staleness bound. Not: that reward rose."""
    mode: str
    engine: str
    steps: int
    reward_first: float
    """Mean of the first 20 batches; ``reward_last`` of the last 20."""
    reward_last: float
    max_staleness: int
    staleness_bound: int
    staleness: dict[int, int]
    """Samples, by how many versions their oldest token was behind the trainer."""
    versions: int
    """Published, the first one included."""
    samples: int
    tokens: int
    mixed_samples: int
    """Made by two versions or more."""
    dropped_groups: int
    """Finished too late for the bound."""
    trainer_idle_fraction: float
    """Of the trainer's time from its first batch on: waiting for batches and for replicas."""
    seconds: float
    rewards: list[float]
    """Mean reward of each twentieth of the run."""
    error: str | None = None


class Record:
    """Takes in each step."""

    def __init__(self, wish: Settings) -> None:
        self._wish = wish
        self._rewards: list[float] = []
        self._tokens = self._mixed = self._dropped = self._versions = 0
        self._waited = self._seconds = 0.0
        self.staleness: Counter[int] = Counter()
        """Samples, by how many versions their oldest token was behind the trainer."""

    def add(self, step: Progress) -> None:
        """One step more."""
        self._rewards.append(step.reward)
        self.staleness.update(step.staleness)
        self._tokens += step.tokens
        self._mixed += step.mixed
        self._dropped, self._versions = step.dropped, step.version + 1
        self._waited += step.waited
        self._seconds += step.seconds

    @property
    def recent_reward(self) -> float:
        """Mean over the last steps."""
        return fmean(self._rewards[-_WINDOW:]) if self._rewards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Consumed by the trainer, since its first batch."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def idle_fraction(self) -> float:
        """Of the trainer's time."""
        return self._waited / self._seconds if self._seconds else 0.0

    def outcome(self, seconds: float, error: str | None) -> Outcome:
        """Sum up after ``seconds`` in all."""
        rewards, worst = self._rewards, max(self.staleness, default=0)
        size = max(1, len(rewards) // 20)
        if error is None and len(rewards) < self._wish.steps:
            error = f"only {len(rewards)} of {self._wish.steps} steps were made"
        return Outcome(
            ok=error is None and worst <= self._wish.bound,
            mode=self._wish.mode,
            engine=self._wish.engine,
            steps=len(rewards),
            reward_first=round(fmean(rewards[:_WINDOW]), 4) if rewards else 0.0,
            reward_last=round(self.recent_reward, 4),
            max_staleness=worst,
            staleness_bound=self._wish.bound,
            staleness=dict(sorted(self.staleness.items())),
            versions=self._versions,
            samples=self.staleness.total(),
            tokens=self._tokens,
            mixed_samples=self._mixed,
            dropped_groups=self._dropped,
            trainer_idle_fraction=round(self.idle_fraction, 4),
            seconds=round(seconds, 2),
            rewards=[round(fmean(rewards[at : at + size]), 3) for at in range(0, len(rewards), size)],
            error=error,
        )
