"""A replica's process with vLLM: the noise that it starts from, then vLLM's own server in this process's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from examples.demo.reports import die_with_parent
from examples.grpo.settings import ReplicaSettings

__all__ = ["main"]

_SEQUENCES = 64
_SOCKET_NAME = 37  # characters of vLLM's sockets, after their folder
_SOCKET_PATH = 107  # characters that a socket's path may have


def main(argument: str) -> int:
    """Become vLLM's server. ``argument`` is :class:`~examples.grpo.settings.ReplicaSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=ReplicaSettings)
    die_with_parent(mine.parent)

    import socket

    import torch

    from examples.grpo.policy import CONTEXT, build_policy

    torch.set_num_threads(1)
    folder = Path(mine.directory) / mine.name
    build_policy(mine.settings.seed + 1 + mine.index).save_pretrained(folder)
    host, port = socket.socket(fileno=mine.listen_fd).getsockname()[:2]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    # With the coordinator in its environment, vLLM joins by itself: this is all that weightsync needs (docs/guides/vllm.md).
    os.environ.update(WEIGHTSYNC_COORDINATOR=mine.coordinator, WEIGHTSYNC_REPLICA=mine.name, VLLM_PLUGINS="weightsync")
    if len(mine.directory) + _SOCKET_NAME <= _SOCKET_PATH:
        os.environ["TMPDIR"] = mine.directory  # what vLLM leaves behind when a signal ends it goes with this folder
    # The rest is for a small CPU.
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=str(cores[mine.index % len(cores)]), VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "policy",
        "--weight-transfer-config", '{"backend": "weightsync"}', "--skip-tokenizer-init", "--tokens-only",
        "--host", host, "--port", str(port), "--seed", str(mine.settings.seed + mine.index),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT), "--block-size", "32",
        "--max-num-seqs", str(_SEQUENCES), "--disable-log-stats", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    os.dup2(2, 1)  # its words go to the log: standard output is for reports
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
