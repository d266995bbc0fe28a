"""What weightsync needs of TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.errors import ConfigurationError
from weightsync.integrations.releases import SERIES

__all__ = ["check_interface"]


def check_interface(module: object, needed: Mapping[str, Sequence[str]]) -> None:
    """Check that ``module`` has each class in ``needed`` with its methods.

    Raises:
        ConfigurationError: Something is missing. The message names it.
    """
    lacking = [
        f"{kind}.{method}"
        for kind, methods in needed.items()
        for method in methods
        if not callable(getattr(getattr(module, kind, None), method, None))
    ]
    if lacking:
        tried = SERIES["trl"].tried
        raise ConfigurationError(
            f"this TRL ({getattr(module, '__name__', module)}) has no {', '.join(lacking)}: weightsync was tried with TRL {tried}"
        )
