"""The numbers of elements that go through a converter say where it puts each, for any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import LayoutError
from weightsync.integrations.megatron.element_numbers import trace

Convert = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
CPU = torch.device("cpu")


def check(convert: Convert, local: torch.Tensor) -> int:
    """Compare what the boxes say with what the converter does to ``local``; return the number of boxes."""
    count = 0
    wanted = convert(local.clone())
    for (shape, boxes), (name, value) in zip(trace(convert, tuple(local.shape), CPU), wanted.items(), strict=True):
        made = torch.full(shape, torch.nan, dtype=local.dtype)
        for box in boxes:
            view = local.as_strided(box.extents, box.strides, box.offset)
            place = tuple(slice(start, start + extent) for start, extent in zip(box.starts, box.extents, strict=True))
            assert made[place].isnan().all(), "two boxes overlap"
            made[place] = view + box.added
        assert torch.equal(made.nan_to_num(nan=-7), value.nan_to_num(nan=-7)), name
        count += len(boxes)
    return count


def gathered(local: torch.Tensor, rank: int, size: int, dim: int) -> torch.Tensor:
    parts = [torch.full_like(local, torch.nan) for _ in range(size)]
    parts[rank] = local
    return torch.cat(parts, dim)


def qkv(groups: int, queries: int, head: int, rank: int, size: int) -> Convert:
    def convert(local: torch.Tensor) -> Mapping[str, torch.Tensor]:
        whole = gathered(local, rank, size, 0).view(groups, queries + 2, head, -1)
        q, k, v = torch.split(whole, [queries, 1, 1], 1)
        return {name: part.reshape(-1, local.shape[1]) for name, part in (("q", q), ("k", k), ("v", v))}

    return convert


@pytest.mark.parametrize("rank", [0, 1])
def test_grouped_attention_is_three_boxes_per_group(rank: int) -> None:
    local = torch.randn(2 * (3 + 2) * 4, 16, dtype=torch.float64)
    assert check(qkv(4, 3, 4, rank, 2), local) == 6


def test_a_gated_mlp_is_two_boxes() -> None:
    def convert(local: torch.Tensor) -> Mapping[str, torch.Tensor]:
        gate, up = (gathered(part, 1, 4, 0) for part in local.chunk(2))
        return {"gate": gate, "up": up}

    assert check(convert, torch.randn(24, 8, dtype=torch.float64)) == 2


def test_a_row_parallel_transposed_parameter_is_one_box() -> None:
    assert check(lambda local: {"t": gathered(local, 2, 3, 1).t()}, torch.randn(6, 5, dtype=torch.float64)) == 1


def test_a_vector_a_scalar_and_three_dimensions() -> None:
    assert check(lambda local: {"v": gathered(local, 0, 2, 0)}, torch.randn(9, dtype=torch.float64)) == 1
    assert check(lambda local: {"s": local}, torch.randn((), dtype=torch.float64)) == 1
    assert check(lambda local: {"c": local.permute(2, 0, 1)}, torch.randn(3, 4, 5, dtype=torch.float64)) == 1


def test_what_the_converter_drops_is_in_no_box() -> None:
    assert check(lambda local: {"vocabulary": local[:7]}, torch.randn(10, 3, dtype=torch.float64)) == 1


def test_a_constant_that_is_added_is_told_from_a_shift() -> None:
    ((_, (box,)),) = trace(lambda local: {"norm": local + 1}, (8,), CPU)
    assert (box.added, box.offset) == (1.0, 0)
    ((_, boxes),) = trace(lambda local: {"rolled": local.roll(-1)}, (8,), CPU)
    assert {box.added for box in boxes} == {0.0}
    assert check(lambda local: {"norm": gathered(local - 1, 1, 2, 0)}, torch.randn(4, dtype=torch.float64)) == 1


@pytest.mark.parametrize(
    "convert",
    [
        lambda w: {"x": w * 2},
        lambda w: {"x": -w},
        lambda w: {"x": w / 3},
        lambda w: {"x": w + torch.arange(w.numel()).view(w.shape)},
        lambda w: {"x": w.cumsum(0)},
        lambda w: {"x": w.bfloat16()},
        lambda w: {"x": w**2},
        lambda w: {"x": w + w.flip(0)},
    ],
)
def test_arithmetic_is_refused_by_name(convert: Convert) -> None:
    with pytest.raises(LayoutError, match=r"computes x out of|repeats elements in x"):
        trace(convert, (40, 50), CPU)


def test_repeated_elements_are_refused() -> None:
    with pytest.raises(LayoutError, match="repeats elements in k, v"):
        trace(lambda w: {"k": w, "v": w}, (4, 4), CPU)


def test_single_columns_are_refused_beyond_a_number_of_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.integrations.megatron.element_numbers._MOST_BOXES", 50)
    with pytest.raises(LayoutError, match="scatters x in more than 50 pieces"):
        trace(lambda w: {"x": w[torch.randperm(len(w), generator=torch.Generator().manual_seed(1))]}, (200, 2), CPU)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cuts_permutations_and_gathers_come_back(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.sampled_from((1, 2, 3, 4, 6, 8))) for _ in range(dims))
    plan = [
        (data.draw(st.sampled_from(("chunk", "permute", "gather", "flip", "group"))), data.draw(st.integers(0, dims - 1)))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    size, rank = data.draw(st.sampled_from(((1, 0), (2, 0), (2, 1), (3, 1))))
    order = data.draw(st.permutations(range(dims)))

    def convert(local: torch.Tensor) -> Mapping[str, torch.Tensor]:
        tensors = [local]
        for what, dim in plan:
            if what == "chunk":
                tensors = [part for tensor in tensors for part in tensor.tensor_split(2, dim) if part.numel()]
            elif what == "gather":
                tensors = [gathered(tensor, rank, size, dim) for tensor in tensors[:1]] + tensors[1:]
            elif what == "flip":
                tensors = [torch.cat(tensor.tensor_split(2, dim)[::-1], dim) for tensor in tensors]
            elif what == "group":
                tensors = [
                    torch.cat([tensor.narrow(dim, at, tensor.shape[dim] - at), tensor.narrow(dim, 0, at)], dim)
                    for tensor in tensors
                    for at in (tensor.shape[dim] // 2,)
                ]
            else:
                tensors = [tensor.permute(order) for tensor in tensors]
        return {str(number): tensor for number, tensor in enumerate(tensors)}

    check(convert, torch.randn(shape, dtype=torch.float64))
