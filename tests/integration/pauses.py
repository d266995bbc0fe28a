"""An engine that notes what each pause was to do to running requests."""

from __future__ import annotations

import torch

from weightsync.engines.module import ModuleAdapter
from weightsync.model import PauseMode

__all__ = ["NotesPauses"]


class NotesPauses(ModuleAdapter):
    """A module whose pauses are listed in ``modes``."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.modes: list[PauseMode] = []

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.modes.append(mode)
        super().pause(mode, timeout)
