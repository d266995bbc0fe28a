"""A replica's process with vLLM as its engine: noise for weights, a completion server, one weightsync rank in each worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from examples.demo.leftovers import free, mapped_by
from examples.demo.reports import Parent, Ready, die_with_parent
from examples.demo.settings import ReplicaSettings

__all__ = ["main"]

_LEAVE_SECONDS = 5.0
_BLOCK = 32  # tokens of a cached block; the CPU's attention takes multiples of this


def _environment(mine: ReplicaSettings) -> None:
    """What vLLM's CPU build reads, before it is imported: a small cache, and one core for each rank."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    os.environ.pop("WEIGHTSYNC_COORDINATOR", None)  # it would join by itself, and this process wants to hear of labels
    ranks, (_, _, index) = mine.settings.engine_tp, mine.name.rpartition("-")
    first = int(index) * ranks if index.isdigit() else 0
    bound = "|".join(str(cores[(first + rank) % len(cores)]) for rank in range(ranks))
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=bound, VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="weightsync",
        VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip


async def _serve(mine: ReplicaSettings, folder: Path, listener: socket.socket, parent: Parent) -> None:
    import uvicorn
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from examples.demo.completions import completions_app
    from examples.demo.models import CONTEXT
    from examples.demo.tokenizer import END, build_tokenizer, encode
    from examples.demo.vllm_generation import VllmGenerator
    from weightsync.engines.vllm import attach_async

    wish = mine.settings
    tokenizer = build_tokenizer(wish.seed)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, tensor_parallel_size=wish.engine_tp,
            max_model_len=CONTEXT, block_size=_BLOCK, max_num_seqs=8, enable_prefix_caching=True, disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        )
    )  # fmt: skip
    left: set[str] = set()
    try:
        generator = VllmGenerator(engine, asyncio.get_running_loop(), encode(tokenizer, END)[0])
        app = completions_app(mine.name, generator, tokenizer)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
        leave = await attach_async(engine, mine.name, mine.coordinator, transports=wish.transports, on_label=generator.labelled)
        left = mapped_by(os.getpgid(0))
        try:
            # Uvicorn raises the signal that ended it once more, for whoever had it before: else nothing below would be done.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            parent.tell(Ready(mine.name))
            await server.serve(sockets=[listener])
        finally:
            try:
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await leave()
            except Exception as error:  # noqa: BLE001 - the signal that ended this process has ended vLLM's other ones too
                print(f"leaving the coordinator: {error!r}", file=sys.stderr)
    finally:
        engine.shutdown()
        free(left)


def main(argument: str) -> int:
    """Serve until a signal ends the process. ``argument`` is :class:`~examples.demo.settings.ReplicaSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=ReplicaSettings)
    die_with_parent(mine.parent)
    parent = Parent()
    listener = socket.socket(fileno=mine.listen_fd)
    _environment(mine)

    import torch

    from examples.demo.models import build_model, scramble

    torch.set_num_threads(1)
    wish = mine.settings
    folder = Path(mine.directory) / mine.name
    model = build_model(wish.model, tied=wish.tied, seed=wish.seed)
    scramble(model, seed=sum(mine.name.encode()))
    model.save_pretrained(folder)
    del model
    asyncio.run(_serve(mine, folder, listener, parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
