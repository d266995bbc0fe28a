"""Test processes that start without delay: forked from a process that has already imported their modules, which takes seconds.

``python -m weightsync_testing.fork_server FD MODULE...`` imports the modules. A request over ``FD`` holds descriptors and, as
JSON, a function and its argument. For each request it forks a process that calls the function, and answers with the process id.
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

from weightsync.config import worker_environment

_SECONDS = 60.0


def named(where: str) -> Any:  # noqa: ANN401 - any object
    """Import and return the object ``"module:name"``."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


class ForkServer:
    """Fork server of this test process. Starts on first use, and ends with this process. Not thread-safe."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start the fork server unless it runs, and return the socket to it."""
        if self._socket is None:
            self._socket, its = socket.socketpair()
            self._socket.settimeout(_SECONDS)
            # Its processes end without a shutdown, so coverage would slow them down and save nothing.
            environment = {name: value for name, value in worker_environment().items() if not name.startswith("COVERAGE_")}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            command = [sys.executable, "-m", "weightsync_testing.fork_server", str(its.fileno()), *self._modules]
            with its:
                self._process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
            atexit.register(self.end)
        return self._socket

    def fork(self, function: str, descriptors: Sequence[int], argument: object = None) -> int:
        """Call ``function`` (``"module:name"``) in a new process with copies of ``descriptors``. Returns the process id."""
        connection = self.start()
        socket.send_fds(connection, [msgspec.json.encode((function, argument))], descriptors)
        return int(connection.recv(32))

    def end(self) -> None:
        """End the fork server. Forked processes continue. Idempotent."""
        connection, self._socket = self._socket, None
        if connection is not None and self._process is not None:
            connection.close()
            self._process.wait(_SECONDS)


def _fork_requests(connection: socket.socket) -> tuple[list[int], str, Any] | None:
    """Fork a process for each request. Returns the request in the child, and ``None`` in the server when its parent is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the children
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 8)
        if not data:
            return None
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            return descriptors, *msgspec.json.decode(data)
        connection.sendall(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        import_module(module)
    request = _fork_requests(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        inherited, function, argument = request
        named(function)(inherited, argument)
