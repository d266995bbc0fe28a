"""Processes that tests start: a conversation with one by lines, who descends from whom, and an end for all of them."""

from __future__ import annotations

import ctypes
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
_SECONDS = 50.0  # less than a test may take
_GRACE = 10.0

_LASTING = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "weightsync_testing.fork_server",
)

_SUBREAPER, _IS_SUBREAPER = 36, 37
"""Of ``prctl``: what a descendant leaves behind when it ends becomes a child of this process, and not of the first one."""


class ChildProcess:
    """A Python process that reads and prints lines, and ends with its ``with`` block. What it started in its session ends with it.

    All timeouts are in seconds. What does not happen in time is an ``AssertionError`` that shows what the process printed last. Its
    output is read all the time: it never waits for a reader.

    Args:
        arguments: The interpreter's: ``"-m"`` and a module, or a file, and what follows. The process can import what this one can.
        launcher: A command that runs the interpreter.
        stderr: As in :mod:`subprocess`. By default that of the test, which pytest shows if the test fails.
        environment: What its environment has besides this process's.
        without: Beginnings of names of environment variables that it does not inherit.
    """

    def __init__(
        self,
        *arguments: object,
        launcher: Sequence[str] = (),
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*launcher, sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**inherited, **own, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self.pid, self._input = self._process.pid, self._process.stdin
        os.set_blocking(self._input.fileno(), False)
        self._ended, self._printed = False, list[str]()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._printed.append(line)
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _error(self, problem: str) -> AssertionError:
        return AssertionError(f"{problem}: {self._process.args!r}\nIt printed last:\n{self.printed[-4000:]}")

    @property
    def printed(self) -> str:
        """Everything that it has printed: once its exit code is known, all of it."""
        return "".join(self._printed)

    def line(self, timeout: float = _SECONDS) -> str:
        """The next line that it prints."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._error(f"no line within {timeout:g} s") from None
        if line is None:
            self._lines.put(None)  # for the next call
            raise self._error(f"no more lines, exit code {self.exit_code(timeout)}")
        return line

    def expect(self, line: str, timeout: float = _SECONDS) -> None:
        """The next line must be this one."""
        if (printed := self.line(timeout)) != line:
            raise self._error(f"{printed!r} instead of {line!r}")

    def write(self, line: str = "", timeout: float = _SECONDS) -> None:
        """Give it a line to read."""
        rest, until = f"{line}\n".encode(), time.monotonic() + timeout
        ready = select.poll()
        ready.register(self._input, select.POLLOUT)
        while rest:
            if not ready.poll(max(until - time.monotonic(), 0.0) * 1000):
                raise self._error(f"it did not read {line[:100]!r} within {timeout:g} s")
            try:
                rest = rest[os.write(self._input.fileno(), rest) :]
            except BrokenPipeError:
                raise self._error(f"it cannot read {line[:100]!r}, exit code {self.exit_code(timeout)}") from None

    def ask(self, line: str = "", timeout: float = _SECONDS) -> str:
        """Give it a line to read, and return the next line that it prints."""
        self.write(line, timeout)
        return self.line(timeout)

    def exit_code(self, timeout: float = _SECONDS) -> int:
        """Wait until it has ended, and kill what it left in its session."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._error(f"it did not end within {timeout:g} s") from None
        self._kill_session()
        self._reader.join(_GRACE)
        return code

    def _kill_session(self) -> None:
        """Only once after its end: afterwards its number may be another one's."""
        if not self._ended:
            self._ended = self._process.returncode is not None
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def output(self, timeout: float = _SECONDS) -> str:
        """Everything that it printed, once it has ended with success."""
        if code := self.exit_code(timeout):
            raise self._error(f"exit code {code}")
        return self.printed

    def end(self, timeout: float = _SECONDS) -> int:
        """End its input, upon which it should end. Returns the exit code."""
        self._input.close()
        return self.exit_code(timeout)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and what it started in its session, and wait."""
        self._kill_session()
        self.exit_code(_GRACE)

    def close(self) -> None:
        """Kill it if it runs, and close its pipes."""
        self.kill()
        self._input.close()
        if self._reader.is_alive():
            raise self._error("what it started in another session holds its output open")


@contextmanager
def ranks(count: int, module: str, *arguments: object, **options: Any) -> Iterator[list[ChildProcess]]:
    """Processes of ``module``, whose first argument is the rank. ``options`` are those of :class:`ChildProcess`."""
    with ExitStack() as owned:
        yield [owned.enter_context(ChildProcess("-m", module, rank, *arguments, **options)) for rank in range(count)]


def children(parent: int) -> dict[int, str]:
    """Living descendants of ``parent``: process id to command line."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[0] != "Z":
            below.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: dict[int, str] = {}
    todo = [parent]
    while todo:
        above = todo.pop()
        for pid in below.get(above, []):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            todo.append(pid)
            if above != parent or not any(name in command for name in _LASTING):
                found[pid] = command
    return found


@contextmanager
def none_outlives() -> Iterator[None]:
    """Kill what was started in the block and still runs, also processes in other sessions whose parents have ended.

    A launcher such as torchrun gives each worker a session of its own: a signal to the launcher's group does not reach them. Blocks
    may nest: what was started in the outer one, and left behind in the inner one, is killed by the outer one.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    before, was = children(os.getpid()).keys(), ctypes.c_int(0)
    prctl(_IS_SUBREAPER, ctypes.byref(was), 0, 0, 0)  # in such a block, or in none
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for _ in range(100):  # what a killed process leaves behind comes next
            left = children(os.getpid()).keys() - before
            if not left:
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            threading.Event().wait(0.05)
            for pid in left:
                with suppress(ChildProcessError):  # another one's child
                    os.waitpid(pid, os.WNOHANG)
        prctl(_SUBREAPER, was.value, 0, 0, 0)
