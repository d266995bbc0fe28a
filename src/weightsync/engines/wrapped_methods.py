"""Methods and functions of other packages with code of weightsync around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_weightsync_around"


def wrap_once(kind: Any, name: str, around: Callable[..., Any]) -> None:  # noqa: ANN401 - a class, an object, a module, or None
    """Call ``around`` instead of the method or function ``name`` of ``kind``. Its first argument is the method. Idempotent.

    Does nothing if there is no such method.
    """
    method = getattr(kind, name, None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the method's
        return around(method, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(kind, name, wrapped)
