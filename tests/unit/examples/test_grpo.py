"""Holds the GRPO example's arithmetic: reward, advantages, the clipped loss, and that a sample beyond the bound fails the run."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from examples.grpo.learning import Batch, advantages, policy_loss
from examples.grpo.outcome import Record
from examples.grpo.policy import build_policy, log_probabilities
from examples.grpo.reports import Progress
from examples.grpo.settings import Settings
from examples.grpo.task import END, LETTERS, problems, reward, sloppy_examples
from examples.grpo.trainer import Group, staleness

from weightsync.errors import ConfigurationError, VersionError
from weightsync_rollouts import Rollout, Sample


def sample(*versions: int, prompt: tuple[int, ...] = (5, 6, 1)) -> Sample:
    tokens = [7] * len(versions)
    return Sample(prompt, tokens, [-1.0] * len(tokens), list(versions), ["a"] * len(tokens), "stop")


def rollout(*samples: Sample) -> Rollout[Group]:
    return Rollout(1, [(one, 1.0) for one in samples], samples, 0.1)


def test_reward_is_for_the_letters_in_order_and_the_end() -> None:
    assert reward([4, 3, 9, 3, 1], [3, 3, 4, 9, END]) == 1
    for wrong in ([3, 3, 4, 9], [3, 4, 3, 9, END], [3, 3, 4, 9, END, END], []):
        assert reward([4, 3, 9, 3, 1], wrong) == 0
    asked = list(islice(problems(3), 50))
    assert asked == list(islice(problems(3), 50)) != list(islice(problems(4), 50))
    taught = [reward(one[: LETTERS + 1], one[LETTERS + 1 :]) for one in islice(sloppy_examples(3, 0.7), 400)]
    assert 0.2 < sum(taught) / len(taught) < 0.5


def test_advantages_are_relative_to_the_group() -> None:
    assert advantages([1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1])
    assert advantages([1, 1, 1]) == [0, 0, 0]
    assert sum(advantages([1, 0, 0, 0])) == pytest.approx(0)


def test_a_batch_has_each_token_of_an_answer_where_its_probability_is() -> None:
    samples = [sample(0, 0), sample(0, prompt=(2, 1))]
    samples[0].logprobs[:] = [-2.0, -3.0]
    batch = Batch.of(samples, [0.5, -1.0])
    assert batch.tokens.tolist() == [[5, 6, 1, 7, 7], [2, 1, 7, 0, 0]]
    assert batch.sampled.tolist() == [[0, 0, -2, -3], [0, -1, 0, 0]]
    assert batch.weight.tolist() == [[0, 0, 0.5, 0.5], [0, -1, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    model = build_policy(0)
    with torch.no_grad():
        now = log_probabilities(model, batch.tokens)
        expected = torch.log_softmax(model(input_ids=batch.tokens[:1, :4]).logits[0, -1], -1)[7]
    torch.testing.assert_close(now[0, 3], expected)


def test_the_ratio_is_cut_off_where_it_would_gain_more() -> None:
    batch = Batch(
        torch.zeros(1, 5, dtype=torch.long),
        torch.zeros(1, 4),
        torch.tensor([[1.0, -1.0, 1.0, 9.0]]),
        torch.tensor([[1.0, 1, 1, 0]]),
    )
    ratio = torch.tensor([[2.0, 2.0, 0.5, 2.0]]).requires_grad_()
    loss = policy_loss(ratio.log(), batch)
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert loss.total.item() == pytest.approx(-(1.28 - 2.0 + 0.5))
    assert (loss.tokens, loss.clipped) == (3, 1)
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [[0, pytest.approx(1), pytest.approx(-1), 0]]


def test_staleness_is_counted_from_what_was_reported() -> None:
    found = staleness(7, [rollout(sample(7, 7), sample(6, 7)), rollout(sample(5, 6))], 2)
    assert found == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("bad", [sample(4, 7), sample(7, 8), sample(8), Sample((5,)), Sample((5,), [7, 7], [-1.0] * 2, [7])])
def test_a_sample_beyond_the_bound_or_not_reported_fails_the_run(bad: Sample) -> None:
    with pytest.raises(VersionError, match="staleness bound of 2"):
        staleness(7, [rollout(sample(7), bad)], 2)


def test_settings() -> None:
    assert (Settings().bound, Settings(mode="one-step-off").bound, Settings(staleness=0).bound) == (3, 1, 0)
    for wrong in ({"mode": "one-step-off", "staleness": 2}, {"staleness": -1}, {"replicas": 0}, {"group_size": 1}, {"rate": 0.0}):
        with pytest.raises(ConfigurationError):
            Settings(**wrong)


def test_a_run_is_ok_only_if_it_made_all_its_steps_within_the_bound() -> None:
    def outcome(steps: int, worst: int) -> bool:
        record = Record(Settings(steps=2))
        for number in range(steps):
            record.add(
                Progress(
                    step=number + 1, reward=0.5, loss=0.0, clipped=0.0, version=number + 1, staleness={worst: 4}, mixed=0,
                    interruptions=0, dropped=0, tokens=20, waited=0.5, seconds=1.0, example="",
                )
            )  # fmt: skip
        found = record.outcome(9.0, None)
        assert (found.samples, found.tokens, found.trainer_idle_fraction) == (4 * steps, 20 * steps, 0.5 if steps else 0.0)
        return found.ok

    assert [outcome(2, 3), outcome(2, 4), outcome(1, 0), outcome(0, 0)] == [True, False, False, False]
