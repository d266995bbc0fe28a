"""The task: put letters in order. One right answer each, so the reward can be computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["ANSWER_TOKENS", "END", "LETTERS", "VOCABULARY", "problems", "reward", "sloppy_examples", "text"]

LETTERS = 4
"""In a problem."""
ANSWER_TOKENS = LETTERS + 1
END, _ASK, _FIRST = 0, 1, 2
_ALPHABET = "abcdefghijklmnop"
VOCABULARY = 32
"""Token numbers: the end, the question's mark, 16 letters, and some that mean nothing."""


def text(tokens: Sequence[int]) -> str:
    """For people: ``dbca=abcd.``."""
    names = {END: ".", _ASK: "=", **{_FIRST + index: letter for index, letter in enumerate(_ALPHABET)}}
    return "".join(names.get(token, "?") for token in tokens)


def problems(seed: int) -> Iterator[list[int]]:
    """Prompts without end, the same for the same seed."""
    rng = random.Random(f"problems {seed}")
    while True:
        yield [*(_FIRST + rng.randrange(len(_ALPHABET)) for _ in range(LETTERS)), _ASK]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """1 for the letters in order and then the end, else 0."""
    return float(list(answer) == [*sorted(prompt[:-1]), END])


def sloppy_examples(seed: int, wrong: float) -> Iterator[list[int]]:
    """Prompts with answers, of which a share of ``wrong`` is shuffled: a teacher that the policy can learn to surpass by reward."""
    rng = random.Random(f"examples {seed}")
    for prompt in problems(seed + 1_000_003):
        answer = sorted(prompt[:-1])
        if rng.random() < wrong:
            rng.shuffle(answer)
        yield [*prompt, *answer, END]
