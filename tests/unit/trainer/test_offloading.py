"""A trainer that copies its shards keeps none of their memory alive between publications, so a program may offload it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weightsync.protocol.messages import Place, Placed
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import ShardOptions
from weightsync.tensors.quantization import formats_by_pattern
from weightsync.tensors.shards import FollowedShards
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.hostinfo import this_host
from weightsync.transports.registry import transport

SECONDS = 20.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)


def in_new_memory(parameter: torch.Tensor) -> weakref.ref[Any]:
    """Give a parameter a copy of its memory, and return a reference to that, which is dead once nobody holds it."""
    memory = parameter.detach().numpy().copy().view(np.ndarray)
    parameter.data = torch.from_numpy(memory)
    return weakref.ref(memory)


def publish(role: TrainerRole, number: int, model: nn.Module, *, alive: weakref.ref[Any] | None = None) -> None:
    role.arm(number, number)
    try:
        assert alive is None or alive() is not None
        assert isinstance(role.handle(Place(number, call=number), SECONDS), Placed)
    finally:
        role.disarm()
    placed = torch.from_numpy(role.region.payload.copy()).view(torch.float32)  # type: ignore[union-attr]
    assert torch.equal(placed[:64], torch.cat([p.detach().flatten() for p in model.parameters()])[:64])


@pytest.mark.parametrize("published", [0, 1, 3])
def test_memory_that_a_program_offloads_is_free_at_once(published: int) -> None:
    model = Model()
    held = in_new_memory(model.first.weight)
    role = TrainerRole(model, ReaderAccess([transport("inproc")], b"k" * 32, this_host()))
    try:
        for number in range(published):
            publish(role, number, model, alive=held)
        gc.collect()
        gc.disable()
        assert held() is not None
        later = in_new_memory(model.first.weight)
        assert held() is None, "the trainer keeps memory alive that the program has left"
        publish(role, 7, model, alive=later)  # it is followed
        with torch.no_grad():
            model.first.weight.fill_(3.0)
        publish(role, 8, model, alive=later)
        model.first.weight.data = torch.zeros(8, 8)
        assert later() is None
    finally:
        gc.enable()
        role.close()


def test_a_trainer_that_quantizes_keeps_none_either() -> None:
    model = Model()
    held = in_new_memory(model.first.weight)
    role = TrainerRole(
        model, ReaderAccess([transport("inproc")], b"k" * 32, this_host()),
        ShardOptions(quantize=lambda manifest: formats_by_pattern(manifest, {"first.weight": "fp8-block"})),
    )  # fmt: skip
    try:
        for number, value in ((1, 2.0), (2, 3.0)):
            with torch.no_grad():
                model.first.weight.fill_(value)
            role.arm(number, number)
            try:
                assert isinstance(role.handle(Place(number, call=number), SECONDS), Placed)
            finally:
                role.disarm()
            shards = dict(zip([spec.name for spec in role.manifest], role.layout.offset.tolist(), strict=True))
            scale = torch.from_numpy(role.region.payload.copy())[shards["first.weight_scale_inv"] :][:4]  # type: ignore[union-attr]
            assert float(scale.view(torch.float32)) == pytest.approx(value / 448)
            later = in_new_memory(model.first.weight)
            assert held() is None, "the trainer keeps memory alive that the program has left"
            held = later
    finally:
        role.close()


def test_memory_stays_alive_from_the_look_to_the_end_of_the_copy() -> None:
    model = Model()
    role = TrainerRole(model, ReaderAccess([transport("inproc")], b"k" * 32, this_host()))
    try:
        held = in_new_memory(model.first.weight)
        role.arm(1, 1)
        model.first.weight.data = torch.zeros(8, 8)
        gc.collect()
        assert held() is not None, "the copy of another thread may be about to read it"
        role.disarm()
        assert held() is None
    finally:
        role.close()


@pytest.mark.parametrize("parts", [True, False])
def test_parts_that_a_hook_hands_out_are_the_same_parts_again(parts: bool) -> None:
    model = nn.Linear(8, 8, bias=False)
    if not parts:
        state: Any = {"a": model.weight, "b": model.weight.detach().clone()}
    else:
        state = model
        model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, held, prefix, __: held.update(upper=held["weight"][:4], lower=held.pop("weight")[4:])
        )
    followed = FollowedShards(state)
    before = [(shard.name, shard.tensor.data_ptr(), shard.tensor.stride(), shard.tensor.clone()) for shard in followed.now()[1]]
    first = followed.now()[1]
    followed.release()
    again = followed.now()[1]
    assert again is first, "nothing is computed anew"
    for shard, (name, address, strides, values) in zip(again, before, strict=True):
        assert (shard.name, shard.tensor.data_ptr(), shard.tensor.stride()) == (name, address, strides)
        assert torch.equal(shard.tensor, values) and not shard.tensor.requires_grad
