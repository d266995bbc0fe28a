"""NeMo-RL's refit engine without NeMo-RL: its interface as a protocol, and calls in the order of NeMo-RL's synchronizer."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.nemo_rl.refit_contract import (
    BUCKET_BYTES,
    POLICIES,
    SECONDS,
    WORKERS,
    PolicyModel,
    RefitContract,
    RefitProtocol,
    WorkerModel,
    raised,
    works,
)

from weightsync import releases
from weightsync.config import Address, ServerSettings
from weightsync.errors import ConfigurationError, DeadlineExceeded, MembershipError, WeightSyncError
from weightsync.integrations.nemo_rl import Engine
from weightsync.integrations.nemo_rl.engine import INTERFACE, NAME
from weightsync.integrations.stream_options import Options
from weightsync.protocol.tokens import find_token
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.usefixtures("runtime")]


def make(**options: Any) -> RefitProtocol:
    """As NeMo-RL makes an engine from what the user wrote."""
    module, _, name = NAME.partition(":")
    engine: RefitProtocol = getattr(importlib.import_module(module), name)(
        bucket_size=BUCKET_BYTES, **{"release_after_refit": False, "timeout": SECONDS, **options}
    )
    return engine


class LocalRefits:
    """Policy ranks and workers of this process, each with a thread for a call, and NeMo-RL's order of calls."""

    def __init__(self, **options: Any) -> None:
        self.policies = [(PolicyModel(rank), make(**options)) for rank in range(POLICIES)]
        self.workers = [(WorkerModel(), make(**options)) for _ in range(WORKERS)]
        self.metadata: list[Any] = []
        self.release = bool(options.get("release_after_refit"))
        self._ready = False

    def prepare(self) -> None:
        if self._ready:
            return
        self.metadata = [{**engine.prepare(), "rank": rank} for rank, (_, engine) in enumerate(self.policies)]
        self.metadata += [{**engine.prepare(), "rank": 0} for _, engine in self.workers]
        sizes: Any = {"train_world_size": POLICIES, "rollout_world_size": WORKERS, "metadata": self.metadata}

        def policy(rank: int, engine: RefitProtocol) -> Callable[[], None]:
            return lambda: engine.init_policy_process_group(worker_rank=rank, **sizes)

        def worker(rank: int, engine: RefitProtocol) -> Callable[[], None]:
            return lambda: engine.init_rollout_process_group(rollout_rank=rank, **sizes)

        calls = [policy(rank, engine) for rank, (_, engine) in enumerate(self.policies)]
        self._first_error(self._call(calls + [worker(rank, engine) for rank, (_, engine) in enumerate(self.workers)]))
        self._ready = True

    def sync(self, seed: int) -> None:
        self.prepare()
        self._first_error(self._update(seed))
        if self.release:
            self.shutdown()

    def fail(self, seed: int) -> tuple[list[BaseException], list[BaseException]]:
        self.prepare()
        errors = raised(self._update(seed))
        return errors[:POLICIES], errors[POLICIES:]

    def _update(self, seed: int) -> list[BaseException | None]:
        def send(model: PolicyModel, engine: RefitProtocol) -> Callable[[], None]:
            model.seed = seed
            return lambda: asyncio.run(engine.send_weights(model.weights()))

        async def load(model: WorkerModel, engine: RefitProtocol) -> None:
            model.loaded = {}
            async for batch in engine.receive_weight_batches():
                model.load(batch)

        def receive(model: WorkerModel, engine: RefitProtocol) -> Callable[[], None]:
            return lambda: asyncio.run(load(model, engine))

        return self._call([*(send(*policy) for policy in self.policies), *(receive(*worker) for worker in self.workers)])

    @staticmethod
    def _call(calls: Sequence[Callable[[], None]]) -> list[BaseException | None]:
        with ThreadPoolExecutor(len(calls)) as threads:
            return [future.exception(SECONDS * 2) for future in [threads.submit(call) for call in calls]]

    @staticmethod
    def _first_error(errors: Sequence[BaseException | None]) -> None:
        for error in errors:
            if error is not None:
                raise error

    def set_faults(self, policies: Sequence[str], workers: Sequence[str]) -> None:
        for (policy, _), fault in zip(self.policies, policies, strict=True):
            policy.fault = fault
        for (worker, _), fault in zip(self.workers, workers, strict=True):
            worker.fault = fault

    def loaded(self) -> list[dict[str, str]]:
        return [model.loaded for model, _ in self.workers]

    def walked(self) -> list[bool]:
        return [model.walked for model, _ in self.policies]

    def shutdown(self) -> None:
        for _, engine in [*self.policies, *self.workers]:
            engine.finalize()
        self._ready = False

    def close(self) -> None:
        self.shutdown()
        for _, engine in [*self.policies, *self.workers]:
            engine._closing()  # type: ignore[attr-defined]  # as when the process exits


