"""What of a PEFT model becomes a LoRA adapter that is published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightsync.errors import ConfigurationError
from weightsync.trainer.adapters import adapter_of


@pytest.mark.parametrize("more", ["bias", "tokens", "alora", ""])
def test_no_part_of_a_peft_model_is_left_out(more: str) -> None:
    layer = torch.nn.Module()
    layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(8, 4, bias=False)})
    layer.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 8, bias=more == "bias")})
    model = torch.nn.Module()
    model.base_model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"q": layer})})
    if more == "tokens":
        layer.token_adapter = torch.nn.Module()
        layer.token_adapter.trainable_tokens_delta = torch.nn.ParameterDict({"default": torch.zeros(2, 8)})
    tokens = [3] if more == "alora" else None
    model.peft_config = {"default": SimpleNamespace(r=4, lora_alpha=8, alora_invocation_tokens=tokens)}  # type: ignore[assignment]
    if not more:
        assert len(adapter_of(model, "default", None, False)[0]) == 2  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigurationError, match=r"B\.default\.bias|trainable_tokens_delta\.default|activated LoRA"):
        adapter_of(model, "default", None, False)
