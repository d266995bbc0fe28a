"""What a paused SGLang keeps of its old weights, and how it is dropped."""

from __future__ import annotations

from typing import Protocol

from weightsync.engines.sglang.loop import Scheduler


class EmbeddingCache(Protocol):
    """SGLang's cache of what the model's vision or audio part computed, which ``flush_cache`` leaves as it is."""

    def clear(self) -> None:
        """Drop all embeddings."""


def drop_caches(scheduler: Scheduler, embeddings: EmbeddingCache | None) -> bool:
    """Drop all keys, values and embeddings of a paused ``scheduler``, on its thread. Returns whether that succeeded.

    SGLang refuses while grammars are compiled. The requests that wait for them have no keys and values, and a paused scheduler does
    not go on with them, so they are set aside.
    """
    grammars = scheduler.grammar_manager
    waiting, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        dropped = scheduler.flush_cache(empty_cache=False)
    finally:
        grammars.grammar_queue = waiting
    if embeddings is not None:
        embeddings.clear()
    return dropped
