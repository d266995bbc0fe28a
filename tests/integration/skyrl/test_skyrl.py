"""SkyRL's name in vLLM's real factory: taken over where it is free, and its settings accepted. SkyRL itself was tried by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.integration.pauses import NotesPauses

from weightsync import Engine
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]  # importing vLLM takes most of it


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    held: dict[str, Any] = WeightTransferTrainerFactory._registry
    before = dict(held)
    yield held
    held.clear()
    held |= before


def test_the_name_that_skyrl_uses_publishes_through_weightsync(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from weightsync.integrations import skyrl

    @dataclass
    class NcclSettings(TrainerInitInfo):  # type: ignore[misc]
        """As SkyRL makes them: of a class of its own, with an address that nobody listens on."""

        backend: ClassVar[str] = skyrl.NAME
        master_address: str = "127.0.0.1"
        master_port: int = 9
        world_size: int = 3
        packed: bool = True

    skyrl.enable()
    skyrl.enable()
    assert skyrl.NAME in registry, "so SkyRL does not register its own"
    torch.manual_seed(1)
    trained, served = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
    coordinator = BackgroundServer(ServerSettings.load({}, port=0))
    pauses = NotesPauses(served)
    with coordinator, Engine(pauses, "one", coordinator.url, token=coordinator.token):
        monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", coordinator.url)
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", coordinator.token)
        engine = WeightTransferTrainerFactory.trainer_init(NcclSettings(rank=0), client=None, source=ModuleSource(trained))
        try:
            assert (engine.skyrl_handles_prefix_cache_reset, engine.skyrl_force_disable_expandable_segments) == (True, False)
            engine.skyrl_draft_source = None
            engine.send_weights()
            assert torch.equal(served.weight, trained.weight)
            assert pauses.modes == ["keep"], "as SkyRL's own pause: it submits no request again"
            engine.skyrl_draft_source = ModuleSource(trained)
            with pytest.raises(ConfigurationError, match="draft"):
                engine.send_weights()
        finally:
            engine.shutdown()


@pytest.mark.parametrize(
    ("prefix", "more"),
    [("", {}), ("inner.", {}), ("", {"_rounds_twice": True})],
    ids=["as the model's own", "under a prefix", "by a later SkyRL"],
)
def test_a_model_is_published_by_its_shards_unless_skyrl_changes_its_tensors(prefix: str, more: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    from weightsync.engines.vllm.trainer import WeightsyncTrainerInitInfo
    from weightsync.integrations.skyrl import SkyRLTrainerEngine

    walks: list[str] = []

    class FsdpWeightSource(WeightSource):  # type: ignore[misc]
        """SkyRL's, without a device. Each walk gathers whole tensors."""

        def __init__(self, model: torch.nn.Module) -> None:
            self._model, self._prefix, self._dtype = model, prefix, torch.bfloat16
            self.__dict__ |= more

        model = property(lambda self: self._model)
        weight_prefix = property(lambda self: self._prefix)

        def metadata(self) -> list[Any]:
            return [ParamMeta(prefix + name, self._dtype, tuple(one.shape)) for name, one in self.model.state_dict().items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            walks.append(prefix)
            return ((prefix + name, one.to(self._dtype)) for name, one in self.model.state_dict().items())

    class Corrected(torch.nn.Linear):
        """With a buffer that is in its checkpoint, as a router's correction of scores."""

        def __init__(self) -> None:
            super().__init__(7, 5)
            self.register_buffer("correction", torch.rand(5))

    trained, inner = Corrected(), Corrected().to(torch.bfloat16)
    served = torch.nn.Module()
    served.inner = inner
    source = FsdpWeightSource(trained)
    coordinator = BackgroundServer(ServerSettings.load({}, port=0))
    adapter = ModuleAdapter(served if prefix else inner, include_buffers=True)
    with coordinator, Engine(adapter, "one", coordinator.url, token=coordinator.token):
        info = WeightsyncTrainerInitInfo(rank=0, world_size=1, coordinator=coordinator.url, token=coordinator.token)
        engine = SkyRLTrainerEngine(client=None, source=source, init_info=info)
        try:
            engine.send_weights()
        finally:
            engine.shutdown()
    for name, held in inner.state_dict().items():
        assert torch.equal(held, trained.state_dict()[name].to(torch.bfloat16)), name
    assert len(walks) == (1 if prefix or more else 0)


@pytest.mark.parametrize("way", ["FSDP", "Megatron in memory"])
def test_an_adapter_that_goes_past_weightsync_is_refused(way: str) -> None:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

    from weightsync.integrations.skyrl import SkyRLTrainerEngine

    model = SimpleNamespace(peft_config={})  # of SkyRL's FsdpWeightSource; its MegatronLoraAdapterSource is given names
    source: Any = SimpleNamespace(model=model) if way == "FSDP" else SimpleNamespace(set_lora_name=str)
    with pytest.raises(ConfigurationError, match=r"LoRA adapters to its servers by itself.*lora\.rank=0, or merge_lora=true"):
        SkyRLTrainerEngine.trainer_init(TrainerInitInfo(rank=0), client=None, source=source)


def test_after_skyrl_has_registered_its_own_it_is_too_late(registry: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from weightsync.engines.vllm.trainer import WeightsyncTrainerEngine
    from weightsync.integrations import skyrl

    WeightTransferTrainerFactory.register_engine(skyrl.NAME, type("Own", (WeightsyncTrainerEngine,), {}))
    with pytest.raises(ConfigurationError, match="before SkyRL's first sync"):
        skyrl.enable()
