"""Loaded into vLLM's workers (``--worker-extension-cls``): lets a test make the next load fail half way, or spoil an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch


class Faults:
    """Becomes a base class of vLLM's worker."""

    model_runner: Any
    rank: int
    spoiled: Any
    noted: list[str]

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

    def note_loads(self) -> None:
        """From now on note the names of all tensors that the model's loader is given."""
        model = self.model_runner.get_model()
        own, self.noted = model.load_weights, list[str]()

        def noting(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            def each() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    self.noted.append(name)
                    yield name, tensor

            loaded: set[str] = own(each())
            return loaded

        model.load_weights = noting

    def scribble(self) -> None:
        """Change a parameter as somebody else in this process would."""
        with torch.no_grad():
            next(self.model_runner.get_model().model.layers[0].parameters()).add_(1)

    def noted_loads(self) -> list[str]:
        """Return what was noted, and begin anew."""
        noted, self.noted = self.noted, []
        return noted

    def spoil_slots(self, rank: int, matrix: str, row: int) -> None:
        """From now on ``rank`` has another byte in a ``row`` of a slot than it should have; with ``row`` -1 beyond the adapter."""
        if self.rank != rank:
            return
        layer = next(layer for name, layer in self.model_runner.get_model().lora_manager.modules.items() if "o_proj" in name)
        self.spoiled = layer

        def spoiling(index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
            type(layer).set_lora(layer, index, lora_a, lora_b)
            getattr(layer, matrix)[0][index, 0, row, -1:].view(torch.uint8)[-1] ^= 1

        layer.set_lora = spoiling

    def heal_slots(self) -> None:
        """End :meth:`spoil_slots`."""
        if hasattr(self, "spoiled"):
            del self.spoiled.set_lora, self.spoiled

    def plant(self, mutant: str) -> None:
        """From now on slots are read back with a bug."""
        from weightsync.engines.vllm import lora_slots

        module: Any = lora_slots
        if mutant == "unread":
            module.LoraSlotLayout.check = lambda self, index, digests: None
        elif mutant == "filled only":
            module._nonzero = lambda tensors: 0
        elif mutant == "of the first slot":
            slots = module._slots
            module._slots = lambda layers, index=0: slots(layers)
        else:
            raise ValueError(f"no mutant is called {mutant}")

    def compute_in_slots(self) -> None:
        """From now on layers do more than copy."""
        from vllm.lora.layers import RowParallelLinearWithLoRA as Layer

        own = Layer.set_lora

        def computing(self: Any, index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
            own(self, index, lora_a, lora_b * 1.0)

        Layer.set_lora = computing
