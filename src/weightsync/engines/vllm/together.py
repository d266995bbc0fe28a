"""What the workers of one vLLM have in common: their ranks, and errors of which all workers must know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.errors import ConfigurationError, LoadError
from weightsync.launch import texts_of_ranks

_log = logging.getLogger(__name__)

_MAX_ERROR = 1024  # characters of an error message between workers


def global_rank(parallel: Any) -> int:  # noqa: ANN401 - vLLM's
    """Return the rank of this worker among those of all data-parallel engines."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


def refuse_balancing(parallel: Any) -> None:  # noqa: ANN401 - vLLM's
    """Refuse expert load balancing, for updates that vLLM's loader writes.

    Raises:
        ConfigurationError: It is enabled.
    """
    if parallel.enable_eplb:
        raise ConfigurationError(
            "vLLM's expert load balancing (--enable-eplb) moves experts between workers, but its loader writes updates to "
            "their initial places, so old weights would stay in use. Start vLLM without it for these updates, or as a replica that "
            "a coordinator updates directly"
        )


@contextmanager
def together(parallel: Any, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:  # noqa: ANN401 - vLLM's
    """Exchange errors between all workers at the end of the context. If any worker failed, only the last one raises an error.

    vLLM stops reading its workers' responses at the first error, and takes the unread ones for responses to its next call.
    After the last worker's response none is left. Workers whose callers are different processes raise their errors themselves.

    Args:
        parallel: vLLM's configuration of the workers.
        give_up: Called in every worker if any failed, before the error is raised.
    """
    separate = parallel.distributed_executor_backend == "external_launcher"
    alone = parallel.world_size == 1 or parallel.data_parallel_size > 1
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        if alone:
            give_up()
            raise
        _log.exception("weightsync: worker %d of vLLM failed", parallel.rank)
        own = error
    if alone:
        return
    from vllm.distributed.parallel_state import get_world_group

    mine = "" if own is None else f"{type(own).__name__}: {own}"[:_MAX_ERROR]
    failures = {rank: text for rank, text in enumerate(texts_of_ranks(mine, get_world_group().cpu_group)) if text}
    if failures:
        give_up()
    if failures and (separate or parallel.rank == parallel.world_size - 1):
        raise own or LoadError("; ".join(f"worker {rank}: {text}" for rank, text in failures.items()))
