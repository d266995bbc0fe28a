"""The demo's text and tokenizer: the same everywhere for the same seed, nothing lost in tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import islice

import pytest
from examples.demo.tasks import documents, probes, prompts
from examples.demo.tokenizer import END, VOCABULARY, build_tokenizer, encode, token_stream

_IN_ANOTHER_PROCESS = """
from examples.demo.tokenizer import build_tokenizer, token_stream
tokenizer = build_tokenizer(3)
print(token_stream(tokenizer, 5, 200))
print(sorted(tokenizer.get_vocab().items()))
"""


def test_a_seed_means_the_same_text() -> None:
    assert list(islice(documents(1), 50)) == list(islice(documents(1), 50))
    assert list(islice(documents(1), 50)) != list(islice(documents(2), 50))
    assert prompts(1, 9) == prompts(1, 9) != prompts(2, 9)


def test_tasks_are_solved_right() -> None:
    solve: dict[str, Callable[[str], str]] = {
        "copy": str,
        "reverse": lambda word: word[::-1],
        "upper": str.upper,
        "sort": lambda word: "".join(sorted(word)),
    }
    seen = set()
    for line in "".join(islice(documents(0), 200)).splitlines():
        question, _, answer = line.partition(" = ")
        verb, _, word = question.partition(" ")
        seen.add(verb if word else "+" if "+" in question else "-")
        if word:
            assert answer == solve[verb](word)
        elif "+" in question:
            assert int(answer) == sum(map(int, question.split("+")))
        else:
            a, b = map(int, question.split("-"))
            assert int(answer) == a - b >= 0
    assert seen == {*solve, "+", "-"}


def test_prompts_differ_from_each_other_and_from_probes() -> None:
    asked = prompts(0, 30)
    assert len(set(asked)) == 30
    assert all(prompt.endswith(" =") for prompt in asked)
    assert probes(0)
    assert not set(asked) & set(probes(0))


def test_tokens_are_the_same_in_another_process() -> None:
    command = [sys.executable, "-c", _IN_ANOTHER_PROCESS]
    there = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    tokenizer = build_tokenizer(3)
    assert there.splitlines() == [str(token_stream(tokenizer, 5, 200)), str(sorted(tokenizer.get_vocab().items()))]


@pytest.mark.parametrize("text", ["copy abc = abc\n", "7+8 =", "", "ünïcode £ 漢字 \x00"])
def test_text_survives_tokens(text: str) -> None:
    tokenizer = build_tokenizer(0)
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_the_stream_ends_documents_with_the_end_token() -> None:
    tokenizer = build_tokenizer(0)
    tokens = token_stream(tokenizer, 0, 300)
    assert len(tokens) == 300
    assert len(tokenizer) == VOCABULARY
    assert max(tokens) < VOCABULARY
    assert tokenizer.convert_tokens_to_ids(END) == 0
    assert str(tokenizer.decode(tokens)).startswith(next(documents(0)) + END)
