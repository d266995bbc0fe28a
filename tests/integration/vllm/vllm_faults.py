"""Loaded into vLLM's workers (``--worker-extension-cls``): lets a test make the next load fail half way."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch


class Faults:
    """Becomes a base class of vLLM's worker."""

    model_runner: Any
    rank: int

    def fail_next_load(self) -> None:
        """The next ``load_weights`` of rank 0's model takes a few tensors and raises; the one after it works."""
        if self.rank:
            return
        model = self.model_runner.get_model()
        own = model.load_weights

        def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            model.load_weights = own
            own(list(islice(weights, 9)))
            raise RuntimeError("injected into the load")

        model.load_weights = failing
