"""The coordinator's process: the real service, on a free port of loopback, tied to the demo's main process."""

from __future__ import annotations

import sys

import msgspec

from examples.demo.reports import Listening, Parent, die_with_parent
from weightsync.model import PauseMode

__all__ = ["CoordinatorSettings", "main"]


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator's process is told; its token comes by the environment."""

    parent: int
    pause_mode: PauseMode
    port: int = 0
    """0: a free one."""
    run: str = ""
    state_dir: str | None = None


def main(argument: str) -> int:
    """Serve until a signal ends the process. ``argument`` is :class:`CoordinatorSettings` as JSON."""
    mine = msgspec.json.decode(argument, type=CoordinatorSettings)
    die_with_parent(mine.parent)
    parent = Parent()

    from weightsync.config import ServerSettings
    from weightsync.protocol.tokens import generate
    from weightsync.server.server import serve

    settings = ServerSettings.load(
        host="127.0.0.1", port=mine.port, pause_mode=mine.pause_mode, run=mine.run or None, state_dir=mine.state_dir,
        operator_token=generate(), metrics_token=generate(),  # not used: so that no file of them is left
    )  # fmt: skip
    serve(settings, lambda address, token, coordinator: parent.tell(Listening(address.url)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
