"""What vLLM's loader takes, with vLLM's own layerwise reload and a model of one layer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from weightsync.errors import LoadError

pytestmark = [
    pytest.mark.vllm, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's imports
]  # fmt: skip


class Takes(torch.nn.Module):
    """Takes ``most`` tensors, and does not say which, as some of vLLM's models do not."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        self.most = most

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.most:
            return
        for count, (name, tensor) in enumerate(tensors, 1):
            parameter = self.get_parameter(name)
            getattr(parameter, "weight_loader", torch.Tensor.copy_)(parameter, tensor)  # a reload sets the first
            if count == self.most:
                return


class Unquantized:
    """As much of vLLM's model configuration as loading looks at."""

    quantization = None
    dtype = torch.float32


@pytest.mark.parametrize(("most", "stopped"), [(0, "first.weight"), (1, "second.weight"), (2, None)])
def test_a_loader_that_leaves_tensors_is_an_error_also_if_it_says_nothing_of_what_it_loaded(most: int, stopped: str | None) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from weightsync.engines.vllm.loading import install

    model, tensors = Takes(most), [(name, torch.ones(2, 2)) for name in ("first.weight", "second.weight")]
    record_metadata_for_reloading(model)  # as vLLM does when it has loaded a model
    if stopped is None:
        install(model, Unquantized(), tensors)
        return
    with pytest.raises(LoadError, match=f"stopped before {stopped}"):
        install(model, Unquantized(), tensors)


def test_names_of_adapters_keep_what_vllm_stacks_itself() -> None:
    """In every supported release: until 0.31 the mapper's method had another name, and q, k and v of experts' models became one."""
    from vllm.model_executor.models.utils import WeightsMapper

    from weightsync.engines.vllm.loras import renames

    known = "orig_to_new_stacked" in WeightsMapper.__dataclass_fields__
    stacked = {"orig_to_new_stacked": {".k_proj": (".qkv_proj", "k")}} if known else {}
    mapper = WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}, **stacked)
    assert renames(mapper)._map_name("model.layers.0.k_proj.lora_A.weight") == "language_model.model.layers.0.k_proj.lora_A.weight"
    assert renames(None) is None
