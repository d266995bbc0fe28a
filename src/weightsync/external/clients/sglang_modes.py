"""Our pause modes as SGLang (0.5.23) has them. Knows no tensor library, so that rollout controllers can read it too."""

from __future__ import annotations

from typing import Literal

from weightsync.errors import ConfigurationError
from weightsync.model import PauseMode

__all__ = ["SGLangMode", "sglang_mode"]

SGLangMode = Literal["abort", "retract", "in_place"]

_MODES: dict[PauseMode, SGLangMode] = {"abort": "abort", "keep": "retract"}
"""``keep``: requests go back to the queue and are computed anew. ``in_place`` would keep cache entries of the old weights, which
SGLang refuses to flush while requests run, after the weights have changed."""


def sglang_mode(mode: PauseMode) -> SGLangMode:
    """What ``mode`` is called there. Raises :class:`~weightsync.errors.ConfigurationError`: SGLang has no way to ``wait``."""
    if mode not in _MODES:
        raise ConfigurationError(f"SGLang cannot pause with {mode!r}; it knows {', '.join(_MODES)}")
    return _MODES[mode]
