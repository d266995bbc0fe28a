"""Loader tracing case by case: what is followed, what is named and why, what is refused, and how shards lie in real memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import LayoutError, LoadError
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tracing.tracer import ShardsByTracing, Traced, trace_loader

Item = tuple[str, torch.Tensor]
Store = Callable[[torch.Tensor, torch.Tensor], object]

W = Manifest([TensorSpec("w", (6, 4), "float32")])
PAIR = Manifest([TensorSpec("a", (6, 4), "float32"), TensorSpec("b", (6, 4), "float32")])


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def traced_by(store: Store, *shape: int, dtype: torch.dtype = torch.float32, manifest: Manifest = W, **options: Any) -> Traced:
    """A loader that does ``store(parameter, tensor)`` with every tensor, into one parameter ``p``."""
    parameter = meta(*shape, dtype=dtype)

    def load(tensors: Iterable[Item]) -> None:
        for _, tensor in tensors:
            store(parameter, tensor)

    return trace_loader(load, {"p": parameter}, manifest, **options)


@pytest.mark.parametrize(
    "store",
    [
        lambda p, w: p.copy_(w),
        lambda p, w: p.data.copy_(w.data),
        lambda p, w: p[:].copy_(w[...]),
        lambda p, w: p.__setitem__(slice(None), w),
        lambda p, w: p.copy_(w.to("cpu")),
        lambda p, w: p.copy_(w.to(device="cpu", dtype=torch.float32)),
        lambda p, w: p.copy_(w.cpu()),
        lambda p, w: p.t().copy_(w.t().contiguous()),
        lambda p, w: p.view(-1).copy_(w.reshape(-1)),
        lambda p, w: torch._foreach_copy_([p], [w]),
        lambda p, w: p.copy_(torch.cat([w])),
        lambda p, w: p.copy_(torch.stack([w])[0]),
        lambda p, w: p.view(torch.int32).copy_(w.view(torch.int32)),
        lambda p, w: p.copy_(w.index_select(0, torch.arange(6))),
        lambda p, w: p.copy_(nn.functional.pad(w, (1, 2))[:, 1:-2]),
        lambda p, w: p.copy_(nn.Parameter(w.clone())),
        lambda p, w: p.copy_(torch.empty(6, 4).copy_(w)),  # through a buffer with bytes
        lambda p, w: p.copy_(w.unsqueeze(0).expand(1, 6, 4).squeeze(0)),
        lambda p, w: (p.zero_(), p.copy_(w)),
        lambda p, w: (p.copy_(w), p.copy_(w)),  # twice the same is once
        lambda p, w: (w.float().abs().max(), p.copy_(w)),  # computed, and thrown away
    ],
)
def test_whole_copies_are_one_box(store: Store) -> None:
    traced = traced_by(store, 6, 4)
    assert [(copy.box, copy.parameter, copy.offset, copy.strides) for copy in traced.copies] == [
        (Box((0, 0), (6, 4)), "p", 0, (4, 1))
    ]
    assert (traced.fallback, traced.unused, traced.partial, traced.unwritten) == ({}, {}, {}, {})
    assert traced.reason() is None


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (lambda p, w: p.copy_(w * 2), "it goes through mul on its way to p"),
        (lambda p, w: p.copy_(w.t().contiguous().t() + 1), "it goes through add on its way to p"),
        (lambda p, w: p.copy_(w).mul_(2), "mul_ overwrites it in p"),
        (lambda p, w: p.add_(w), "it goes through add_ on its way to p"),
        (lambda p, w: p.copy_(w.to(torch.bfloat16)), "it is converted from torch.float32 to torch.bfloat16 on its way to p"),
        (lambda p, w: p.copy_(w.flip(0)), "it goes through flip on its way to p"),
        (lambda p, w: p.fill_(w[0, 0].item()), "the loader reads its values (local_scalar_dense)"),
        (lambda p, w: p.fill_(w[0, 0]), "it goes through fill_ on its way to p"),
        (lambda p, w: p.copy_(w) if w.tolist() else None, "the loader reads its values (tolist)"),
        (lambda p, w: p.copy_(w) if w.numpy() is not None else None, "the loader reads its values (numpy)"),
        (lambda p, w: p.copy_(w) if torch.equal(w, w) else None, "the loader reads its values (equal)"),
        (lambda p, w: p.copy_(w) if w.sum() else None, "the loader reads its values (local_scalar_dense)"),
        (lambda p, w: (p.copy_(w), p[0].zero_()), "zero_ overwrites it in p"),
        (lambda p, w: (p.copy_(w), p[1:].copy_(w[:-1])), "a later copy overwrites it in p"),
        (lambda p, w: p.view(torch.uint8).copy_(w.view(torch.uint8)), "its bytes are read as elements of another size"),
        (lambda p, w: p.index_put_((torch.arange(6),), w), "it goes through index_put_ on its way to p"),
        (lambda p, w: torch.cat([w[:3], w[3:]], out=p), "it goes through cat on its way to p"),
        (lambda p, w: p.copy_(torch.where(w > 0, w, w)), "it goes through where on its way to p"),
        (lambda p, w: p.copy_(w[torch.arange(5, -1, -1)].t().contiguous().t()), "more than 4 boxes"),
    ],
)
def test_what_is_no_plain_copy_is_named_with_the_reason(store: Store, reason: str) -> None:
    traced = traced_by(store, 6, 4, max_boxes=4)
    assert list(traced.fallback) == ["w"]
    assert reason in traced.fallback["w"]
    assert traced.copies == ()
    said = traced.reason()
    assert said is not None
    assert said.startswith("the loader does more than copy w (")


def test_a_dtype_conversion_by_copy_is_named() -> None:
    traced = traced_by(lambda p, w: p.copy_(w), 6, 4, dtype=torch.bfloat16)
    assert traced.fallback == {"w": "it is converted from torch.float32 to torch.bfloat16 on its way to p"}


def test_one_transformed_tensor_leaves_the_others_alone() -> None:
    parameter = meta(12, 4)

    def load(tensors: Iterable[Item]) -> None:
        held = dict(tensors)
        parameter[:6].copy_(held["a"])
        parameter[6:].copy_(-held["b"])

    traced = trace_loader(load, {"p": parameter}, PAIR)
    assert traced.fallback == {"b": "it goes through neg on its way to p"}
    assert [PAIR[copy.tensor].name for copy in traced.copies] == ["a"]


def test_two_tensors_in_one_place_are_both_named() -> None:
    traced = traced_by(lambda p, w: p.copy_(w), 6, 4, manifest=PAIR)
    assert traced.fallback == {
        "a": "a later copy overwrites it in p",
        "b": "it overwrites another checkpoint tensor in p",
    }


def test_a_step_of_two_is_a_box_for_each_column_up_to_a_bound() -> None:
    def interleaved(p: torch.Tensor, w: torch.Tensor) -> None:
        p[:, :2].copy_(w[:, ::2])
        p[:, 2:].copy_(w[:, 1::2])

    traced = traced_by(interleaved, 6, 4)
    assert sorted((copy.box.starts[1], copy.offset) for copy in traced.copies) == [(0, 0), (1, 2), (2, 1), (3, 3)]
    assert "more than 3 boxes" in traced_by(interleaved, 6, 4, max_boxes=3).fallback["w"]


def test_a_transposed_copy_permutes_strides() -> None:
    (copy,) = traced_by(lambda p, w: p.copy_(w.t()), 4, 6).copies
    assert (copy.box, copy.strides) == (Box((0, 0), (6, 4)), (1, 6))


def test_replicated_heads_are_equal_boxes_and_parts_used_twice_are_not() -> None:
    traced = traced_by(lambda p, w: p.copy_(w.view(3, 2, 4).repeat_interleave(2, 0).flatten(0, 1)), 12, 4)
    assert [copy.box.starts[0] for copy in traced.copies] == [0, 0, 2, 2, 4, 4]
    assert [copy.offset // 8 for copy in traced.copies] == [0, 1, 2, 3, 4, 5]
    assert traced.reason() is None
    traced = traced_by(lambda p, w: (p[:6].copy_(w), p[6:8].copy_(w[:2])), 8, 4)
    assert traced.fallback == {"w": "parameters hold parts of it twice, in boxes that overlap but differ"}


def test_padding_is_unwritten_and_the_rest_is_direct() -> None:
    traced = traced_by(lambda p, w: (p[:6].copy_(w), p[6:].fill_(0)), 8, 4)
    assert traced.unwritten == {"p": 8}
    assert traced.reason() is None
    padded = traced_by(lambda p, w: p.copy_(nn.functional.pad(w, (0, 0, 0, 2))), 8, 4)
    assert (padded.unwritten, padded.copies) == (traced.unwritten, traced.copies)


def test_rows_that_are_said_to_be_padding_may_stay_unwritten_and_no_others() -> None:
    def unwritten(store: Store, *rows: slice) -> dict[str, int]:
        return traced_by(store, 8, 4, padding={"p": rows}).unwritten

    assert unwritten(lambda p, w: p[:6].copy_(w), slice(6, 8)) == {}
    assert unwritten(lambda p, w: (p[:3].copy_(w[:3]), p[4:7].copy_(w[3:])), slice(3, 4), slice(7, 8)) == {}
    assert unwritten(lambda p, w: p[:5].copy_(w[:5]), slice(6, 8)) == {"p": 4}
    assert unwritten(lambda p, w: p[2:].copy_(w), slice(6, 8)) == {"p": 8}
    assert unwritten(lambda p, w: p[:6, :3].copy_(w[:, :3]), slice(6, 8)) == {"p": 6}
    assert unwritten(lambda p, w: w.sum(), slice(0, 8)) == {}


def test_unused_and_partly_used_tensors_are_named() -> None:
    traced = traced_by(lambda p, w: p.copy_(w[:3]), 3, 4)
    assert traced.partial == {"w": 12}
    assert traced.reason() == "the loader takes only a part of w"
    assert traced.reason(ranks=2) is None
    traced = trace_loader(lambda tensors: next(iter(tensors)), {"p": meta(6, 4)}, PAIR)
    assert traced.unused == {"a": "no element of it reached a parameter", "b": "the loader did not read it"}
    assert traced.unwritten == {"p": 24}
    assert traced.reason() == traced.reason(2) == "the loader copied nothing to any parameter"


def test_scalars_and_empty_tensors() -> None:
    manifest = Manifest([TensorSpec("none", (0, 3), "float32"), TensorSpec("one", (), "float32")])
    parameters = {"none": torch.zeros(0, 3), "one": torch.zeros(())}
    traced = trace_loader(lambda tensors: [parameters[name].copy_(tensor) for name, tensor in tensors], parameters, manifest)
    assert [(copy.tensor, copy.box) for copy in traced.copies] == [(1, Box((), ()))]
    (shard,) = traced.shards(parameters)
    shard.tensor.copy_(torch.tensor(5.0))
    assert parameters["one"] == 5
    assert traced.reason() is None


def test_loaders_that_buffer_until_a_group_is_complete() -> None:
    parameter = meta(12, 4)

    def load(tensors: Iterable[Item]) -> None:
        group = dict(tensors)  # all at once
        parameter.copy_(torch.cat([group["b"], group["a"]]))

    traced = trace_loader(load, {"p": parameter}, PAIR)
    assert [(copy.tensor, copy.offset) for copy in traced.copies] == [(0, 24), (1, 0)]


def test_parameters_replaced_by_the_loader() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6, bias=False, device="meta")
            self.down = nn.Linear(6, 4, bias=False, device="meta")

        def load_weights(self, tensors: Iterable[Item]) -> None:
            held = dict(tensors)
            self.up.weight = nn.Parameter(held["a"])
            self.down.weight.data = held["b"].t()

    model = Model()
    traced = trace_loader(model.load_weights, model, PAIR)
    assert {(copy.parameter, copy.strides) for copy in traced.copies} == {("up.weight", (4, 1)), ("down.weight", (1, 6))}
    assert traced.reason() is None


def test_the_serving_engine_itself_can_be_traced_and_keeps_its_bytes() -> None:
    real = {"p": torch.randn(8, 4)}
    before = real["p"].clone()

    def load(tensors: Iterable[Item]) -> None:
        for _, tensor in tensors:
            real["p"][6:].fill_(0)
            real["p"][:6].copy_(tensor)
            real["p"].mul_(torch.ones(()))

    assert "mul_" in trace_loader(load, real, W).fallback["w"]
    assert torch.equal(real["p"], before)


def test_tied_parameters_are_one_target_in_the_trace_and_as_many_as_there_are_in_the_engine() -> None:
    weight = meta(6, 4)
    traced = trace_loader(lambda tensors: [weight.copy_(t) for _, t in tensors], {"embed": weight, "head": weight}, W)
    assert len(traced.copies) == 1
    tied = torch.zeros(6, 4)
    assert len(traced.shards({"embed": tied, "head": tied})) == 1
    assert len(traced.shards({"embed": tied, "head": torch.zeros(6, 4)})) == 2


@pytest.mark.parametrize("store", [lambda p, w: p.copy_(w), lambda p, w: p.copy_(w.view(2, 3, 4).transpose(0, 1).reshape(6, 4))])
def test_real_memory_may_have_other_strides(store: Store) -> None:
    traced = traced_by(store, 6, 4)
    values = torch.randn(6, 4)
    wanted = torch.empty(6, 4)
    store(wanted, values)
    for real in (torch.zeros(6, 4), torch.zeros(4, 6).t(), torch.zeros(6, 9)[:, 3:7], torch.zeros(13, 4)[1::2]):
        for shard in traced.shards({"p": real}):
            shard.tensor.copy_(values[tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))])
        assert torch.equal(real, wanted)


def test_the_twin_may_lie_in_memory_otherwise_than_the_engine() -> None:
    twin, real, values = {"p": meta(4, 6).t()}, {"p": torch.zeros(6, 4)}, torch.randn(6, 4)
    traced = trace_loader(lambda tensors: [twin["p"][:, 1:].copy_(w[:, 1:]) for _, w in tensors], twin, W)
    assert traced.unwritten == {"p": 6}
    for shard in traced.shards(real):
        shard.tensor.copy_(values[tuple(slice(a, b) for a, b in zip(shard.box.starts, shard.box.stops, strict=True))])
    assert torch.equal(real["p"][:, 1:], values[:, 1:])
    assert torch.equal(real["p"][:, 0], torch.zeros(6))


def test_float8_kept_as_bytes_is_the_same_bytes() -> None:
    manifest = Manifest([TensorSpec("w", (6, 4), "float8_e4m3fn")])
    traced = traced_by(lambda p, w: p.copy_(w.view(torch.uint8)), 6, 4, dtype=torch.uint8, manifest=manifest)
    real = torch.zeros(6, 4, dtype=torch.uint8)
    (shard,) = traced.shards({"p": real})
    assert shard.tensor.dtype == torch.float8_e4m3fn
    shard.tensor.copy_(torch.ones(6, 4))
    assert torch.equal(real, torch.ones(6, 4).to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    ("real", "said"),
    [
        ({}, "no parameter p"),
        ({"p": torch.zeros(0)}, r"float32\[0\], but torch.float32\[6, 4\] was traced"),
        ({"p": torch.zeros(6, 4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"p": torch.empty(6, 4, device="meta")}, "no plain memory"),
    ],
)
def test_an_engine_that_changed_its_parameters_is_refused(real: Mapping[str, torch.Tensor], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        traced_by(lambda p, w: p.copy_(w), 6, 4).shards(real)


def test_a_loader_that_raises_is_named_with_its_tensor() -> None:
    with pytest.raises(LoadError, match=r"during tracing, after w: KeyError: 'nobody'"):
        traced_by(lambda p, w: dict[str, int]()["nobody"], 6, 4)
    with pytest.raises(LoadError, match=r"after w, in index of w: "):
        traced_by(lambda p, w: p.copy_(w[w > 0]), 6, 4)


def test_two_traces_are_equal() -> None:
    def store(p: torch.Tensor, w: torch.Tensor) -> None:
        p.copy_(torch.cat([w[3:], w[:3]]).t().contiguous())

    assert traced_by(store, 4, 6).copies == traced_by(store, 4, 6).copies


def test_a_trillion_elements_cost_nothing() -> None:
    manifest = Manifest([TensorSpec(f"experts.{i}.w", (8192, 1 << 20), "bfloat16") for i in range(128)])
    parameter = meta(128, 1 << 20, 4096, dtype=torch.bfloat16)

    def load(tensors: Iterable[Item]) -> None:
        for place, (_, tensor) in enumerate(tensors):
            parameter[place].copy_(tensor.t().contiguous()[:, 4096:])

    traced = trace_loader(load, {"experts": parameter}, manifest)
    assert len(traced.copies) == 128
    assert traced.partial[manifest[0].name] == 4096 << 20


def test_shards_for_an_adapter_or_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    twin, real = {"p": meta(6, 4)}, {"p": torch.zeros(6, 4)}
    runs: list[int] = []

    def load(tensors: Iterable[Item]) -> None:
        runs.append(1)
        for _, tensor in tensors:
            twin["p"].copy_(tensor)

    direct = ShardsByTracing(load, twin, W)
    for _ in range(3):
        shards = direct.of(real)
        assert shards is not None
        assert shards[0].tensor.data_ptr() == real["p"].data_ptr()
    assert (len(runs), direct.reason) == (1, None)
    with caplog.at_level(logging.WARNING):
        assert direct.of({"p": torch.zeros(0)}) is None
        assert direct.of({"p": torch.zeros(0)}) is None
        assert direct.reason is not None
        assert "the engine changed it after loading" in direct.reason
    assert len(caplog.records) == 1
    assert direct.of(real) is not None

    def broken(tensors: Iterable[Item]) -> None:
        raise KeyError("nobody")

    failing = ShardsByTracing(broken, twin, W)
    assert failing.of(real) is failing.of(real) is None
    assert "KeyError" in str(failing.reason)
