"""What an engine's program does with its parameters while rounds come: the version goes where they are, or is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
from tests.unit.engine.test_aborts import at
from tests.unit.engine.test_update import SECONDS, Half, Stage, Watched
from torch import nn

from weightsync import failpoints
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, PlanMismatch
from weightsync.protocol.messages import Prepare, Updated
from weightsync.tensors.shards import FollowedShards, Shard, shard


class Fresh(Watched):
    """Declares its live parameters anew each time, as the guide for adapters shows, and holds nothing."""

    def shards(self) -> Sequence[Shard]:
        return [shard(name, value, value.shape, (0, 0)) for name, value in self.module.named_parameters()]


@pytest.fixture(params=[Watched, Fresh])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """An engine that serves version 1 and is ready for version 2."""
    with ExitStack() as owned:
        stage = Stage(request.param(nn.Linear(6, 4, bias=False)), owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        assert stage.update(stage.place(1)).committed
        yield stage


def weight(stage: Stage) -> torch.Tensor:
    return dict(stage.adapter.module.named_parameters())["weight"]


def moves(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def is_replaced(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.clone(next(module.parameters()).detach()))


def is_assigned(module: nn.Module) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def is_converted_and_back(module: nn.Module) -> None:
    module.half().float()


def is_a_part_of_a_larger_buffer(module: nn.Module) -> None:
    module.weight.data = torch.zeros(4, 6)[:]


def is_transposed_in_place(module: nn.Module) -> None:
    weight = next(module.parameters())
    weight.data = weight.data.view(6, 4).t()


ACTIONS: list[Callable[[nn.Module], None]] = [moves, is_replaced, is_assigned, is_converted_and_back, is_a_part_of_a_larger_buffer]


def updating(stage: Stage, pool: ThreadPoolExecutor) -> Future[Updated]:
    """Version 2, on its way."""
    torch.nn.init.normal_(stage.source.weight)
    return pool.submit(stage.update, stage.place(2))


@pytest.mark.parametrize("point", ["engine.pausing", "engine.pause", "engine.paused", "engine.move"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_a_version_goes_where_the_parameters_are_when_the_engine_has_stopped(
    stage: Stage, action: Callable[[nn.Module], None], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = weight(stage).detach()
    before = old.clone()
    monkeypatch.setattr(failpoints, "_gate", at(point, lambda: action(stage.adapter.module)))
    with ThreadPoolExecutor(1) as pool:
        assert updating(stage, pool).result(SECONDS).committed
    assert torch.equal(weight(stage), stage.source.weight)
    assert torch.equal(old, before), "memory that the program has taken away is its own"


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_parameters_that_move_in_the_request_that_the_round_waits_for(
    stage: Stage, action: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, waits = stage.adapter, threading.Event()
    monkeypatch.setattr(failpoints, "_gate", at("engine.pause", waits.set))
    with ThreadPoolExecutor(1) as pool:
        with adapter.in_use():
            coming = updating(stage, pool)
            assert waits.wait(SECONDS)
            action(adapter.module)
        assert coming.result(SECONDS).committed
    with adapter.in_use() as version:
        assert version is not None and version.number == 2
        assert torch.equal(weight(stage), stage.source.weight)


@pytest.mark.parametrize("point", ["engine.pause", "engine.paused", "engine.move"])
def test_parameters_that_are_read_in_another_way_are_never_labelled(
    stage: Stage, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = weight(stage).detach()
    before = old.clone()
    monkeypatch.setattr(failpoints, "_gate", at(point, lambda: is_transposed_in_place(stage.adapter.module)))
    with ThreadPoolExecutor(1) as pool:
        coming = updating(stage, pool)
        with pytest.raises(PlanMismatch, match=r"restart this rank's weightsync\.Engine"):
            coming.result(SECONDS)
    assert stage.engine.session.served_version is None
    assert stage.adapter.said[-1] != "resume"
    assert torch.equal(old, before)


def test_what_is_written_is_held_from_the_first_look_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a mistake is never a write to freed memory, or to what torch has put there since."""
    with ExitStack() as owned:
        stage = Stage(Fresh(nn.Linear(6, 4, bias=False)), owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        alive: list[bool] = []

        def check() -> None:
            held = stage.engine._held
            assert held is not None
            alive.append(held[0].tensor.data_ptr() == weight(stage).data_ptr())

        monkeypatch.setattr(failpoints, "_gate", at("engine.move", check))
        assert stage.update(stage.place(1)).committed
        assert alive == [True]
        assert stage.engine._held is None, "between rounds the memory is the engine's alone: it may offload it"


@pytest.mark.parametrize(("adapter", "looks"), [(Watched, 0), (Fresh, 1)])
def test_memory_of_an_adapter_that_follows_is_compared_once(
    adapter: type[Watched], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list says that nothing moved. Comparing ten thousands of tensors would take half of a pause."""
    with ExitStack() as owned:
        stage = Stage(adapter(nn.Linear(6, 4, bias=False)), owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        assert stage.update(stage.place(1)).committed
        assert stage.engine._memory is not None
        views = stage.engine._memory.views
        compare = Mock(wraps=views.are_of)
        monkeypatch.setattr(views, "are_of", compare)
        torch.nn.init.normal_(stage.source.weight)
        assert stage.update(stage.place(2)).committed
        assert compare.call_count == looks
        assert torch.equal(weight(stage), stage.source.weight)


def test_the_look_while_a_device_copies_is_a_comparison_only_if_the_list_is_another(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 37,491 tensors of an FP8 model a comparison took longer than the copy that it ran beside."""
    seen: list[bool] = []

    def look() -> None:
        stage.engine._held = stage.engine.session.shards("follow")
        memory = stage.engine._memory
        assert memory is not None
        with monkeypatch.context() as patched:
            quick, whole = Mock(wraps=memory.views.are_at), Mock(wraps=memory.views.are_of)
            patched.setattr(memory.views, "are_at", quick)
            patched.setattr(memory.views, "are_of", whole)
            stage.engine._check_memory()
            seen.extend((quick.called, whole.called))
        moves(stage.adapter.module)
        with pytest.raises(PlanMismatch, match="rebuilt its parameters"):
            stage.engine._check_memory()

    monkeypatch.setattr(failpoints, "_gate", at("engine.move", look))
    assert stage.update(stage.place(2)).committed
    assert seen == [not stage.adapter.follows, False]


def test_a_refused_round_leaves_no_memory_that_was_not_compared(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_gate", at("engine.paused", lambda: is_transposed_in_place(stage.adapter.module)))
    with pytest.raises(PlanMismatch, match=r"restart this rank's weightsync\.Engine"):
        stage.update(stage.place(2))
    assert stage.engine._held is None


def test_the_memory_of_an_adapter_that_offloads_is_free_between_rounds() -> None:
    with ExitStack() as owned:
        stage = Stage(Fresh(nn.Linear(6, 4, bias=False)), owned)
        stage.engine.handle(Prepare(stage.plan()), SECONDS)
        assert stage.update(stage.place(1)).committed
        del stage.adapter._followed  # of the class that this one derives from
        gone = weakref.ref(weight(stage))
        stage.adapter.module.weight = nn.Parameter(torch.zeros(4, 6))
        gc.collect()
        assert gone() is None
        assert stage.update(stage.place(2)).committed
        assert torch.equal(weight(stage), stage.source.weight)


def test_a_module_is_not_looked_at_while_it_is_in_use(stage: Stage) -> None:
    adapter = stage.adapter
    if isinstance(adapter, Fresh):
        pytest.skip("its own shards()")
    looked = threading.Event()
    adapter.module.register_state_dict_pre_hook(lambda *_: looked.set())  # type: ignore[no-untyped-call]
    before = adapter.shards()
    with adapter.in_use():
        moves(adapter.module)
        assert adapter.shards() is before
        assert adapter.manifest() is not None
        assert not looked.is_set(), "the hooks of a state dict change a module"
    assert adapter.shards() is not before
    assert looked.is_set()


def test_a_module_cannot_be_entered_while_it_is_looked_at(stage: Stage) -> None:
    adapter = stage.adapter
    if isinstance(adapter, Fresh):
        pytest.skip("its own shards()")
    moves(adapter.module)
    entered = threading.Event()

    def enter() -> None:
        with adapter.in_use():
            entered.set()

    def hooked(*_: object) -> None:
        pool.submit(enter)
        assert not entered.wait(0.1)

    adapter.module.register_state_dict_pre_hook(hooked)  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(1) as pool:
        adapter.shards()
        assert entered.wait(SECONDS)


def has_its_bias_elsewhere(tree: Tree) -> None:
    tree.head.bias = nn.Parameter(torch.zeros(3))
    setattr(tree.blocks[0], "bias", None)  # noqa: B010


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.head = nn.Linear(3, 3, bias=False)
        self.register_buffer("steps", torch.zeros(3))


CHANGES: dict[str, Callable[[Tree], object]] = {
    "a parameter's memory": lambda tree: moves(tree.head),
    "a parameter": lambda tree: is_replaced(tree.blocks[1]),
    "a layer": lambda tree: setattr(tree, "head", nn.Linear(3, 3, bias=False)),
    "a layer of a list": lambda tree: tree.blocks.__setitem__(2, nn.Linear(3, 3)),
    "a layer's bias": lambda tree: setattr(tree.blocks[0], "bias", None),
    "no bias, but one elsewhere": has_its_bias_elsewhere,
    "a tie": lambda tree: setattr(tree.head, "weight", tree.blocks[0].weight),
    "the order of a matrix": lambda tree: setattr(tree.head.weight, "data", tree.head.weight.data.t()),
    "a buffer": lambda tree: setattr(tree, "steps", torch.ones(3)),
    "all of it": lambda tree: tree.double().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_quick_look_finds_what_a_look_finds(change: str) -> None:
    tree = Tree()
    followed = FollowedShards(tree, include_buffers=True)
    before = followed.now_quickly()
    assert followed.now_quickly() is before is followed.last
    CHANGES[change](tree)
    assert followed.last is before
    after = followed.now_quickly()
    assert after is not before
    assert after is followed.now()
    assert [shard.tensor.data_ptr() for shard in after[1]] == [
        s.tensor.data_ptr() for s in FollowedShards(tree, include_buffers=True).now()[1]
    ]


def test_an_adapter_with_other_shards_does_not_inherit_that_they_are_followed() -> None:
    assert Watched.follows
    assert not Half.follows
    assert not Fresh.follows


def test_one_of_several_ranks_that_cannot_agree_with_the_others_does_not_enter() -> None:
    adapter = ModuleAdapter(nn.Linear(2, 2))
    adapter.replica_ranks = 2  # as weightsync.Engine says
    with pytest.raises(ConfigurationError, match=r"process_group=\.\.\."), adapter.in_use():
        pass
    adapter.replica_ranks = 1
    with adapter.in_use():
        pass
