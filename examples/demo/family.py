"""The demo's processes: started in one group, heard line by line, and all gone when the block ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from examples.demo.reports import Report
from weightsync.errors import DeadlineExceeded, PeerLost, ProtocolError
from weightsync.protocol.messages import UNREADABLE

__all__ = ["Child", "Family"]

T = TypeVar("T")

_POLITE_SECONDS = 5.0
_LINE_BYTES = 16 << 20
_TAIL_CHARS = 2000
_REPORTS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Report)


@dataclass
class Child:
    """One process and its log."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    listener: asyncio.Task[None] | None = None
    dismissed: bool = False
    """Its end is wanted, whatever its status."""

    def say(self) -> None:
        """Let it go on (:meth:`examples.demo.reports.Parent.wait_for_word`)."""
        if self.process.stdin is not None:
            self.process.stdin.write(b"\n")

    def tail(self) -> str:
        """The end of its log."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:].strip()
        except FileNotFoundError:
            return ""


class Family:
    """Starts processes in a process group of their own, with a temporary directory, and ends both.

    Three things see to it that nothing stays behind: this object's exit (SIGTERM, a bounded wait, SIGKILL), the kernel, which
    kills each child when this process is gone (Linux), and a janitor process, which does what this one no longer can.
    ``polite_seconds`` is that bounded wait. Use it from the main thread: a child's life hangs on the thread that started it.
    """

    def __init__(self, environment: Mapping[str, str], polite_seconds: float = 5.0) -> None:
        self._environment, self._polite = dict(environment), polite_seconds
        self._group = 0
        self._ending = False
        self.children: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        # Its own session: what the terminal sends to the others does not reach it.
        self._janitor = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "examples.demo.janitor",
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.directory = Path(tempfile.mkdtemp(prefix="weightsync-demo-"))
        self._tell_janitor(f"directory {self.directory}")
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return self

    @property
    def group(self) -> int:
        """The process group of all children; 0 before the first."""
        return self._group

    def _tell_janitor(self, line: str) -> None:
        if self._janitor.stdin is not None:
            self._janitor.stdin.write(line.encode() + b"\n")

    async def start(
        self,
        name: str,
        module: str,
        argument: msgspec.Struct,
        heard: Callable[[Any], None],
        files: Sequence[int] = (),
        reports: msgspec.json.Decoder[Any] = _REPORTS,
    ) -> Child:
        """Run ``python -m module`` with ``argument`` as JSON; ``heard`` gets each of its ``reports``. ``files`` are inherited."""
        if self._group and not self._signal(0):  # all were killed: a group without members cannot be joined
            self._group = 0
        log = self.directory / f"{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, msgspec.json.encode(argument).decode(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=self._environment,
                process_group=self._group, pass_fds=tuple(files), limit=_LINE_BYTES,
            )  # fmt: skip
        if not self._group:
            self._group = process.pid
            self._tell_janitor(f"group {self._group}")
        child = self.children[name] = Child(name, process, log)
        child.listener = asyncio.create_task(self._listen(child, heard, reports), name=f"listen to {name}")
        child.listener.add_done_callback(self._heard_out)
        return child

    async def _listen(self, child: Child, heard: Callable[[Any], None], reports: msgspec.json.Decoder[Any]) -> None:
        """Hand on reports until the process ends. Raises :class:`PeerLost` if it failed."""
        stream = child.process.stdout
        if stream is None:
            raise ProtocolError(f"{child.name} has no output to read")
        while line := await stream.readline():
            try:
                report = reports.decode(line)
            except UNREADABLE as error:
                raise ProtocolError(f"{child.name} said something that is no report: {error}") from None
            heard(report)
        code = await child.process.wait()
        if code and not self._ending and not child.dismissed:
            raise PeerLost(f"{child.name} ended with status {code}; the end of its log:\n{child.tail()}")

    def _heard_out(self, listener: asyncio.Task[None]) -> None:
        if not listener.cancelled() and (error := listener.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``; if a child fails first, cancel it and raise :class:`PeerLost` with the end of the child's log."""
        task = asyncio.create_task(work)
        waits: list[asyncio.Future[Any]] = [task, self._failure]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():  # it says more than whatever followed from it
                self._failure.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def kill(self, *names: str) -> None:
        """Kill these children with SIGKILL and wait until they are gone; :meth:`start` may then use their names again.

        Raises :class:`~weightsync.errors.DeadlineExceeded` for one that does not end.
        """
        children = [self.children[name] for name in names]
        for child in children:  # all of them first: the end of one may end another
            child.dismissed = True
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
        listeners = [child.listener for child in children if child.listener is not None]
        _, late = await asyncio.wait(listeners, timeout=_POLITE_SECONDS)
        if late:
            raise DeadlineExceeded(f"{', '.join(task.get_name() for task in late)}: killed, and not gone after {_POLITE_SECONDS} s")

    async def ended(self) -> None:
        """Return when all children ended well."""
        await asyncio.gather(*(child.listener for child in self.children.values() if child.listener is not None))

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Shielded: a second interruption must not cut the cleaning short.
        await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        self._ending = True
        alive = [child for child in self.children.values() if child.process.returncode is None]
        self._signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in alive]
        if waits:
            await asyncio.wait(waits, timeout=self._polite)
        self._signal(signal.SIGKILL)  # also what a child started and left in the group
        if waits:
            await asyncio.wait(waits, timeout=_POLITE_SECONDS)
        listeners = [child.listener for child in self.children.values() if child.listener is not None]
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        if self._failure.done():
            self._failure.exception()  # looked at: it was raised, or it came too late to matter
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
        self._tell_janitor("done")
        if self._janitor.stdin is not None:
            self._janitor.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._janitor.wait(), _POLITE_SECONDS)

    def _signal(self, number: int) -> bool:
        """Signal all processes of the group. Returns False if there are none."""
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone (on macOS: all ending)
                os.killpg(self._group, number)
                return True
        return False
