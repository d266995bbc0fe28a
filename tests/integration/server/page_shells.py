"""Runs the shell blocks of an integration's page as its reader does: each in a separate shell, in the order of the page.

A block that starts a server is done when its ``ready`` returns true; the last block must end with success. Only what differs on
this machine is changed, and each change must apply: the model, the ports, and how vLLM's CPU build is started.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

__all__ = ["blocks", "run_shells", "vllm_on_this_machine"]

DOCS = Path(__file__).parents[3] / "docs"
_TICK = 0.5


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """The blocks of ``docs/page`` in ``language``, of the section under ``heading`` if one is given."""
    text = (DOCS / page).read_text()
    if heading:
        text = re.split(r"^## ", text.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def vllm_on_this_machine(folder: Path, *flags: str) -> None:
    """Make a command ``vllm`` in ``folder``: ``vllm serve MODEL ...`` starts the CPU build, whose own command does not start."""
    shim = folder / "vllm"
    more = f"--enforce-eager --dtype float32 --host 127.0.0.1 --port $VLLM_PORT_HERE {' '.join(flags)}"
    shim.write_text(f'#!/bin/bash\nshift\nexec {sys.executable} -m vllm.entrypoints.openai.api_server --model "$@" {more}\n')
    shim.chmod(0o755)


def run_shells(
    commands: Sequence[str],
    changes: Mapping[str, str],
    ready: Sequence[Callable[[], bool]],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
) -> str:
    """Run ``commands``, all but the last until their ``ready`` says so, in ``folder``; commands in it come first on the path.

    Returns:
        What the last one printed.

    Raises:
        TimeoutError: A block was not ready, or the last one did not end, within ``seconds``.
        RuntimeError: A block failed. The message is the end of its output.
    """
    found = "\n".join(commands)
    for old in changes:
        assert old in found, f"the page does not contain {old!r} any more"
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    until, tick = time.monotonic() + seconds, threading.Event()
    with ExitStack() as owned:
        for number, command in enumerate(commands):
            for old, new in changes.items():
                command = command.replace(old, new)
            output = folder / f"shell-{number}.log"
            with output.open("w") as printed:
                process = subprocess.Popen(
                    ["bash", "-eu", "-c", command], cwd=folder, env={**os.environ, **environment, "PATH": path},
                    stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            owned.callback(_end, process)
            last = number == len(commands) - 1
            while not (process.poll() is not None if last else ready[number]()):
                if not last and process.poll() is not None:
                    raise RuntimeError(f"shell {number} ended with {process.returncode}: {output.read_text()[-4000:]}")
                if time.monotonic() > until:
                    raise TimeoutError(f"shell {number} took more than {seconds:g} s: {output.read_text()[-4000:]}")
                tick.wait(_TICK)
        if process.returncode:
            raise RuntimeError(f"shell {number} ended with {process.returncode}: {output.read_text()[-4000:]}")
        return output.read_text()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a shell and what it started, which is in a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    except ProcessLookupError:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
