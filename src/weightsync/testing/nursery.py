"""Processes for tests that start at once: forked from one that has imported what they need, which takes seconds.

``python -m weightsync.testing.nursery FD MODULE...`` imports the modules. For each request over ``FD`` (descriptors, and as JSON a
function and its argument) it forks a process that calls the function, and answers with its id.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

__all__ = ["Nursery", "named"]

_SECONDS = 60.0


def named(where: str) -> Any:  # noqa: ANN401 - whatever has that name
    """Return what is called ``"module:name"``."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


class Nursery:
    """One such process of this test process, started when first asked for and ended with it. Not thread-safe."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._way: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start it unless it runs, and return the way to it."""
        if self._way is None:
            self._way, its = socket.socketpair()
            self._way.settimeout(_SECONDS)
            # Its processes end without a goodbye, so they would keep no coverage, and only be slower for it.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            command = [sys.executable, "-m", "weightsync.testing.nursery", str(its.fileno()), *self._modules]
            with its:
                self._process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
            atexit.register(self.end)
        return self._way

    def fork(self, function: str, descriptors: Sequence[int], argument: object = None) -> int:
        """Call ``function`` (``"module:name"``) in a new process with its copies of ``descriptors``; the process's id."""
        way = self.start()
        socket.send_fds(way, [msgspec.json.encode((function, argument))], descriptors)
        return int(way.recv(32))

    def end(self) -> None:
        """End it; the processes that it forked go on. Safe twice."""
        way, self._way = self._way, None
        if way is not None and self._process is not None:
            way.close()
            self._process.wait(_SECONDS)


def _born(way: socket.socket) -> tuple[list[int], str, Any] | None:
    """Fork for whoever asks. In the child what it is to do; in the nursery nothing, when nobody is left who could ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the children
    while True:
        data, descriptors, _, _ = socket.recv_fds(way, 1 << 16, 8)
        if not data:
            return None
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            way.close()
            return descriptors, *msgspec.json.decode(data)
        way.sendall(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        import_module(module)
    asked = _born(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        inherited, function, argument = asked
        named(function)(inherited, argument)