@pytest.fixture
def refits(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[LocalRefits]:
    local = LocalRefits(**getattr(request, "param", {}))
    try:
        yield local
    finally:
        local.close()


class TestRefits(RefitContract):
    """With the calls of NeMo-RL's synchronizer, made here."""


@pytest.mark.parametrize("refits", [{"release_after_refit": True}], indirect=True)
def test_an_engine_that_is_released_after_each_update_goes_on_counting_versions(refits: LocalRefits) -> None:
    numbers = []
    for seed in range(2):
        works(refits, seed)
        numbers.append(refits.metadata[0]["coordinator"])
    assert numbers[0] == numbers[1]


def test_one_coordinator_is_left_and_what_ranks_tell_each_other_holds_no_token(refits: LocalRefits) -> None:
    refits.prepare()
    offered = [about["coordinator"] for about in refits.metadata]
    tokens = [find_token(Address.parse(url)) for url in offered]
    assert tokens[0] is not None
    assert tokens[1:] == [None] * 3, "coordinators that are not used have ended, and removed their tokens"
    assert tokens[0].reveal() not in str(refits.metadata)


def test_a_coordinator_that_the_user_named_is_used_by_all_ranks(no_leaks: None) -> None:
    with BackgroundServer() as server:
        local = LocalRefits(coordinator=server.url)
        try:
            works(local, 1)
            assert {about["coordinator"] for about in local.metadata} == {server.url}
        finally:
            local.close()


@pytest.mark.rare
def test_a_coordinator_that_is_gone_is_an_error_on_all_ranks_and_its_successor_is_found(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "of-both-coordinators-0123456789")
    first = BackgroundServer(ServerSettings.load({**os.environ, "WEIGHTSYNC_PORT": "0"}))
    first.start()
    local = LocalRefits(coordinator=first.url, timeout=12.0)
    try:
        works(local, 1)
        first.stop()
        policies, workers = local.fail(2)
        assert all(isinstance(error, WeightSyncError) for error in [*policies, *workers]), (policies, workers)
        assert local.walked() == [True] * POLICIES
        with BackgroundServer(ServerSettings.load({**os.environ, "WEIGHTSYNC_PORT": str(first.address.port)})):
            works(local, 3)
            local.close()
    finally:
        local.close()
        first.stop()


def test_where_one_side_cannot_start_a_coordinator_that_of_the_other_is_used(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    with BackgroundServer() as taken:
        monkeypatch.setenv("WEIGHTSYNC_PORT", str(taken.address.port))
        local = LocalRefits()
        try:
            refused = [engine.prepare() for _, engine in local.policies]
            assert all("coordinator" not in about and str(taken.address.port) in str(about["refused"]) for about in refused)
            monkeypatch.setenv("WEIGHTSYNC_PORT", "0")
            offers = [engine.prepare() for _, engine in local.workers]
            with pytest.raises(ConfigurationError, match=str(taken.address.port)):
                local.policies[0][1].init_policy_process_group(
                    worker_rank=0, train_world_size=2, rollout_world_size=0, metadata=refused
                )
            sizes: Any = {"train_world_size": 2, "rollout_world_size": 2, "metadata": [*refused, *offers]}
            local.policies[0][1].init_policy_process_group(worker_rank=0, **sizes)
            local.workers[1][1].init_rollout_process_group(rollout_rank=1, **sizes)
        finally:
            local.close()


def test_an_update_for_which_a_worker_does_not_come_ends_at_the_deadline_on_both_sides(no_leaks: None) -> None:
    local = LocalRefits(timeout=2.0)
    try:
        local.prepare()
        local.workers[1][1].finalize()
        local.workers.pop()
        policies, workers = local.fail(1)
        assert all(isinstance(error, DeadlineExceeded) for error in [*policies, *workers]), (policies, workers)
        assert local.walked() == [True] * POLICIES
    finally:
        local.close()


@pytest.mark.rare
def test_a_policy_rank_that_does_not_walk_is_an_error_on_all_ranks_at_the_deadline_and_says_what_to_restart(no_leaks: None) -> None:
    local = LocalRefits(timeout=2.0)
    try:
        works(local, 1)
        local.set_faults(["", "stop"], ["", ""])
        policies, workers = local.fail(2)
        assert all(isinstance(error, DeadlineExceeded) for error in policies), policies
        assert all(isinstance(error, WeightSyncError) for error in workers), workers
        model, engine = local.policies[1]
        with pytest.raises(ConfigurationError, match="restart the policy ranks"):
            asyncio.run(engine.send_weights(model.weights()))
    finally:
        local.policies[1][0].released.set()
        local.close()


def test_two_workers_of_one_name_are_refused_by_every_rank() -> None:
    policy, worker = make(), make()
    offers = [{**policy.prepare(), "coordinator": "http://127.0.0.1:7400", "seconds": 5.0}, worker.prepare(), worker.prepare()]
    with pytest.raises(MembershipError, match="two rollout ranks have one name"):
        policy.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=2, metadata=offers)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dtyp": "bfloat16"}, "dtyp"), ({"timeout": 0}, "timeout"), ({"shard_expert_weights": "yes"}, "shard_expert_weights")],
)
def test_a_wrong_option_is_an_error_that_says_where_it_was_given(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"refit_cfg\['{NAME}'\].*{words}"):
        make(**options)


