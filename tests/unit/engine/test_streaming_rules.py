"""What an engine rank allows a plan to take for staging, and that nothing it opened is left behind: without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.fill.streamed import bucket_bytes_for
from weightsync.engine.read_back import ReadBack
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import Aborted, ConfigurationError, LayoutError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync.planning.buckets import staging_layout
from weightsync.protocol.messages import Delivery, Move, PlanSlice, Prepare
from weightsync.tensors.shards import shards_of
from weightsync.tensors.staging import Staging, check_size
from weightsync.transports.hostinfo import this_host
from weightsync_disaggregated.rank import DisaggregatedRank

MANIFEST = Manifest([TensorSpec(f"t{index}", (4, 100), "float32") for index in range(6)])


def test_a_bucket_that_is_larger_than_this_rank_allows_is_refused_before_anything_is_allocated() -> None:
    check_size(MANIFEST, staging_layout(MANIFEST, 4096), 4096)
    check_size(MANIFEST, staging_layout(MANIFEST, 1), 1)  # a tensor larger than a bucket has one of its own size
    with pytest.raises(LayoutError, match="allows 1,600 bytes"):
        check_size(MANIFEST, staging_layout(MANIFEST, 4096), 1)
    honest = staging_layout(MANIFEST, 4096)
    columns = (honest.tensor, honest.starts, honest.stops, honest.region, honest.offset, honest.strides)
    for regions in ((1 << 50, *honest.regions[1:]), (*honest.regions, *(1 << 11 for _ in range(9)))):
        forged = Layout(MANIFEST, *columns, tuple(regions))
        with pytest.raises(LayoutError, match="the plan asks for"):
            check_size(MANIFEST, forged, 4096)


def test_one_buffer_costs_half_and_lends_the_same_tensors() -> None:
    layout = staging_layout(MANIFEST, 4096)
    one, two = Staging(MANIFEST, layout, buffers=1), Staging(MANIFEST, layout)
    assert (one.buffers, two.buffers) == (1, 2)
    assert one.nbytes == max(layout.regions) < two.nbytes
    assert set(one.addresses) == {one.addresses[0]}
    for bucket in range(one.buckets):
        assert [name for name, _ in one.tensors(bucket)] == [name for name, _ in two.tensors(bucket)]
        first, again = one.tensors(bucket), one.tensors(bucket)
        assert all(a[1] is b[1] for a, b in zip(first, again, strict=True))  # views are made once


def test_bucket_size_rule_in_host_memory() -> None:
    assert bucket_bytes_for(None) == bucket_bytes_for(torch.device("cpu")) == 256 << 20


def _plan() -> PlanSlice:
    """A plan that no rank accepts; what is looked at here comes before its pieces."""
    layout = staging_layout(MANIFEST, 1 << 20).to_columns()
    from weightsync.protocol.messages import PieceColumns

    nothing = PieceColumns(
        rows=0, dims=MANIFEST.dims, source=b"", source_region=b"", source_offset=b"", source_strides=b"", target_row=b"",
        starts=b"", stops=b"",
    )  # fmt: skip
    return PlanSlice(digest="0" * 32, delivery="streamed", reason="", sources=(), layout=layout, pieces=nothing, nbytes=0)


def test_a_plan_for_larger_buckets_than_this_rank_allows_is_refused() -> None:
    role = EngineRole(Slow(), ["inproc"], this_host(), bucket_bytes=2048)
    with pytest.raises(LayoutError, match="this engine rank allows 2,048 bytes"):
        role.handle(Prepare(_plan()), 10)
    role.close()


class Slow(EngineAdapter):
    """Hangs where a call looks at its parameters, until it is let go."""

    def __init__(self) -> None:
        self.entered, self.leave, self.hang = threading.Event(), threading.Event(), False

    def manifest(self) -> Manifest:
        return MANIFEST

    def shards(self) -> None:
        if self.hang:
            self.entered.set()
            self.leave.wait(20)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...


def test_closing_while_a_call_hangs_leaves_nothing_when_it_ends() -> None:
    adapter = Slow()
    role = EngineRole(adapter, ["inproc"], this_host())
    adapter.hang = True
    failed: list[BaseException] = []

    def prepare() -> None:
        try:
            role.handle(Prepare(_plan()), 10)
        except Exception as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    assert adapter.entered.wait(10)
    role.close(timeout=0.1)  # gives up waiting, and says so by returning
    adapter.leave.set()
    thread.join(10)
    assert not thread.is_alive()
    assert failed
    assert role._filler is None
    assert role._preparing is None
    with pytest.raises(Aborted, match="was closed"):
        role.handle(Move(1), 1)


def test_reading_back_needs_whole_tensors_and_follows_memory() -> None:
    module = torch.nn.Linear(8, 4)
    manifest, shards = shards_of(module)
    read = ReadBack(manifest)
    before = read.digests(shards, Deadline(10))
    assert before is not None
    assert before[0].tolist() == list(range(len(manifest)))
    with torch.no_grad():
        module.weight.add_(1)
    after = read.digests(shards, Deadline(10))
    assert after is not None
    assert (before[1] != after[1]).any()
    module.weight.data = torch.zeros(4, 8)
    moved = read.digests(shards_of(module)[1], Deadline(10))
    assert moved is not None
    assert (moved[1] != after[1]).any()
    assert not read.look(None)


class OnlyWritten(ModuleAdapter):
    """Has no loader of its own."""

    can_load = False


class Nowhere(OnlyWritten):
    """Says neither where its parameters are, nor loads any."""

    def shards(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(("adapter", "delivery"), [(OnlyWritten, "streamed"), (Nowhere, "auto"), (Nowhere, "streamed")])
def test_an_engine_that_cannot_take_what_it_asks_for_does_not_join(adapter: type[ModuleAdapter], delivery: Delivery) -> None:
    with pytest.raises(ConfigurationError, match=r"has no load\(\)"):
        Engine(adapter(torch.nn.Linear(2, 2)), "r", "http://127.0.0.1:1", delivery=delivery)


def test_a_plan_that_streams_to_an_engine_without_a_loader_is_refused_before_it_is_paused() -> None:
    """Other ranks of its replica may have no layout, and then all are streamed to."""
    role = EngineRole(OnlyWritten(torch.nn.Linear(2, 2)), None, this_host())
    with pytest.raises(ConfigurationError, match=r"has no load\(\)"):
        role.handle(Prepare(_plan()), 5)
    role.close()


@pytest.mark.parametrize("draft", [False, True])
def test_updates_from_outside_need_a_loader(draft: bool) -> None:
    adapters = [ModuleAdapter(torch.nn.Linear(2, 2)), OnlyWritten(torch.nn.Linear(2, 2))]
    with pytest.raises(ConfigurationError, match=r"load\(\)"):
        DisaggregatedRank(*adapters) if draft else DisaggregatedRank(adapters[1])


@pytest.mark.parametrize("buffers", [0, 3])
def test_the_number_of_staging_buckets_is_checked(buffers: int) -> None:
    from weightsync.engine.engine import Engine

    with pytest.raises(ConfigurationError, match="staging_buckets must be 1 or 2"):
        Engine(ModuleAdapter(torch.nn.Linear(2, 2)), "r", "http://127.0.0.1:1", token="t" * 40, staging_buckets=buffers)


def test_module_takes_the_bits_of_a_nan() -> None:
    module = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    odd = torch.full((4, 4), 0x7FA5, dtype=torch.int16).view(torch.bfloat16)
    adapter = ModuleAdapter(module)
    adapter.pause("abort", 1)
    adapter.load([("weight", odd)])
    assert torch.equal(module.weight.detach().view(torch.int16), odd.view(torch.int16))
