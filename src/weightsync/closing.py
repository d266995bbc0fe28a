"""Objects that own something until they are closed."""

from __future__ import annotations

from types import TracebackType
from typing import Self

__all__ = ["Closeable"]


class Closeable:
    """Base of what is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release what this object owns. Safe twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
