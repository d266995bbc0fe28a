"""Servers for tests, in processes of their own that start at once: importing what they need takes seconds, and is done only once.

``python -m tests.integration.nursery FD`` gets a program's module and argument over ``FD``, with descriptors that are to be its
standard input and output, forks a process in which the module's ``main`` runs, and answers with the id of that process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ["tests.integration.disaggregated_server", "tests.contract.external.conformance_server"]
_SECONDS = 60.0
_ways: list[socket.socket] = []


def start_nursery() -> socket.socket:
    """The way to this test process's one nursery, started when first asked for."""
    if not _ways:
        mine, its = socket.socketpair()
        mine.settimeout(_SECONDS)
        # its processes end without a goodbye, so they would keep no coverage, and only be slower for it
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        command = [sys.executable, "-m", "tests.integration.nursery", str(its.fileno())]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        its.close()
        _ways.append(mine)
        atexit.register(process.wait, _SECONDS)
        atexit.register(mine.close)  # runs first
    return _ways[0]


class Child:
    """A process in which ``module.main`` runs; ``argument`` is its only one. It ends when its input does."""

    def __init__(self, module: str, argument: str) -> None:
        way = start_nursery()
        (its_input, self._input), (output, its_output) = os.pipe(), os.pipe()
        self.output = os.fdopen(output)
        try:
            socket.send_fds(way, [json.dumps([module, argument]).encode()], [its_input, its_output])
            self.pid = int(way.recv(32))
        except BaseException:
            os.close(self._input)
            self.output.close()
            raise
        finally:
            os.close(its_input)
            os.close(its_output)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and return when it has ended."""
        os.close(self._input)
        if not select.select([self.output], [], [], 10)[0]:
            self.kill()
        self.output.read()
        self.output.close()


def _born(way: socket.socket) -> tuple[str, str] | None:
    """Fork for whoever asks. In the child what it is to run; in the nursery nothing, when nobody is left who could ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the children
    while True:
        data, descriptors, _, _ = socket.recv_fds(way, 1 << 16, 2)
        if not data:
            return None
        pid = os.fork()
        if not pid:
            break
        way.sendall(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    way.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    module, argument = json.loads(data)
    return module, argument


if __name__ == "__main__":
    for server in SERVERS:
        import_module(server)
    asked = _born(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        sys.argv = list(asked)
        import_module(asked[0]).main()
