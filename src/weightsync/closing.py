"""Objects that own something until they are closed, and what is undone where a block fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """Base of what is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release what this object owns. Safe twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class OnFailure:
    """Calls ``undo(*arguments)`` where the ``with`` block raises, whatever it raises; the error goes on.

    It adds no frame to the error's traceback, which would keep alive what the frame refers to.
    """

    def __init__(self, undo: Callable[..., object], *arguments: object) -> None:
        self._undo, self._arguments = undo, arguments

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._undo(*self._arguments)
