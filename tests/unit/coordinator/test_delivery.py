"""Holds how direct or streamed delivery is chosen: what ranks ask for and offer, and from where GPU memory can be written."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import structs
from tests.hellos import said
from tests.unit.coordinator.contents import MANIFEST, rows_layout

from weightsync.coordinator.negotiation import choose_delivery, key_of
from weightsync.coordinator.ranks import EngineRank, TrainerRank
from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import Delivery, Host, Offer, Traits
from weightsync.transports.registry import transport

HERE, THERE = Host("here", "memory"), Host("there", "memory")


def trainer(rank: int, *schemes: str, host: Host = HERE) -> TrainerRank:
    offers = tuple(Offer(scheme, "somewhere", host, transport(scheme).traits) for scheme in schemes)
    return TrainerRank(said("trainer", rank, 2, host, offers=offers), MANIFEST, rows_layout(MANIFEST, rank, 2))


def engine(
    rank: int = 0, *, layout: bool = True, delivery: Delivery = "auto", why: str = "", on_gpu: bool = False,
    transports: tuple[str, ...] = ("cuda_ipc", "tcp"),
) -> EngineRank:  # fmt: skip
    hello = said("vllm", rank, 2, HERE, transports=transports, delivery=delivery, no_layout=why, device_memory=on_gpu)
    return EngineRank(hello, MANIFEST, rows_layout(MANIFEST, rank, 2) if layout else None)


def chosen(trainers: list[TrainerRank], engines: list[EngineRank]) -> tuple[str, str]:
    return choose_delivery({one.member: one for one in trainers}, {one.member: one for one in engines})


def test_direct_where_every_rank_offers_a_layout() -> None:
    assert chosen([trainer(0, "tcp")], [engine(0), engine(1)])[0] == "direct"
    assert chosen([trainer(0, "tcp")], [engine(0, delivery="streamed")])[0] == "streamed"
    delivery, reason = chosen([trainer(0, "tcp")], [engine(0), engine(1, layout=False, why="the model is quantized (fp8)")])
    assert (delivery, reason) == ("streamed", "auto: no layout from vllm/1 (the model is quantized (fp8))")
    with pytest.raises(ConfigurationError, match="vllm/0 offers none"):
        chosen([trainer(0, "tcp")], [engine(0, layout=False, delivery="direct")])


@pytest.mark.parametrize(
    ("trainers", "delivery"),
    [
        ([trainer(0, "cuda_ipc"), trainer(1, "cuda_ipc")], "direct"),
        ([trainer(0, "cuda_ipc"), trainer(1, "tcp")], "streamed"),
        ([trainer(0, "shared_memory", "tcp")], "streamed"),
        ([trainer(0, "cuda_ipc"), trainer(1, "cuda_ipc", host=THERE)], "streamed"),
    ],
)
def test_gpu_memory_is_written_only_from_gpus_of_its_host(trainers: list[TrainerRank], delivery: str) -> None:
    found, reason = chosen(trainers, [engine(0, on_gpu=True), engine(1, on_gpu=True)])
    assert found == delivery, reason
    assert ("trainer/" in reason) == (delivery == "streamed")
    assert chosen(trainers, [engine(0)])[0] == "direct"  # host memory takes from anywhere
    assert chosen(trainers, [engine(0, on_gpu=True, delivery="direct")])[0] == "direct"  # asked for


def test_nccl_writes_gpu_memory_of_other_hosts_where_both_sides_allow_it() -> None:
    there = [trainer(0, "cuda_ipc", "nccl"), trainer(1, "nccl", host=THERE)]
    assert chosen(there, [engine(0, on_gpu=True, transports=("cuda_ipc", "nccl"))])[0] == "direct"
    assert chosen(there, [engine(0, on_gpu=True)])[0] == "streamed"
    assert chosen([trainer(0, "tcp")], [engine(0, on_gpu=True, transports=("nccl", "tcp"))])[0] == "streamed"


@pytest.mark.parametrize(
    ("traits", "host", "delivery"),
    [
        (Traits(writes=("host", "cuda"), reach="network"), THERE, "direct"),
        (Traits(writes=("host", "cuda"), reach="host"), HERE, "direct"),
        (Traits(writes=("host", "cuda"), reach="host"), THERE, "streamed"),
        (Traits(writes=("host",), reach="network"), HERE, "streamed"),
    ],
)
def test_a_transport_that_nobody_knows_is_chosen_by_its_traits(traits: Traits, host: Host, delivery: str) -> None:
    source = trainer(0, host=host)
    hello = structs.replace(source.hello, offers=(Offer("rdma", "somewhere", host, traits),))
    source = dataclasses.replace(source, hello=hello)
    assert chosen([source], [engine(0, on_gpu=True, transports=("rdma",))])[0] == delivery


def test_a_plan_is_made_anew_when_that_changes() -> None:
    one, other = engine(on_gpu=True), engine()
    assert key_of({}, {"e": one}) != key_of({}, {"e": other})
