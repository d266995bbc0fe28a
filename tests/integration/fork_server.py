"""Programs for tests in processes of their own that start at once, because a fork server has imported what they need."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from importlib import import_module

from weightsync_testing.fork_server import ForkServer

FORK_SERVER = ForkServer("tests.integration.external.disaggregated_server", "tests.contract.external.conformance_server")


class Child:
    """A process in which ``module.main`` runs; ``argument`` is its only one. It ends when its input does."""

    def __init__(self, module: str, argument: str) -> None:
        (its_input, self._input), (output, its_output) = os.pipe(), os.pipe()
        self.output = os.fdopen(output)
        try:
            self.pid = FORK_SERVER.fork(f"{__name__}:run", [its_input, its_output], [module, argument])
        except BaseException:
            os.close(self._input)
            self.output.close()
            raise
        finally:
            os.close(its_input)
            os.close(its_output)

    def type(self, text: str) -> None:
        """Write to its standard input."""
        os.write(self._input, text.encode())

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


def run(descriptors: list[int], arguments: list[str]) -> None:
    """Run a module's ``main`` with these as standard input and output."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = list(arguments)
    import_module(arguments[0]).main()
