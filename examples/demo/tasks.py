"""The text that the demo's model learns: small arithmetic and string tasks, generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

__all__ = ["documents", "probes", "prompts"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 5)))


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 49), rng.randint(0, 49)
    return f"{a}+{b}", str(a + b)


def _subtract(rng: random.Random) -> tuple[str, str]:
    a, b = sorted((rng.randint(0, 49), rng.randint(0, 49)), reverse=True)
    return f"{a}-{b}", str(a - b)


def _copy(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"copy {word}", word


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"reverse {word}", word[::-1]


def _upper(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"upper {word}", word.upper()


def _sort(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"sort {word}", "".join(sorted(word))


_TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_add, _subtract, _copy, _reverse, _upper, _sort)


def documents(seed: int) -> Iterator[str]:
    """Documents of three to six solved tasks, a line each, without end; the same for the same seed on every machine."""
    rng = random.Random(f"documents {seed}")
    while True:
        lines = (rng.choice(_TASKS)(rng) for _ in range(rng.randint(3, 6)))
        yield "".join(f"{question} = {answer}\n" for question, answer in lines)


def prompts(seed: int, count: int) -> list[str]:
    """``count`` different unsolved tasks, which the traffic repeats."""
    rng = random.Random(f"prompts {seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        question, _ = _TASKS[len(found) % len(_TASKS)](rng)
        found[f"{question} ="] = None
    return list(found)


def probes(seed: int) -> list[str]:
    """The tasks that every replica is asked after every version."""
    return prompts(seed + 1_000_003, 3)
