"""A vLLM whose experts are rebalanced while it serves is refused when it starts, before it can join anything."""

from __future__ import annotations

import pytest
import torch

from weightsync.errors import ConfigurationError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(240)  # importing vLLM takes most of it
def test_expert_load_balancing_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import ParallelConfig, VllmConfig, WeightTransferConfig
    from vllm.platforms import current_platform

    from weightsync.engines.vllm.worker import WeightsyncEngine

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)  # vLLM's CPU build has no balancing at all
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
    monkeypatch.undo()
    config, device, model = VllmConfig(), torch.device("cpu"), torch.nn.Module()
    WeightsyncEngine(WeightTransferConfig(backend="weightsync"), config, device, model).shutdown()
    config.parallel_config = parallel
    with pytest.raises(ConfigurationError, match=r"--enable-eplb.*Start vLLM without it"):
        WeightsyncEngine(WeightTransferConfig(backend="weightsync"), config, device, model)
