"""Longer prompts, for an engine that caches prefixes in blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from examples.demo.tasks import documents

__all__ = ["with_examples"]

_EXAMPLES = 3  # documents of solved tasks: well over two blocks of 32 tokens


def with_examples(prompts: Sequence[str], seed: int) -> list[str]:
    """Each prompt after the same solved tasks, so that all of them begin with whole cached blocks.

    Such blocks were computed under some version. If one outlives it, the answers that follow are wrong, and the check finds them.
    """
    examples = "".join(islice(documents(seed), _EXAMPLES))
    return [examples + prompt for prompt in prompts]
