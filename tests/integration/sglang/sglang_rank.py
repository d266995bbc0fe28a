"""One of two tensor-parallel ranks of SGLang's scheduler. Rank 0 publishes, and prints the tokens that SGLang generates.

Each rank prints, at last, how many rows of its vocabulary are padding, and how many elements of them are not zero.

Run as ``python -m tests.integration.sglang.sglang_rank RANK DIRECTORY SOCKETS SETTINGS``, as JSON: SGLang's ``PortArgs``, and those
of its ``ServerArgs`` that differ from one test to another.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors.torch import load_file
from tests.integration.sglang.sglang_scheduler import (
    RunningScheduler,
    add_what_sglang_lacks_on_a_cpu,
    install_stubs,
    random_weights,
    use_environment,
)

UPDATES = 2


def main(rank: int, directory: str, sockets: str, settings: str) -> None:
    """Serve until rank 0 has finished."""
    install_stubs()
    use_environment()
    add_what_sglang_lacks_on_a_cpu()
    own = json.loads(sockets)
    if rank:  # with data-parallel attention it would take requests of its own
        own["scheduler_input_ipc_name"] += f".{rank}"
    running = RunningScheduler(directory, rank=rank, sockets=own, tp_size=2, **json.loads(settings))
    with running:
        if rank == 0:
            print(json.dumps(scenario(running, directory)), flush=True)
        else:
            if running.scheduler.server_args.enable_dp_attention:
                wait_for_a_grammar(running)
            running.wait_until_ended()
        print(json.dumps(running.padding()), flush=True)


def wait_for_a_grammar(running: RunningScheduler) -> None:
    """Let a request of this rank's group wait for a grammar whose compilation does not end: SGLang's flush refuses meanwhile."""
    grammars = running.scheduler.grammar_manager
    grammars.has_waiting_grammars = lambda: False  # SGLang does not look whether it has ended
    grammars.grammar_queue.append("a request")


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
    from weightsync.trainer.trainer import Trainer

    state = load_file(f"{directory}/model.safetensors")
    results: list[object] = []
    coordinator, token = os.environ["WEIGHTSYNC_COORDINATOR"], os.environ["WEIGHTSYNC_TOKEN"]
    with Trainer(state, coordinator, token=token, rank=0, world_size=1) as trainer:  # SGLang's process group is not the trainer's
        for seed in range(1, UPDATES + 1):
            kept = running.ask(600)
            running.wait_until_running()
            random_weights(state, seed)
            with another_client(running):
                replica = trainer.publish(timeout=60.0).replicas[0]
            tokens, _ = running.output(running.ask(8))
            of_kept, spans = running.output(kept)
            results.append([replica.delivery, replica.verified, tokens, len(of_kept), [span.version for span in spans]])
        if running.scheduler.server_args.enable_dp_attention:  # SGLang releases nothing while a grammar is compiled
            return results
        running.release_memory("weights", "kv_cache")  # both ranks meet at a barrier when it returns
        random_weights(state, UPDATES + 1)
        replica = trainer.publish(timeout=60.0).replicas[0]
        results.append([replica.delivery, replica.verified, running.output(running.ask(8))[0], 0, []])
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), *sys.argv[2:])