@pytest.mark.parametrize(
    "metadata",
    [[], [{"name": "a"}], ["a", "b"], [{"name": "a", "host": "h"}, {"name": "b", "host": "h"}]],
    ids=["none", "too few", "of another class", "without a coordinator"],
)
def test_metadata_that_is_not_of_this_engine_on_all_ranks_is_refused(metadata: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"metadata of|no rank offers"):
        make().init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata)


def test_the_page_names_the_class_and_its_options() -> None:
    yaml = pytest.importorskip("yaml")
    page = (Path(__file__).parents[3] / "docs/integrations/nemo_rl.md").read_text()
    lines, example = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for config in (lines, example):
        generation = config["policy"]["generation"]
        assert generation["refit_transport"] == NAME
        make(**generation["refit_cfg"][NAME])
    options = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", page.split("## Options")[1].split("##")[0], re.MULTILINE)
    own = {"shard_expert_weights", "release_after_refit", "update_weights_bucket_memory_ratio"}
    assert set(options) == {*Options.__struct_fields__, *own}


def test_the_engine_has_every_argument_of_the_protocol() -> None:
    for name, method in inspect.getmembers(RefitProtocol, inspect.isfunction):
        if not name.startswith("_"):
            wanted, own = inspect.signature(method).parameters, inspect.signature(getattr(Engine, name)).parameters
            assert list(own)[: len(wanted)] == list(wanted), name
            assert all(more.default is not more.empty for more in list(own.values())[len(wanted) :]), (
                f"{name}: NeMo-RL gives no more"
            )


def test_an_unknown_release_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    newer = types.ModuleType("nemo_rl")
    newer.__dict__["__version__"] = "1.7.0+abc"
    monkeypatch.setitem(sys.modules, "nemo_rl", newer)
    releases.warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "weightsync"):
        releases.warn_if_untested("nemo_rl")
        releases.warn_if_untested("nemo_rl")
    assert ["1.7.0+abc" in record.message for record in caplog.records] == [True]


def test_an_interface_that_asks_for_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(RefitProtocol):
        def rebalance(self, experts: int) -> None: ...

        def init_policy_process_group(  # type: ignore[override]
            self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any], epoch: int
        ) -> None: ...

    monkeypatch.setattr(Newer, "__abstractmethods__", frozenset({"rebalance", "prepare", "init_policy_process_group"}))
    base = types.ModuleType(INTERFACE)
    base.__dict__["CheckpointEngine"] = Newer
    monkeypatch.setitem(sys.modules, INTERFACE, base)
    with pytest.raises(ConfigurationError, match=r"calls init_policy_process_group\(epoch\), rebalance\(self\), .*experts"):
        make()


@pytest.mark.skipif("nemo_rl" in sys.modules, reason="NeMo-RL is here")
def test_the_check_says_that_nemo_rl_is_missing_and_fails() -> None:
    command = [sys.executable, "-m", "weightsync.integrations", "nemo_rl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "missing  nemo_rl" in done.stdout
