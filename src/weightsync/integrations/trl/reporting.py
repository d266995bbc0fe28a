"""Every update in TRL's own log: one line on the terminal, and its measurements among TRL's metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.integrations.updates import calling
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import tell
from weightsync.protocol.round_log import describe
from weightsync.tensors.shards import DTypes

_FRAMES = 16  # to the method of TRL's trainer, with decorators and callbacks between
_log = logging.getLogger(__name__)
_rounds = logging.getLogger("weightsync.rounds")


def report(result: RoundResult, trainer: object) -> None:
    """Add ``result`` to the metrics of TRL's ``trainer``, if there is one, and print its line unless the log shows it."""
    metrics = _metrics_of(trainer)
    if metrics is not None:
        for key, value in result.summary().items():
            metrics.setdefault(key, []).append(value)
    if not _rounds.isEnabledFor(logging.INFO):
        print(f"weightsync: {describe(result)}", flush=True)


def calling_trainer() -> object:
    """The trainer of TRL whose method is calling, ``None`` if none is: TRL gives what it calls no reference to it."""
    return calling(lambda own: _metrics_of(own) is not None, _FRAMES)


def _metrics_of(trainer: object) -> dict[str, list[float]] | None:
    modes: Any = getattr(trainer, "_metrics", None)
    metrics = modes.get("train") if isinstance(modes, Mapping) else None
    return metrics if isinstance(metrics, dict) else None


def warn_of_rounding(name: str, dtype: torch.dtype, published: DTypes) -> bool:
    """Warn, and return ``True``, if a tensor of ``dtype`` loses bits where it is published."""
    target = published.get(name) if isinstance(published, Mapping) else published
    if target is None or not dtype.is_floating_point or torch.promote_types(dtype, target) == target:
        return False
    tell(
        _log,
        f"the trainer's weights are {str(dtype).removeprefix('torch.')} ({name}) and are published as "
        f"{str(target).removeprefix('torch.')}: vLLM samples from rounded weights, where TRL's own sync sends {dtype}. To avoid "
        f"it, serve a copy of the checkpoint in {dtype} and pass dtype={dtype}",
    )
    return True
