"""What each pause mode does to answers that are being generated, with a real (tiny) model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from examples.demo.completions_adapter import CompletionsAdapter
from examples.demo.generation import Completion, Generator, greedy
from tests.unit.examples.demo.models import tiny_model, version

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, LoadError, ProtocolError

PROMPT = [5, 17, 3]
LONG = 300


class Watched:
    """A generator, the forward passes that run in it, and one answer in the making in another thread."""

    def __init__(self) -> None:
        self.model = tiny_model(1)
        self.generator = Generator(self.model)
        self.adapter = CompletionsAdapter(self.generator)
        self.forwards = 0
        self.started = threading.Event()
        self.model.register_forward_pre_hook(self._count)
        self._answers: list[Completion] = []
        self._thread: threading.Thread | None = None
        self.update(1, 1)

    def _count(self, *_: object) -> None:
        self.forwards += 1
        if self.forwards >= 5:  # some tokens are made
            self.started.set()

    def write(self, seed: int) -> None:
        with torch.no_grad():
            for own, new in zip(self.model.parameters(), tiny_model(seed).parameters(), strict=True):
                own.copy_(new)

    def update(self, seed: int, number: int) -> None:
        self.adapter.pause("abort", 10)
        self.write(seed)
        self.adapter.finish(version(number))
        assert self.adapter.flush()
        self.adapter.resume()

    def ask(self, budget: int = LONG, hold: float = 30.0) -> None:
        self.forwards = 0
        self.started.clear()

        def run() -> None:
            self._answers.append(self.generator.complete(PROMPT, budget, Deadline(hold)))

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self.started.wait(20)

    def answer(self) -> Completion:
        assert self._thread is not None
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._answers.pop()

    def close(self) -> None:
        self.generator.gate.end()
        if self._thread is not None:
            self._thread.join(30)


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    found.close()


def test_two_versions_generate_differently() -> None:
    assert greedy(tiny_model(1), PROMPT, 20) != greedy(tiny_model(2), PROMPT, 20)


def test_undisturbed_it_is_transformers_greedy(watched: Watched) -> None:
    answer = watched.generator.complete(PROMPT, 20, Deadline(20))
    assert answer.tokens == greedy(tiny_model(1), PROMPT, 20)
    assert (answer.token_versions, answer.prefills, answer.finish_reason) == ([1] * 20, [0], "length")
    assert answer.token_epochs == [1] * 20


def test_abort_ends_at_the_next_token_with_what_there_is(watched: Watched) -> None:
    watched.ask()
    watched.adapter.pause("abort", 20)
    answer = watched.answer()  # without any resume
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.tokens) < LONG
    assert answer.tokens == greedy(tiny_model(1), PROMPT, len(answer.tokens))
    assert answer.token_versions == [1] * len(answer.tokens)


def test_wait_lets_it_finish_and_holds_new_ones(watched: Watched) -> None:
    watched.ask(60)
    watched.adapter.pause("wait", 30)
    answer = watched.answer()
    assert (len(answer.tokens), answer.finish_reason) == (60, "length")
    with pytest.raises(DeadlineExceeded, match="waiting for new weights"):
        watched.generator.complete(PROMPT, 3, Deadline(0.05))


def test_keep_goes_on_under_the_new_weights_with_the_tokens_kept(watched: Watched) -> None:
    watched.ask()
    watched.adapter.pause("keep", 20)
    watched.write(2)
    watched.adapter.finish(version(2))
    watched.adapter.resume()
    answer = watched.answer()
    assert (len(answer.tokens), answer.finish_reason) == (LONG, "length")
    cut = answer.prefills[1]
    assert answer.prefills == [0, cut]
    assert answer.token_versions == [1] * cut + [2] * (LONG - cut)
    assert answer.tokens[:cut] == greedy(tiny_model(1), PROMPT, cut)
    # Read anew: a key-value cache of the old weights would give other tokens.
    assert answer.tokens[cut:] == greedy(tiny_model(2), PROMPT + answer.tokens[:cut], LONG - cut)


def test_no_forward_runs_while_paused(watched: Watched) -> None:
    watched.ask()
    watched.adapter.pause("keep", 20)
    before = watched.forwards
    with pytest.raises(DeadlineExceeded):
        watched.generator.complete(PROMPT, 3, Deadline(0.3))
    assert watched.forwards == before
    watched.adapter.finish(version(2))
    watched.adapter.resume()
    watched.answer()
    assert watched.forwards > before


def test_a_kept_answer_is_not_kept_for_ever(watched: Watched) -> None:
    watched.ask(hold=2.0)
    watched.adapter.pause("keep", 20)
    answer = watched.answer()
    assert answer.finish_reason == "abort"
    assert answer.tokens == greedy(tiny_model(1), PROMPT, len(answer.tokens))


def test_the_adapter_reports_nothing_that_was_not_committed(watched: Watched) -> None:
    with pytest.raises(ProtocolError):
        watched.adapter.finish(version(2))  # still serving
    watched.adapter.pause("abort", 10)
    with pytest.raises(ProtocolError):
        watched.adapter.resume()


def test_the_adapter_loads_by_name_and_refuses_what_does_not_fit(watched: Watched) -> None:
    adapter, new = watched.adapter, tiny_model(2).state_dict()
    assert {spec.name for spec in adapter.manifest()} == set(new)
    assert {shard.name for shard in adapter.shards()} == set(new)
    watched.adapter.pause("abort", 10)
    adapter.load(new.items())
    adapter.finish(version(2))
    adapter.resume()
    assert watched.generator.complete(PROMPT, 20, Deadline(20)).tokens == greedy(tiny_model(2), PROMPT, 20)
    name, tensor = next(iter(new.items()))
    with pytest.raises(LoadError, match="no parameter named"):
        adapter.load([("surprise", tensor)])
    with pytest.raises(LoadError, match=name):
        adapter.load([(name, tensor[:1])])
    with pytest.raises(LoadError, match="float64"):
        adapter.load([(name, tensor.double())])
