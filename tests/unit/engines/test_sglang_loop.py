"""The loop of SGLang's scheduler as weightsync's thread sees it: pauses, requests, sleep, calls, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.contract.engines.sglang_stand_in import (
    REQUESTS,
    Abort,
    FusedModel,
    Pause,
    Proceed,
    StandInScheduler,
    WeightUpdater,
    Write,
    adapter_of,
    checkpoint,
)

from weightsync.engines.sglang.joining import gaps_of_loader, install, rows_of_padding
from weightsync.engines.sglang.loop import SchedulerLoop, WakeUp
from weightsync.engines.sglang.refusals import why_refused
from weightsync.engines.staged_adapter import UNLABELLED
from weightsync.errors import Aborted, DeadlineExceeded, LoadError
from weightsync.model import Manifest, TensorSpec, Version


@pytest.fixture
def scheduler() -> Iterator[StandInScheduler]:
    with StandInScheduler() as running:
        yield running


def until_running(scheduler: StandInScheduler) -> None:
    end = time.monotonic() + 5.0
    while not scheduler.running:
        assert time.monotonic() < end
        time.sleep(0.001)


def until_ended(scheduler: StandInScheduler, outcomes: list[str]) -> None:
    end = time.monotonic() + 5.0
    while scheduler.ended != outcomes:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_an_abort_ends_running_requests_and_those_that_come_later_wait(scheduler: StandInScheduler) -> None:
    scheduler.input.append(100_000)
    until_running(scheduler)
    scheduler.loop.pause("abort", 5.0)
    assert scheduler.ended == ["aborted"]
    scheduler.input.append(1)
    time.sleep(0.05)
    assert not scheduler.waiting
    scheduler.loop.proceed(5.0)
    until_ended(scheduler, ["aborted", "finished"])


def test_kept_requests_go_back_to_the_queue(scheduler: StandInScheduler) -> None:
    scheduler.input.append(100_000)
    until_running(scheduler)
    scheduler.loop.pause("keep", 5.0)
    assert len(scheduler.waiting) == 1
    assert not scheduler.ended


def test_requests_end_before_a_pause_that_waits_and_new_ones_are_held_back(scheduler: StandInScheduler) -> None:
    scheduler.input.append(100)
    until_running(scheduler)
    scheduler.loop.pause("wait", 5.0)
    assert scheduler.ended == ["finished"]
    scheduler.input.append(1)
    scheduler.loop.proceed(5.0)
    until_ended(scheduler, ["finished", "finished"])


def test_a_pause_that_waits_gives_up_in_time_and_lets_new_requests_in(scheduler: StandInScheduler) -> None:
    scheduler.input.append(100_000)
    until_running(scheduler)
    with pytest.raises(DeadlineExceeded, match="requests did not end"):
        scheduler.loop.pause("wait", 0.1)
    scheduler.input.append(1)
    until_ended(scheduler, ["finished"])
    assert not scheduler._engine_paused


def test_a_pause_comes_after_the_grammars_that_are_compiled_and_holds_new_requests_back(scheduler: StandInScheduler) -> None:
    scheduler.grammar_manager.grammar_queue.append("a grammar")
    with pytest.raises(DeadlineExceeded, match="made no pass"):
        scheduler.loop.pause("abort", 0.1)
    assert not scheduler._engine_paused
    scheduler.grammar_manager.grammar_queue.clear()
    scheduler.loop.pause("abort", 5.0)


def test_a_continuation_by_another_client_waits_for_the_end_of_the_update(
    scheduler: StandInScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.loop.pause("abort", 5.0)
    scheduler.input += [1, Proceed(), Proceed()]
    time.sleep(0.05)
    assert scheduler._engine_paused
    assert scheduler.loop.call(lambda: scheduler.steps, 5.0) == 0
    assert caplog.text.count("waits until the update has ended") == 1
    scheduler.loop.proceed(5.0)
    until_ended(scheduler, ["finished"])


def test_no_client_continues_an_engine_whose_update_failed(scheduler: StandInScheduler) -> None:
    adapter = adapter_of(scheduler, "direct")
    adapter.pause("keep", 5.0)
    with pytest.raises(LoadError, match="did not load"):
        adapter.resume()
    scheduler.input += [1, Proceed()]
    time.sleep(0.05)
    assert scheduler._engine_paused
    assert (scheduler.steps, scheduler.version) == (0, UNLABELLED)


def test_an_update_fails_if_another_client_writes_weights_meanwhile_and_the_next_one_does_not(scheduler: StandInScheduler) -> None:
    adapter = adapter_of(scheduler, "direct")
    scheduler.input.append(Write())  # before the pause
    for disturbs in (True, False):
        adapter.pause("keep", 5.0)
        adapter.begin()
        adapter.finish(Version("run", 1, "m", "d"))
        if disturbs:
            scheduler.input.append(Write())
            time.sleep(0.05)
            for step in (adapter.flush, adapter.resume):
                with pytest.raises(LoadError, match="another client sent SGLang a Write during the update"):
                    step()
            assert scheduler.version == UNLABELLED
    assert adapter.flush()
    adapter.resume()
    assert scheduler.version == "run@1"


def test_a_pause_by_another_client_during_an_update_comes_after_it(scheduler: StandInScheduler) -> None:
    scheduler.loop.pause("keep", 5.0)
    scheduler.input.append(Pause())
    time.sleep(0.05)
    scheduler.loop.proceed(5.0)
    end = time.monotonic() + 5.0
    while not scheduler._engine_paused:
        assert time.monotonic() < end
        time.sleep(0.001)
    scheduler.input += [1, Proceed()]  # no update holds these
    until_ended(scheduler, ["finished"])


def test_requests_that_were_held_back_run_when_the_engine_continues_by_itself(scheduler: StandInScheduler) -> None:
    scheduler.loop.pause("abort", 5.0)
    scheduler.input.append(1)
    time.sleep(0.02)
    scheduler._engine_paused = False
    until_ended(scheduler, ["finished"])


def test_a_grammar_that_is_compiled_keeps_no_cache_and_embeddings_of_images_are_dropped(scheduler: StandInScheduler) -> None:
    adapter = adapter_of(scheduler)
    adapter.pause("keep", 5.0)
    scheduler.grammar_manager.grammar_queue.append("a grammar")  # as in another group of data-parallel attention
    assert adapter.flush()
    assert not scheduler.embeddings
    assert scheduler.grammar_manager.grammar_queue == ["a grammar"]


def test_an_abort_finds_a_request_that_was_held_back_and_none_that_came_after_it(scheduler: StandInScheduler) -> None:
    scheduler.loop.pause("keep", 5.0)
    scheduler.input += [100_000, Abort(), 1]
    time.sleep(0.05)
    scheduler.loop.proceed(5.0)
    until_ended(scheduler, ["aborted", "finished"])


def test_an_abort_that_comes_with_the_continuation_finds_a_request_that_was_held_back(scheduler: StandInScheduler) -> None:
    scheduler.loop.pause("keep", 5.0)
    scheduler.input.append(100_000)
    time.sleep(0.05)
    pulled: list[object] = [Abort()]
    scheduler.loop._holding = False
    scheduler.loop.received(pulled)
    assert pulled == [100_000, Abort()]


def test_released_memory_is_taken_again_before_it_is_written_and_before_the_cache_is_dropped(scheduler: StandInScheduler) -> None:
    adapter = adapter_of(scheduler)
    scheduler.weight_updater.offload_tags = {"weights", "kv_cache"}
    adapter.pause("keep", 5.0)
    adapter.wake_weights()
    assert scheduler.weight_updater.wakes == [("weights",)]
    adapter.wake_cache()
    assert scheduler.weight_updater.wakes == [("weights",), ("kv_cache",)]
    adapter.wake_weights()
    assert len(scheduler.weight_updater.wakes) == 2


def test_memory_that_does_not_return_fails_the_update_and_not_the_scheduler(scheduler: StandInScheduler) -> None:
    adapter = adapter_of(scheduler)
    scheduler.weight_updater.offload_tags, scheduler.weight_updater.wake_fails = {"weights"}, True
    adapter.pause("keep", 5.0)
    with pytest.raises(LoadError, match="out of memory"):
        adapter.wake_weights()
    scheduler.weight_updater.wake_fails = False
    adapter.wake_weights()


def test_a_rank_whose_memory_did_not_return_before_it_waited_for_that_says_so_at_once() -> None:
    with StandInScheduler(leads=False) as follower:
        follower.weight_updater.offload_tags, follower.weight_updater.wake_fails = {"weights"}, True
        follower.input.append(Pause())
        follower.loop.pause("keep", 5.0)
        follower.input.append(WakeUp(("weights",)))
        time.sleep(0.05)
        with pytest.raises(LoadError, match="out of memory"):
            follower.loop.wake(["weights"], 0.5)


def test_a_call_runs_only_while_the_engine_is_paused(scheduler: StandInScheduler) -> None:
    with pytest.raises(LoadError, match="continued by another client"):
        scheduler.loop.call(lambda: None, 5.0)
    scheduler.loop.pause("keep", 5.0)
    assert scheduler.loop.call(lambda: 3, 5.0) == 3
    with pytest.raises(ZeroDivisionError):
        scheduler.loop.call(lambda: 1 // 0, 5.0)


def test_the_end_of_the_scheduler_ends_what_waits_for_it(scheduler: StandInScheduler) -> None:
    scheduler.close()
    with pytest.raises(Aborted, match="has ended"):
        scheduler.loop.pause("keep", 5.0)
    with pytest.raises(Aborted, match="has ended"):
        scheduler.loop.call(lambda: None, 5.0)


def test_a_scheduler_that_fails_ends_what_its_pass_carried_and_what_waits() -> None:
    stand_in = SimpleNamespace(
        _engine_paused=False, weight_updater=SimpleNamespace(offload_tags=set()), grammar_manager=SimpleNamespace(grammar_queue=[])
    )
    loop = SchedulerLoop(stand_in, REQUESTS, leads=True)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(loop.pause, "keep", 5.0)]
        while loop._pausing is None:
            time.sleep(0.001)
        loop.received([])
        waiting.append(threads.submit(loop.call, lambda: None, 5.0))
        while not loop._calls:
            time.sleep(0.001)
        with pytest.raises(ZeroDivisionError):
            loop.pass_through(lambda requests: 1 // 0, [])  # type: ignore[arg-type]
        began = time.monotonic()
        loop.close()
        loop.close()
        for ended in waiting:
            with pytest.raises(Aborted, match="has ended"):
                ended.result()
    assert time.monotonic() - began < 2.0


def test_a_rank_that_does_not_lead_sends_nothing_and_sees_the_pause_that_was_broadcast() -> None:
    with StandInScheduler(leads=False) as follower:
        with pytest.raises(DeadlineExceeded, match="did not pause"):
            follower.loop.pause("keep", 0.1)
        follower.input.append(Pause())
        follower.loop.pause("keep", 5.0)
        follower.weight_updater.offload_tags = {"weights"}
        time.sleep(0.05)
        with pytest.raises(DeadlineExceeded, match="memory did not return"):
            follower.loop.wake(["weights"], 0.1)
        follower.input.append(WakeUp(("weights",)))
        follower.loop.wake(["weights"], 5.0)
        follower.input.append(Proceed())
        follower.loop.proceed(5.0)


def test_a_rank_that_rank_0_continued_before_it_was_told_to_resume_has_its_label() -> None:
    with StandInScheduler(leads=False) as follower:
        adapter = adapter_of(follower)
        follower.input.append(Pause())
        adapter.pause("keep", 5.0)
        adapter.begin()
        adapter.load((spec.name, torch.ones(spec.shape)) for spec in adapter.manifest())
        adapter.finish(Version("run", 1, "m", "d"))
        assert adapter.flush()
        follower.input.append(Proceed())
        follower.loop.proceed(5.0)
        adapter.resume()
        assert follower.version == "run@1"


def test_a_rank_that_pulls_nothing_and_a_pass_without_requests_change_nothing() -> None:
    stand_in = SimpleNamespace(_engine_paused=False, weight_updater=SimpleNamespace(offload_tags=set()), is_fully_idle=lambda: True)
    loop = SchedulerLoop(stand_in, REQUESTS, leads=True)
    loop.received(None)
    processed: list[object] = []
    loop.pass_through(processed.extend, [5])
    assert processed == [5]


def test_an_engine_is_labelled_with_the_version_that_it_loaded(scheduler: StandInScheduler) -> None:
    adapter = adapter_of(scheduler)
    adapter.pause("keep", 5.0)
    assert scheduler.version == UNLABELLED
    adapter.begin()
    with pytest.raises(LoadError, match="did not load"):
        adapter.resume()
    with pytest.raises(LoadError, match="3 tensors were not received"):
        adapter.finish(Version("run", 1, "m", "d"))
    adapter.load((spec.name, torch.ones(spec.shape)) for spec in adapter.manifest())
    adapter.finish(Version("run", 1, "m", "d"))
    assert adapter.flush()
    adapter.resume()
    assert scheduler.version == "run@1"
    assert torch.equal(scheduler.model.qk.data, torch.ones(6, 6))


def test_a_loader_that_stops_early_drops_tensors_or_leaves_a_parameter_is_named() -> None:
    model = FusedModel()
    runner: Any = SimpleNamespace(model=model, weight_updater=WeightUpdater())
    model.load_weights = lambda weights: next(iter(weights))  # type: ignore[assignment, method-assign]
    with pytest.raises(LoadError, match=r"stopped before norm\.weight"):
        install(runner, ((spec.name, torch.ones(spec.shape)) for spec in checkpoint().manifest))
    manifest = checkpoint().manifest
    assert gaps_of_loader(FusedModel(), manifest, 1, {}) is None
    more = Manifest([*manifest, TensorSpec("bias", (6,), "float32")])
    assert gaps_of_loader(FusedModel(), more, 1, {}) == "it drops bias"
    assert gaps_of_loader(FusedModel(), more, 2, {}) is None
    fewer = Manifest([spec for spec in manifest if spec.name != "norm.weight"])
    assert gaps_of_loader(FusedModel(), fewer, 2, {}) == "it does not fill norm"


def test_only_the_padding_of_a_vocabulary_may_stay_unfilled() -> None:
    class Padded(FusedModel):
        rows: ClassVar[dict[str, slice]] = {"q.weight": slice(0, 4), "k.weight": slice(4, 6)}

        def __init__(self) -> None:
            super().__init__()
            self.qk = torch.nn.Parameter(torch.randn(9, 6))

        def by_checkpoint(self) -> dict[str, torch.Tensor]:
            return {name: self.qk.data[rows] for name, rows in self.rows.items()} | {"norm.weight": self.norm.data}

    class Skipping(Padded):
        rows: ClassVar[dict[str, slice]] = {"q.weight": slice(0, 4), "k.weight": slice(7, 9)}

    manifest, padding = checkpoint().manifest, {"qk": [slice(6, 9)]}
    assert gaps_of_loader(Padded(), manifest, 2, padding) is None
    assert gaps_of_loader(Padded(), manifest, 2, {}) == "it does not fill qk"
    assert gaps_of_loader(Skipping(), manifest, 2, padding) == "it does not fill qk"


@pytest.mark.parametrize(
    ("tokens", "padded", "added", "padded_added", "expected"),
    [(4, 4, 0, 0, []), (3, 4, 0, 0, [3]), (0, 4, 0, 0, [0, 1, 2, 3]), (3, 4, 1, 2, [3, 5]), (4, 4, 2, 4, [6, 7])],
)
def test_padding_is_what_neither_the_checkpoints_tokens_nor_added_ones_take(
    tokens: int, padded: int, added: int, padded_added: int, expected: list[int]
) -> None:
    indices = SimpleNamespace(
        num_org_elements=tokens, num_org_elements_padded=padded, num_added_elements=added, num_elements_padded=padded + padded_added
    )
    assert [row for rows in rows_of_padding(indices) for row in range(padded + padded_added)[rows]] == expected


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"enable_eplb": True}, "--enable-eplb is True"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts is 2"),
        ({"uno_lora_path": "an adapter"}, "UNO's adapter"),
        ({"weight_cache_mode": "daemon"}, "weight-cache daemon"),
        ({"hicache_storage_backend": "file"}, "would outlive the weights"),
        ({"enable_hierarchical_cache": True}, "copies to host memory do not end"),
        ({"enable_streaming_session": True}, "a session keeps its keys and values"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode is 'decode'"),
        ({"decoupled_spec_role": "verifier"}, "the draft model of another server"),
        ({"input_blocker": object()}, "SGLANG_ENABLE_COLOCATED_BATCH_GEN is set"),
        ({"device": "meta"}, "the model is on the device meta"),
        ({"offload_group_size": 2}, "--offload-group-size is 2: weights are moved"),
        ({"pp_size": 2}, "--pipeline-parallel-size is 2"),
        (
            {"quantization": "awq"},
            "the model is quantized (awq): only fp8 and compressed-tensors are supported. Serve a checkpoint in",
        ),
        ({"quantization": "fp8", "checkpoint": None}, "--quantization is 'fp8': SGLang quantizes on loading"),
        ({"quantization": "fp8", "enable_lora": True}, "--enable-lora with a quantized model (fp8) was not tested"),
        ({"quantization": "fp8"}, "the model is quantized (fp8), and SGLang made it without the plugin"),
        ({"draft": [("draft", None)]}, "--speculative-algorithm is 'EAGLE'"),
    ],
)
def test_settings_that_exclude_updates_are_named(changed: dict[str, object], reason: str) -> None:
    settings: dict[str, object] = {
        "pp_size": 1, "init_expert_location": "trivial", "weight_cache_mode": "off", "disaggregation_mode": "null",
        "speculative_algorithm": "EAGLE", "enable_lora": False,
    } | changed  # fmt: skip
    described = SimpleNamespace(quantization_config=settings.pop("checkpoint", {"quant_method": "fp8"}))
    config = SimpleNamespace(quantization=settings.pop("quantization", None), hf_config=described)
    runners, blocker, device = settings.pop("draft", None), settings.pop("input_blocker", None), settings.pop("device", "cpu")
    model = torch.nn.Linear(1, 1, device=str(device))
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(**settings),
        request_receiver=SimpleNamespace(input_blocker=blocker),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model_config=config, model=model)),
        draft_worker=None if runners is None else SimpleNamespace(weight_update_runners=lambda: runners),
    )
    assert reason in str(why_refused(scheduler))


def test_an_idle_loop_leaves_the_interpreter_to_other_threads_and_a_busy_one_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, waits = SimpleNamespace(_engine_paused=False, last_batch=None, weight_updater=WeightUpdater()), list[float]()
    with SchedulerLoop(scheduler, REQUESTS, leads=True) as loop:
        monkeypatch.setattr(loop._changed, "wait", waits.append)
        loop.pass_through(lambda requests: None, [])
        assert waits
        assert max(waits) <= 0.001  # what a request may wait for
        waits.clear()
        loop.pass_through(lambda requests: None, [7])
        scheduler.last_batch = "decoding"
        loop.pass_through(lambda requests: None, [])
        assert not waits
