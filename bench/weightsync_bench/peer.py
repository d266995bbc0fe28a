"""Child processes that execute commands, sent by the parent as lines of JSON.

:class:`Peer` is the parent's side, :func:`serve` the child's.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.closing import Closeable
from weightsync.config import worker_environment
from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, RoundFailed, WeightSyncError


class Peer(Closeable):
    """Child process that runs ``python -m module CONFIG`` and executes commands with :func:`serve`.

    ``tell`` sends a command, and ``hear`` waits for its result. Between the two, several peers work concurrently. A first
    ``hear`` before any command waits until the process serves. Leaving the context ends the process, by SIGKILL if necessary.
    """

    def __init__(self, module: str, config: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.name = f"{config['role']}-{config['rank']}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**worker_environment(), **(env or {})},
            start_new_session=True,
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Id of the process, which leads its own process group."""
        return self._process.pid

    def tell(self, **command: object) -> None:
        """Send one command: its name as ``do``, and its arguments.

        Raises:
            PeerLost: The process has ended.
        """
        if self._process.stdin is None:
            raise PeerLost(f"{self.name} has no standard input")
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerLost(f"process {self.name} ended: {error}") from None

    def hear(self, timeout: float = 120.0) -> Any:  # noqa: ANN401 - the command's result
        """Wait for the next result and return it.

        Raises:
            RoundFailed: The command raised an error in the process.
            PeerLost: The process ended.
            DeadlineExceeded: No result arrived within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        if self._process.stdout is None:
            raise PeerLost(f"{self.name} has no standard output")
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(deadline.remaining(f"waiting for process {self.name}")):
                    continue
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise PeerLost(f"process {self.name} ended with status {self._process.wait(5)}")
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise RoundFailed(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def ask(self, timeout: float = 120.0, **command: object) -> Any:  # noqa: ANN401
        """Send one command and return its result (:meth:`tell`, then :meth:`hear`)."""
        self.tell(**command)
        return self.hear(timeout)

    def close(self) -> None:
        """End the process: close its input, and after three seconds send SIGKILL to its process group."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)


def together(peers: Sequence[Peer], timeout: float = 120.0, **command: object) -> list[Any]:
    """Send one command to all ``peers`` and return their results."""
    for peer in peers:
        peer.tell(**command)
    return [peer.hear(timeout) for peer in peers]


def serve(command_named: Callable[[str], Callable[..., object]], hello: object = None) -> None:
    """Send ``hello``, then execute the parent's commands until standard input ends. Standard output carries only results."""
    print(json.dumps({"answer": hello}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"answer": command_named(command.pop("do"))(**command)}
        except (WeightSyncError, RuntimeError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), flush=True)


def tensor_shapes(size: int, tensors: int) -> list[tuple[str, tuple[int, int]]]:
    """Return names and shapes of ``tensors`` equal bfloat16 matrices with about ``size`` bytes in total."""
    columns = 1024 if size // tensors >= 1 << 20 else 256
    rows = max(1, size // (tensors * 2 * columns) // 4) * 4  # equal halves on both sides, so that the floors move the same bytes
    return [(f"layers.{index}.weight", (rows, columns)) for index in range(tensors)]
