"""What vLLM's loader takes, with vLLM's own layerwise reload and a model of one layer."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from weightsync.errors import LoadError

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel

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


def test_layers_that_get_less_than_with_the_whole_checkpoint_are_an_error() -> None:
    """vLLM would process them with whatever is in new memory."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from weightsync.engines.vllm.loading import install, install_some

    model = Takes(9)
    model.third = torch.nn.Linear(2, 2)
    record_metadata_for_reloading(model)
    whole = {
        name: torch.ones(size) for name, size in {"first.weight": (2, 2), "second.weight": (2, 2), "third.weight": (2, 2)}.items()
    }
    install(model, Unquantized(), whole.items())  # the third layer is padded: its bias never comes
    for name in whole:
        install_some(model, Unquantized(), [(name, torch.full((2, 2), 3.0))], as_whole=True)
        assert torch.all(model.get_parameter(name) == 3.0)
    with pytest.raises(LoadError, match="fill only parts of 1 layers: third"):
        install_some(model, Unquantized(), [("third.bias", torch.zeros(2))], as_whole=True)


def test_names_of_adapters_keep_what_vllm_stacks_itself() -> None:
    """In every supported release: until 0.31 the mapper's method had another name, and q, k and v of experts' models became one."""
    from vllm.model_executor.models.utils import WeightsMapper

    from weightsync.engines.vllm.loras import renames

    known = "orig_to_new_stacked" in WeightsMapper.__dataclass_fields__
    stacked = {"orig_to_new_stacked": {".k_proj": (".qkv_proj", "k")}} if known else {}
    mapper = WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}, **stacked)
    assert renames(mapper)._map_name("model.layers.0.k_proj.lora_A.weight") == "language_model.model.layers.0.k_proj.lora_A.weight"
    assert renames(None) is None


def test_adapters_are_scaled_as_their_publisher_says_module_by_module() -> None:
    """Releases before 0.32 know one scaling for all modules, and answered wrongly for an adapter with patterns."""
    from weightsync.engines.vllm.loras import WorkerLoras
    from weightsync.model.lora import AdapterSpec, LoraConfig, lora_modules
    from weightsync.tensors.shards import manifest_of

    class Manager:
        capacity = 1
        lora_config = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32)
        model = None
        packed_modules: ClassVar[dict[str, list[str]]] = {}
        modules: ClassVar[dict[str, object]] = {}

        def _create_merged_loras_inplace(self, lora_model: LoRAModel) -> None:
            for lora in lora_model.loras.values():
                lora.optimize()  # as vLLM's

    spec = AdapterSpec("a/b", LoraConfig(rank=8, alpha=12.0, scalings={"m.o_proj": 3.0}))
    tensors = {
        f"base_model.model.m.{name}.lora_{side}.weight": torch.ones(shape)
        for name, rank in (("q_proj", 8), ("o_proj", 4))
        for side, shape in (("A", (rank, 2)), ("B", (2, rank)))
    }
    workers = WorkerLoras(Manager(), 16, None, 1)
    manifest = manifest_of(tensors)
    workers._arranged = workers._arrange(manifest, {module.name: module for module in lora_modules(manifest)})
    assert "copied nothing" in workers.stage("a/b@1", spec, tensors), "there is no layer from which it could be read back"
    staged = workers.take("a/b@1", 1).loras
    assert torch.equal(staged["m.q_proj"].lora_b, torch.full((2, 8), 1.5))
    assert torch.equal(staged["m.o_proj"].lora_b, torch.full((2, 4), 3.0))
    assert [lora.scaling for lora in staged.values()] == [1, 1]
    assert torch.equal(tensors["base_model.model.m.q_proj.lora_B.weight"], torch.ones(2, 8)), "what arrived is not changed"
