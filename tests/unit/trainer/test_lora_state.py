"""What of a PEFT model becomes a LoRA adapter that is published."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from weightsync.errors import ConfigurationError
from weightsync.tensors.shards import shards_of
from weightsync.trainer.adapters import adapter_of, base_weights, check_finite, stacks_of


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


def matrices(rank: int = 4) -> dict[str, torch.Tensor]:
    return {"q.lora_A.weight": torch.ones(rank, 8), "q.lora_B.weight": torch.ones(8, rank)}


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf, 1e30])
def test_an_alpha_that_the_coordinator_would_not_take_is_refused_here(alpha: float) -> None:
    with pytest.raises(ConfigurationError, match="lora_alpha"):
        adapter_of(matrices(), "default", alpha, False)


def test_a_module_of_rank_zero_is_no_part_of_an_adapter() -> None:
    other = {name.replace("q", "k"): tensor for name, tensor in matrices(0).items()}
    with pytest.raises(ConfigurationError, match="needs for each module"):
        adapter_of(matrices() | other, "default", 8, False)


def test_peft_adapters_of_other_types_are_refused() -> None:
    model = torch.nn.Module()
    model.peft_config = {"default": SimpleNamespace(peft_type="IA3")}  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="type IA3, and only LoRA"):
        adapter_of(model, "default", None, False)


def test_merged_weights_are_no_base() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.merged_adapters = []  # type: ignore[assignment]
    model = torch.nn.ModuleDict({"q": layer})
    assert base_weights(model).keys() == {"q.weight"}
    layer.merged_adapters = ["default"]  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"default is merged into q: call the model's unmerge_adapter\(\) first"):
        base_weights(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("numbers", [(math.inf, -math.inf), (math.nan, 0.0), (0.0, -math.inf), (None, None), (1.0, -1.0)])
def test_a_number_that_is_not_finite_is_seen_among_many_and_a_sum_that_is_not_finite_is_none(
    numbers: tuple[float | None, float | None], dtype: torch.dtype
) -> None:
    state = {f"{layer}.{name}": tensor for layer in range(9) for name, tensor in matrices().items()}
    for name, number in zip(("3.q.lora_B.weight", "7.q.lora_B.weight"), numbers, strict=True):
        state[name][5, 2:] = torch.finfo(dtype).max if number is None else number
    manifest, shards = shards_of(state, dtype=dtype)
    stacks = stacks_of(shards, manifest)
    if all(number is None or math.isfinite(number) for number in numbers):
        check_finite(shards, "the adapter", stacks)
        return
    with pytest.raises(ConfigurationError, match=r"[37]\.q\.lora_B\.weight holds NaN or infinity as"):
        check_finite(shards, "the adapter", stacks)
