"""A trainer rank's process: wait for a batch, learn from it, publish, again. The first rank also runs the rollout controller."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from examples.demo.ranks import join
from examples.demo.reports import Parent, Ready, die_with_parent
from examples.grpo.reports import Progress, WarmedUp
from examples.grpo.settings import Settings, TrainerSettings
from examples.grpo.task import ANSWER_TOKENS, END, problems, reward, text
from weightsync.config import ClientSettings
from weightsync.deadline import Deadline
from weightsync.errors import VersionError
from weightsync_rollouts import (
    Completions,
    Generate,
    Rollout,
    RolloutController,
    Rollouts,
    RolloutSettings,
    Sample,
    Sampling,
    Task,
    VllmTokens,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from examples.grpo.learner import Learner
    from weightsync.protocol.messages import RoundResult
    from weightsync.trainer.trainer import Trainer

__all__ = ["main", "staleness"]

_TIMEOUT = 600.0  # seconds for a batch, a round, another rank
_SAMPLING = Sampling(max_tokens=ANSWER_TOKENS, stop_token_ids=(END,))

Group = list[tuple[Sample, float]]
"""The answers to one problem, each with its reward."""


def group_task(prompt: Sequence[int], size: int) -> Task[Group]:
    """One rollout: ``size`` answers to one problem, asked for at once."""

    async def rollout(generate: Generate) -> Group:
        samples = await asyncio.gather(*(generate(prompt, _SAMPLING) for _ in range(size)))
        return [(sample, reward(prompt, sample.tokens)) for sample in samples]

    return rollout


def controller(mine: TrainerSettings) -> RolloutController[Group]:
    """Made on the rollouts' own thread."""
    wish = mine.settings
    admission = RolloutSettings(
        batch=wish.groups,
        max_staleness=wish.bound,  # what may start
        max_age=wish.bound,  # and what may be taken: an answer that took long is given up for a fresh one
        max_concurrent=2 * wish.groups,
        task_seconds=_TIMEOUT,
    )
    generation = VllmTokens() if wish.engine == "vllm" else Completions(stream=False)
    return RolloutController(admission, generation, mine.urls, coordinator=ClientSettings.load(coordinator=mine.coordinator))


def staleness(version: int, rollouts: Sequence[Rollout[Group]], bound: int) -> Counter[int]:
    """Samples, by how many versions the oldest token is behind ``version``, from what the servers reported of each token.

    Raises :class:`~weightsync.errors.VersionError` for a sample beyond the bound, from the future, or not reported in full.
    """
    found: Counter[int] = Counter()
    for rollout in rollouts:
        for sample, _ in rollout.value:
            behind = -1 if sample.oldest is None else version - sample.oldest
            if (
                not 0 <= behind <= bound
                or max(sample.versions) > version
                or len(sample.tokens) != len(sample.versions)
                or len(sample.tokens) != len(sample.logprobs)
            ):
                raise VersionError(f"the trainer at version {version} got a sample beyond its staleness bound of {bound}: {sample}")
            found[behind] += 1
    return found


class Loop:
    """The training loop of one rank; ``rollouts`` is the first rank's."""

    def __init__(
        self, wish: Settings, learner: Learner, trainer: Trainer, rollouts: Rollouts[Group] | None, parent: Parent
    ) -> None:
        self._wish, self._learner, self._trainer, self._rollouts, self._parent = wish, learner, trainer, rollouts, parent
        self._publication: Future[RoundResult] | None = None

    def run(self) -> None:
        """Version 0 is the policy after its supervised beginning; each step consumes one batch and makes the next version."""
        self._trainer.publish(0, timeout=_TIMEOUT)
        if self._rollouts is not None:
            self._rollouts.feed(group_task(prompt, self._wish.group_size) for prompt in problems(self._wish.seed))
        for version in range(self._wish.steps):
            self._step(version)
        if self._publication is not None:
            self._publication.result(_TIMEOUT)

    def _step(self, version: int) -> None:
        began = time.perf_counter()
        groups = [] if self._rollouts is None else self._rollouts.batch(_TIMEOUT, version)
        got = time.perf_counter()
        behind = staleness(version, groups, self._wish.bound)
        loss, clipped = self._learner.learn([group.value for group in groups])
        learned = time.perf_counter()
        self._publish(version + 1)
        ended = time.perf_counter()
        if self._rollouts is not None:
            self._tell(version + 1, groups, behind, loss, clipped, got - began + ended - learned, ended - began)

    def _publish(self, version: int) -> None:
        if self._wish.mode == "one-step-off":
            self._trainer.publish(version, timeout=_TIMEOUT)  # returns when the replicas serve it
            return
        if self._publication is not None:
            self._publication.result(_TIMEOUT)  # the one before; its failure is ours
        self._publication = self._trainer.publish_async(version, timeout=_TIMEOUT)  # returns when it is copied

    def _tell(
        self,
        step: int,
        groups: Sequence[Rollout[Group]],
        behind: Counter[int],
        loss: float,
        clipped: float,
        waited: float,
        took: float,
    ) -> None:
        if self._rollouts is None:
            return
        pairs = [pair for group in groups for pair in group.value]
        samples, counts = [sample for sample, _ in pairs], self._rollouts.counts()
        self._parent.tell(
            Progress(
                step=step,
                reward=sum(got for _, got in pairs) / len(pairs),
                loss=loss,
                clipped=clipped,
                version=step,
                staleness=dict(behind),
                mixed=sum(len(set(sample.versions)) > 1 for sample in samples),
                interruptions=counts.interruptions,
                dropped=counts.too_old,
                tokens=sum(len(sample.tokens) for sample in samples),
                waited=waited,
                seconds=took,
                example=text([*samples[0].prompt, *samples[0].tokens]),
            )
        )


def main(argument: str) -> int:
    """Train. ``argument`` is :class:`~examples.grpo.settings.TrainerSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=TrainerSettings)
    die_with_parent(mine.parent)
    parent, wish = Parent(), mine.settings

    # Imported here so that the process is tied to its parent before the seconds that these take.
    import torch
    import torch.distributed as dist

    from examples.grpo.learner import Learner
    from examples.grpo.policy import build_policy, warm_up
    from weightsync.trainer.trainer import Trainer

    torch.set_num_threads(1)
    model = build_policy(wish.seed)
    began = time.perf_counter()
    loss = warm_up(model, wish.seed, wish.warm_up)  # the same on every rank
    if mine.rank == 0:
        parent.tell(WarmedUp(loss, time.perf_counter() - began))
    with ExitStack() as owned:
        if wish.trainer_ranks > 1:
            join(mine.rank, wish.trainer_ranks, mine.port, mine.listen_fd, _TIMEOUT)
            owned.callback(dist.destroy_process_group)
        learner = Learner(model, wish)
        trainer = owned.enter_context(Trainer(model, mine.coordinator))
        rollouts = owned.enter_context(Rollouts(lambda: controller(mine))) if mine.rank == 0 else None
        parent.tell(Ready(f"trainer-{mine.rank}"))
        if mine.rank == 0:
            parent.wait_for_word(Deadline(_TIMEOUT))  # the replicas are there
        Loop(wish, learner, trainer, rollouts, parent).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
