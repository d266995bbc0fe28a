"""One of two tensor-parallel ranks of SGLang's scheduler. Rank 0 publishes, and prints the tokens that SGLang generates.

Each rank prints, at last, how many rows of its vocabulary are padding, and how many elements of them are not zero.

Run as ``python -m tests.integration.sglang_rank RANK DIRECTORY SOCKETS OVERLAPS``, ``SOCKETS`` being SGLang's ``PortArgs`` as JSON,
and ``OVERLAPS`` ``yes`` or ``no``, for SGLang's overlapped event loop.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.integration.sglang_scheduler import RunningScheduler, install_stubs, random_weights, use_environment

UPDATES = 2


def main(rank: int, directory: str, sockets: str, overlaps: str) -> None:
    """Serve until rank 0 has finished."""
    install_stubs()
    use_environment()
    settings: dict[str, Any] = {"tp_size": 2, "disable_overlap_schedule": overlaps == "no"}
    running = RunningScheduler(directory, rank=rank, sockets=json.loads(sockets), **settings)
    with running:
        if rank == 0:
            print(json.dumps(scenario(running, directory)), flush=True)
        else:
            while not running.scheduler.gracefully_exit:
                time.sleep(0.05)
        print(json.dumps(running.padding()), flush=True)


@contextmanager
def another_client(running: RunningScheduler) -> Iterator[None]:
    """Ask SGLang to continue, again and again, on a thread."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.002):
            running.go_on()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def scenario(running: RunningScheduler, directory: str) -> list[object]:
    """Return for each update: delivery, verification, tokens after it, and a kept request's tokens and versions.

    Another client asks SGLang to continue during the updates. The last one is of released ranks.
    """
    from transformers import LlamaForCausalLM

    from weightsync.trainer.agent import Trainer

    state = {name: tensor.clone() for name, tensor in LlamaForCausalLM.from_pretrained(directory).state_dict().items()}
    results: list[object] = []
    coordinator, token = os.environ["WEIGHTSYNC_COORDINATOR"], os.environ["WEIGHTSYNC_TOKEN"]
    with Trainer(state, coordinator, token=token, rank=0, world_size=1) as trainer:  # SGLang's process group is not the trainer's
        for seed in range(1, UPDATES + 1):
            kept = running.ask(200)
            running.wait_until_running()
            random_weights(state, seed)
            with another_client(running):
                replica = trainer.publish(timeout=60.0).replicas[0]
            tokens, _ = running.output(running.ask(8))
            of_kept, spans = running.output(kept)
            results.append([replica.delivery, replica.verified, tokens, len(of_kept), [span.version for span in spans]])
        running.release_memory("weights", "kv_cache")  # both ranks meet at a barrier when it returns
        random_weights(state, UPDATES + 1)
        replica = trainer.publish(timeout=60.0).replicas[0]
        results.append([replica.delivery, replica.verified, running.output(running.ask(8))[0], 0, []])
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), *sys.argv[2:])
