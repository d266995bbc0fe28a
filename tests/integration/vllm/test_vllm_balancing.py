"""A worker of vLLM that starts: what cannot be updated with balancing of experts is refused, and what is missing is named."""

from __future__ import annotations

import sys

import pytest
import torch

from weightsync.errors import ConfigurationError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(240)  # importing vLLM takes most of it
def test_what_expert_load_balancing_excludes_is_refused_and_a_missing_coordinator_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import ParallelConfig, VllmConfig, WeightTransferConfig
    from vllm.platforms import current_platform

    from weightsync.engines.vllm.experts import MovingExperts
    from weightsync.engines.vllm.worker import GroupInfo, WeightsyncEngine

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)  # vLLM's CPU build has no balancing at all
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
    monkeypatch.undo()
    config, device, model = VllmConfig(), torch.device("cpu"), torch.nn.Module()
    caplog.set_level("INFO", "weightsync")
    for coordinator in ("", "http://head:7400"):
        monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", coordinator)
        WeightsyncEngine(WeightTransferConfig(backend="weightsync"), config, device, model).shutdown()
    missing = [record.getMessage() for record in caplog.records if "no coordinator yet" in record.getMessage()]
    assert len(missing) == 1, "with a coordinator in the environment it joins by itself"
    config.parallel_config = parallel
    engine = WeightsyncEngine(WeightTransferConfig(backend="weightsync"), config, device, model)
    with pytest.raises(ConfigurationError, match=r"--enable-eplb.*Start vLLM without it"):
        engine._join_group(GroupInfo({}))
    with pytest.raises(ConfigurationError, match="balancing of this worker does not know its model"):
        MovingExperts(model, None)
    parallel.enable_elastic_ep = True
    with pytest.raises(ConfigurationError, match="--enable-elastic-ep"):
        WeightsyncEngine(WeightTransferConfig(backend="weightsync"), config, device, model)


@pytest.mark.timeout(240)
def test_an_update_from_outside_without_its_package_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, WeightTransferConfig

    from weightsync.engines.vllm.worker import GroupInfo, WeightsyncEngine

    monkeypatch.setitem(sys.modules, "weightsync_disaggregated.push_receiver", None)
    config = WeightTransferConfig(backend="weightsync")
    engine = WeightsyncEngine(config, VllmConfig(), torch.device("cpu"), torch.nn.Module())
    with pytest.raises(ConfigurationError, match=r"weightsync-disaggregated: pip install \./disaggregated-updates in a clone"):
        engine._join_group(GroupInfo({}))
