"""Holds that rounding excuses what another order of summing does, and nothing that other weights do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples.demo.checking import Checker, Verdict
from examples.demo.generation import greedy
from examples.demo.oracle import Oracle
from examples.demo.records import Response
from examples.demo.rounding import shortfall_of
from tests.unit.examples.demo.models import VOCABULARY, save_version, tiny_model
from transformers import PreTrainedModel

PROMPT = (5, 17, 3)
COUNT = 16


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    for number in (1, 2):
        save_version(tmp_path, number, _indifferent(number))
    return Checker(Oracle(tmp_path, tiny_model(0)), rounding=True)


def _indifferent(seed: int) -> PreTrainedModel:
    """A model for which each even token is exactly as likely as the odd one after it."""
    model = tiny_model(seed)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[0::2]
    return model


def _response(tokens: list[int], label: int = 1) -> Response:
    return Response("replica-0", PROMPT, tuple(tokens), (label,) * len(tokens), (0,))


def test_a_tie_may_be_broken_either_way(checker: Checker) -> None:
    model = _indifferent(1)
    tokens = greedy(model, PROMPT, 4)
    tokens[-1] ^= 1  # just as likely
    tokens += greedy(model, [*PROMPT, *tokens], COUNT - 4)
    findings = checker.check([_response(tokens)])
    assert (findings.torn, findings.mislabelled, len(findings.ties), findings.shortfalls) == (0, 0, 1, [])


def test_the_same_is_torn_where_sums_are_the_same(tmp_path: Path) -> None:
    save_version(tmp_path, 1, _indifferent(1))
    tokens = greedy(_indifferent(1), PROMPT, 4)
    tokens[-1] ^= 1
    assert Checker(Oracle(tmp_path, tiny_model(0))).verdict(_response(tokens)) is Verdict.TORN


@pytest.mark.parametrize("position", [0, COUNT // 2, COUNT - 1])
def test_any_other_token_is_torn_and_the_distance_is_told(checker: Checker, position: int) -> None:
    tokens = greedy(_indifferent(1), PROMPT, COUNT)
    tokens[position] = (tokens[position] + 2) % VOCABULARY
    findings = checker.check([_response(tokens)])
    assert findings.torn == 1
    (found,) = findings.shortfalls
    assert found.gap > 100 * found.rounding
    assert "below the likeliest" in str(found)


@pytest.mark.parametrize("share", [1.0, 0.1, 0.01])
def test_weights_a_little_off_are_torn(checker: Checker, share: float) -> None:
    """Half of the layers a hundredth of the way to the next version: still no rounding."""
    torn, other = _indifferent(1), _indifferent(2).state_dict()
    with torch.no_grad():
        for name, parameter in torn.named_parameters():
            if "mlp" in name or "lm_head" in name:
                parameter.lerp_(other[name], share)
    prompts = [(seed % VOCABULARY, (seed * 7 + 1) % VOCABULARY) for seed in range(5)]
    answers = [replace(_response(greedy(torn, prompt, 48)), prompt=prompt) for prompt in prompts]
    assert checker.check(answers).torn >= 1


def test_a_run_of_the_right_weights_has_no_shortfall_and_is_left_in_float32() -> None:
    model = tiny_model(3)
    found = shortfall_of(model, PROMPT, greedy(model, PROMPT, COUNT))
    assert found.within_rounding
    assert 0 < found.rounding < 1e-4
    assert model.dtype == torch.float32
