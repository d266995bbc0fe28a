"""LoRA adapters of a module: what ``torch.compile`` has made of it computes with them too."""

from __future__ import annotations

import pytest
import torch

from weightsync.engines.module_loras import ModuleLoras
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, LoraConfig, LoraSlots

MATRICES = {"base_model.model.first.lora_A.weight": (2, 8), "base_model.model.first.lora_B.weight": (8, 2)}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.last(torch.relu(self.first(x)))
        return answer


@pytest.mark.parametrize("how", ["wrapped", "in place", "later", "not"])
def test_a_module_that_is_compiled_computes_with_each_adapter(how: str) -> None:
    torch.manual_seed(0)
    module, x = Net(), torch.randn(3, 8)
    served = torch.compile(module, backend="eager") if how == "wrapped" else module
    if how == "in place":
        module.compile(backend="eager")
    plain = served(x)
    loras = ModuleLoras(served, LoraSlots(4, 4))  # type: ignore[arg-type]
    if how == "later":
        served = torch.compile(module, backend="eager")
    assert torch.equal(served(x), plain)
    for number in range(4):
        name = "again" if number % 2 else "first"  # one layer under two names
        matrices = {key.replace("first", name): torch.randn(shape) for key, shape in MATRICES.items()}
        loras.stage(f"alice/math@{number}", AdapterSpec("alice/math", LoraConfig(2, 4.0)), matrices)
        loras.register(Version("alice/math", number, "", ""))
        a, b = matrices.values()
        changed = torch.nn.functional.linear(x, module.first.weight + 2.0 * b @ a, module.first.bias)
        with loras.using("alice/math"):
            assert torch.allclose(served(x), module.last(torch.relu(changed)), atol=1e-5)
        assert torch.equal(served(x), plain)
