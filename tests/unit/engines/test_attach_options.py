"""Options with which workers of an engine join: one class for all engines, and what ``attach`` hands to vLLM's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.engines.attach_options import AttachOptions
from weightsync.engines.vllm import attach, attach_async
from weightsync.engines.vllm.attaching import _engines
from weightsync.errors import ConfigurationError


class Llm:
    """A ``vllm.LLM`` that notes what its workers are asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        self.asked.append((kwargs or {})["init_info"])
        return []

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True


def test_workers_get_what_was_given_and_leave_at_the_end() -> None:
    llm = Llm()
    with attach(llm, "vllm-0", "http://head:7400", token="secret", transports=["tcp"], delivery="streamed"):
        (joined,) = llm.asked
        assert joined.pop("control").startswith("weightsync-vllm-")
        assert joined == {
            "replica": "vllm-0", "coordinator": "http://head:7400", "token": "secret", "transports": ["tcp"],
            "delivery": "streamed",
        }  # fmt: skip
    assert llm.asked[1]["leave"] is True


def test_the_environments_token_goes_to_workers_of_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", "http://head:7400")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "secret")
    llm = Llm()
    with attach(llm, "vllm-0", "http://head:7400"):
        assert llm.asked[0]["token"] == "secret"
    with attach(llm, "vllm-0"):
        assert "token" not in llm.asked[2], "the workers have the same environment"


def test_staging_memory_is_bounded_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default of 64 MiB counted as given, so in vLLM a delta of a large model never had room on a GPU."""
    joined: list[int | None] = []
    monkeypatch.setattr("weightsync.engines.attach_options.Engine", lambda *_, bucket_bytes, **__: joined.append(bucket_bytes))
    adapter: Any = None
    AttachOptions(coordinator="http://head:7400", token="secret").join(adapter, 0, 1, "direct")
    AttachOptions(coordinator="http://head:7400", token="secret", bucket_bytes=1 << 20).join(adapter, 0, 1, "direct")
    assert joined == [None, 1 << 20]


@pytest.mark.usefixtures("no_leaks")
async def test_an_option_that_does_not_exist_is_named_and_no_worker_is_asked() -> None:
    llm: Any = Llm()
    with pytest.raises(TypeError, match=r"unknown option 'tokn'; options: token, run"):
        attach(llm, "vllm-0", tokn="secret")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unknown option 'tokn'"):
        await attach_async(llm, "vllm-0", tokn="secret")  # type: ignore[call-arg]
    assert not llm.asked


def test_the_delivery_is_the_callers_or_the_environments_or_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_DELIVERY", raising=False)
    assert AttachOptions().chosen_delivery() == "auto"
    monkeypatch.setenv("WEIGHTSYNC_DELIVERY", "streamed")
    assert AttachOptions().chosen_delivery() == "streamed"
    assert AttachOptions(delivery="direct").chosen_delivery() == "direct"
    monkeypatch.setenv("WEIGHTSYNC_DELIVERY", "posted")
    with pytest.raises(ConfigurationError, match=r"WEIGHTSYNC_DELIVERY is 'posted'; choose from auto, direct, streamed"):
        AttachOptions().chosen_delivery()
    with pytest.raises(ConfigurationError, match=r"delivery is 'mailed'"):
        AttachOptions(delivery="mailed").chosen_delivery()  # type: ignore[arg-type]


def test_all_engines_that_a_server_controls_are_ranks_of_its_replica() -> None:
    def of(**parallel: object) -> int:
        return _engines(SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**parallel))))

    assert of(data_parallel_size=2, data_parallel_external_lb=False, data_parallel_hybrid_lb=False) == of(data_parallel_size=2) == 2
    assert of(data_parallel_size=2, data_parallel_external_lb=True) == of(data_parallel_size=2, data_parallel_hybrid_lb=True) == 1
    assert _engines(object()) == 1
