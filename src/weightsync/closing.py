"""Objects that own something until they are closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
