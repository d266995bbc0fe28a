"""Notices that a person must see, whether or not the program configures logging."""

from __future__ import annotations

import logging
import sys

__all__ = ["tell"]


def tell(log: logging.Logger, text: str) -> None:
    """Log ``text`` as a warning. If no handler of ``log`` writes to a terminal but standard error is one, print it there."""
    text = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)  # the text may come from another process
    log.warning("%s", text)
    if _terminal(sys.stderr) and not _shown(log):
        print(f"weightsync: {text}", file=sys.stderr, flush=True)


def _terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def _shown(log: logging.Logger) -> bool:
    """Whether a warning to ``log`` reaches a terminal. Without any handler, Python prints it itself."""
    if not log.hasHandlers():
        return True
    current: logging.Logger | None = log
    while current is not None:
        if any(isinstance(handler, logging.StreamHandler) and _terminal(handler.stream) for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False
