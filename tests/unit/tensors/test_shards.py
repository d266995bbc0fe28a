"""Shards and layouts from plain tensors and modules, box arithmetic of placements, packed and in-place layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tensors.samples import DTYPES, random_bits
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Shard as ShardOn
from torch.distributed.tensor.placement_types import Placement

from weightsync.errors import ConfigurationError, LayoutError, ManifestMismatch
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.placements import box_of
from weightsync.tensors.shards import (
    FollowedShards,
    Shard,
    checkpoint_name,
    dtype_name,
    manifest_of,
    ordered,
    shard,
    shards_of,
    torch_dtype,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 10, bias=False)
        self.embed = nn.Embedding(10, 4)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_dtype_names_go_there_and_back() -> None:
    for dtype in DTYPES:
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(ConfigurationError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ConfigurationError, match="save"):
        torch_dtype("save")


def test_a_module() -> None:
    manifest, shards = shards_of(Tied())
    assert [spec.name for spec in manifest] == ["head.weight", "norm.bias", "norm.weight"]
    assert manifest[0].aliases == ("embed.weight",)
    assert [one.name for one in shards] == ["head.weight", "norm.bias", "norm.weight"]
    assert not any(one.tensor.requires_grad for one in shards)


def test_buffers_by_choice() -> None:
    names = {spec.name for spec in manifest_of(Tied(), include_buffers=True)}
    assert names == {"head.weight", "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_ties_of_a_state_dict_and_what_only_looks_like_one() -> None:
    memory = torch.arange(12.0).view(3, 4)
    state = {"b": memory, "a": memory.view(3, 4), "turned": memory.t(), "part": memory[:2], "flat": memory.view(12)}
    manifest = manifest_of(state)
    assert {spec.name: spec.aliases for spec in manifest} == {"b": ("a",), "turned": (), "part": (), "flat": ()}
    assert not any(spec.aliases for spec in manifest_of({"x": torch.empty(0), "y": torch.empty(0)}))


def test_shards_are_live_and_strided() -> None:
    memory = torch.zeros(4, 6)
    _, shards = shards_of({"t": memory.t()[1:4]})
    memory[2, 1] = 5
    assert shards[0].tensor[0, 2] == 5
    assert shards[0].tensor.stride() == (1, 6)


def test_meta_tensors_have_a_manifest_but_no_shards() -> None:
    state = {"t": torch.empty(3, device="meta")}
    assert manifest_of(state)[0].shape == (3,)
    with pytest.raises(LayoutError, match="meta"):
        shards_of(state)


def test_dtype_for_all_leaves_integers_and_float8() -> None:
    state = {dtype_name(dtype): torch.zeros(2).to(dtype) for dtype in DTYPES}
    manifest = manifest_of(state, dtype=torch.bfloat16)
    changed = {spec.name for spec in manifest if spec.name != spec.dtype}
    assert changed == {"float32", "float16"}
    assert {spec.dtype for spec in manifest if spec.name in changed} == {"bfloat16"}


def test_dtype_by_name() -> None:
    model = Tied()
    manifest = manifest_of(model, dtype={"embed.weight": torch.bfloat16})
    assert {spec.name: spec.dtype for spec in manifest} == {
        "head.weight": "bfloat16",
        "norm.bias": "float32",
        "norm.weight": "float32",
    }
    with pytest.raises(ConfigurationError, match=r"lm_head.*1 in all"):
        manifest_of(model, dtype={"lm_head": torch.bfloat16})
    with pytest.raises(ConfigurationError, match="same tensor"):
        manifest_of(model, dtype={"embed.weight": torch.bfloat16, "head.weight": torch.float16})


def test_what_cannot_be_published() -> None:
    with pytest.raises(ConfigurationError, match="complex"):
        shards_of({"t": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ConfigurationError, match="not a tensor"):
        shards_of({"t": 3})  # type: ignore[dict-item]
    with pytest.raises(LayoutError, match="strided"):
        shards_of({"t": torch.eye(3).to_sparse()})


def test_declared_by_hand() -> None:
    one = shard("w", torch.zeros(2, 3), (8, 3), (4, 0))
    assert one.box == Box((4, 0), (6, 3))
    with pytest.raises(LayoutError, match="outside"):
        shard("w", torch.zeros(2, 3), (8, 3), (7, 0))
    with pytest.raises(LayoutError, match="memory of shape"):
        shard("w", torch.zeros(2, 3), (8, 3), (0,))
    manifest = Manifest([TensorSpec("w", (8, 4), "float32")])
    with pytest.raises(LayoutError, match=r"shape is \[8, 4\]"):
        ordered(manifest, [one])
    with pytest.raises(LayoutError, match="not in the manifest"):
        ordered(manifest, [shard("v", torch.zeros(1), (1,), (0,))])


def boxes(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement]) -> list[Box]:
    coordinates = [(i, j) for i in range(mesh[0]) for j in range(mesh[1])] if len(mesh) > 1 else [(i,) for i in range(mesh[0])]
    return [box_of("w", shape, mesh, placements, coordinate) for coordinate in coordinates]


def test_uneven_and_empty_boxes() -> None:
    assert [box.shape[0] for box in boxes((5, 2), (4,), [ShardOn(0)])] == [2, 2, 1, 0]
    assert [box.shape[0] for box in boxes((2,), (4,), [ShardOn(0)])] == [1, 1, 0, 0]
    assert [box.shape for box in boxes((3, 7), (3,), [ShardOn(-1)])] == [(3, 3), (3, 3), (3, 1)]
    assert [box.shape for box in boxes((), (2,), [Replicate()])] == [(), ()]


def test_two_dimensional_meshes() -> None:
    assert boxes((8, 2), (2, 2), [Replicate(), ShardOn(0)]) == [Box((0, 0), (4, 2)), Box((4, 0), (8, 2))] * 2
    assert [box.starts[0] for box in boxes((8,), (2, 2), [ShardOn(0), ShardOn(0)])] == [0, 2, 4, 6]
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = _StridedShard(0, split_factor=2)
    # Tensor parallel (the second dimension) cuts first, FSDP cuts what it left: rank (0, 1) holds the third quarter.
    assert [box.starts[0] for box in boxes((8,), (2, 2), [strided, ShardOn(0)])] == [0, 4, 2, 6]
    with pytest.raises(LayoutError, match="interleaved"):
        boxes((8,), (2, 2), [strided, Replicate()])


def test_partial_is_refused_with_advice() -> None:
    with pytest.raises(LayoutError, match="redistribute"):
        boxes((8,), (2,), [Partial()])


def test_packed_layout() -> None:
    state = {"a": torch.zeros(3, 5), "b": torch.zeros(()), "c": torch.empty(0, 4), "d": torch.zeros(4, 2).t()}
    manifest, shards = shards_of(state, dtype={"a": torch.bfloat16})
    layout = packed_layout(manifest, shards)
    assert layout.tensor.tolist() == [0, 1, 3]
    assert layout.offset.tolist() == [0, 64, 128]
    assert layout.regions == (192,)
    assert layout.strides[:, -1].tolist() == [2, 4, 4]
    assert packed_layout(manifest, []).regions == (0,)


def test_layout_in_place() -> None:
    memory = torch.zeros(100, dtype=torch.float32)
    state = {"a": memory[4:16].view(3, 4), "b": memory[20:].view(8, 10).t(), "c": torch.zeros(5)}
    manifest, shards = shards_of(state)
    layout, addresses = layout_in_place(manifest, shards, None)
    assert addresses == (memory.data_ptr(), state["c"].data_ptr())
    assert layout.regions == (400, 20)
    assert layout.offset.tolist() == [16, 80, 0]
    assert layout.strides[1].tolist() == [4, 40]
    assert len(layout_in_place(manifest, shards, 16)[0]) > len(layout)


def test_memory_that_cannot_be_written_in_place() -> None:
    for state in ({"t": torch.zeros(3, 1).expand(3, 4)}, {"t": torch.zeros(10).as_strided((4, 4), (2, 1))}):
        manifest, shards = shards_of(state)
        with pytest.raises(LayoutError, match="overlaps itself"):
            layout_in_place(manifest, shards)
    manifest, shards = shards_of({"t": torch.zeros(3)}, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="float32 in memory, but is published as bfloat16"):
        layout_in_place(manifest, shards)


def test_shards_come_in_manifest_order() -> None:
    state = {f"layers.{i}.w": random_bits((2,), torch.int32, np.random.default_rng(i)) for i in (10, 2, 1)}
    manifest, shards = shards_of(state)
    assert [one.name for one in shards] == ["layers.1.w", "layers.2.w", "layers.10.w"]
    assert isinstance(shards[0], Shard)
    assert [spec.name for spec in manifest] == [one.name for one in shards]


class Fused(nn.Module):
    """Hands out its fused parameter in three parts, as checkpoints name them."""

    def __init__(self, parts: str = "qkv") -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.arange(48.0).view(12, 4))
        self.out = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(3))
        self.parts = parts
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        assert isinstance(module, Fused)
        whole = state.pop(prefix + "qkv")
        state |= {prefix + name: part for name, part in zip("qkv", whole.chunk(3), strict=True) if name in module.parts}
        state[prefix + "steps_taken"] = state.pop(prefix + "steps")
        state[prefix + "_extra_state"] = torch.zeros(5)


def test_views_that_a_state_dict_hook_hands_out_are_parameters() -> None:
    module = nn.Sequential(Fused())
    manifest, shards = shards_of(module)
    assert [spec.name for spec in manifest] == ["0.k", "0.out.bias", "0.out.weight", "0.q", "0.v"]
    with torch.no_grad():
        module[0].qkv.mul_(2)  # type: ignore[operator]
    held = {one.name: one.tensor for one in shards}
    assert torch.equal(torch.cat([held["0.q"], held["0.k"], held["0.v"]]), module[0].qkv)  # type: ignore[arg-type]
    assert {spec.name for spec in manifest_of(module, include_buffers=True)} - {spec.name for spec in manifest} == {"0.steps_taken"}


def test_a_parameter_that_a_hook_leaves_out_or_copies_is_named() -> None:
    with pytest.raises(LayoutError, match=r"parameter 0\.qkv of Sequential.* 64 bytes"):
        shards_of(nn.Sequential(Fused("qv")))

    def copy(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].half()

    module = nn.Linear(3, 4)
    module.register_state_dict_post_hook(copy)  # type: ignore[no-untyped-call]
    with pytest.raises(LayoutError, match="parameter weight of Linear"):
        manifest_of(module)


def test_views_that_overlap_do_not_stand_for_a_parameter_that_a_hook_leaves_out() -> None:
    def keep_fused(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        state |= dict(zip("qkv", state["qkv"].chunk(3), strict=True))
        del state["out"]

    module, flat = nn.Module(), torch.arange(48.0)
    module.qkv, module.out = nn.Parameter(flat[:24].view(6, 4)), nn.Parameter(flat[24:].view(6, 4))
    assert manifest_of(module).index.keys() == {"qkv", "out"}
    module.register_state_dict_post_hook(keep_fused)  # type: ignore[no-untyped-call]
    with pytest.raises(LayoutError, match=r"parameter out of Module.* 96 bytes"):
        manifest_of(module)


@pytest.mark.parametrize(("kept", "left"), [("abc", 0), ("ac", 0), ("ab", 32), ("abd", 16), ("", 64)])
def test_columns_of_a_parameter_are_counted_once(kept: str, left: int) -> None:
    def columns(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        whole = state.pop("w")
        parts = {"a": whole[:, 0], "b": whole[:, :2], "c": whole[:, 1:].t(), "d": whole[:, 3:]}
        state |= {name: parts[name] for name in kept}

    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, 4))
    module.register_state_dict_post_hook(columns)  # type: ignore[no-untyped-call]
    if not left:
        assert len(manifest_of(module)) == len(kept)
        return
    with pytest.raises(LayoutError, match=rf"parameter w of Module.* {left} bytes"):
        manifest_of(module)


def test_two_parameters_of_one_memory_and_a_sparse_one() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(3, 4))
    module.b = nn.Parameter(module.a.data)
    module.turned = nn.Parameter(module.a.data.t())
    assert {spec.name: spec.aliases for spec in manifest_of(module)} == {"a": ("b",), "turned": ()}
    module.s = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(LayoutError, match="s is not a plain strided tensor"):
        manifest_of(module)


def wrapped(*shape: int) -> torch.Tensor:
    """A tensor subclass that wraps two others, as quantized weights do: its own address is 0."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(shape), torch.ones(shape))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, {"layer.w": torch.bfloat16}], ids=str)
def test_a_tensor_that_wraps_others_has_no_memory(dtype: torch.dtype | dict[str, torch.dtype] | None) -> None:
    layer, module = nn.Module(), nn.Module()
    layer.w, module.layer = nn.Parameter(wrapped(8, 8)), layer
    named = r"layer\.w is a torch\.testing\._internal\.two_tensor\.TwoTensor"
    with pytest.raises(LayoutError, match=named):
        shards_of(module, dtype=dtype)
    with pytest.raises(LayoutError, match=named):
        shards_of({"layer.w": wrapped(8, 8)}, dtype=dtype)
    assert manifest_of(module, dtype=dtype)[0].shape == (8, 8)


def test_a_wrapper_in_a_shard_made_by_hand_is_refused_before_its_address_is_used() -> None:
    manifest = Manifest([TensorSpec("w", (8, 8), "float32")])
    one = shard("w", wrapped(8, 8), (8, 8), (0, 0))
    for make in (layout_in_place, packed_layout):
        with pytest.raises(LayoutError, match=r"w is a .*TwoTensor"):
            make(manifest, [one])


def test_another_view_of_the_same_memory_is_followed() -> None:
    module = nn.Linear(4, 4, bias=False)
    for state in (module, dict(module.named_parameters())):
        followed = FollowedShards(state)
        before = followed.now()
        assert followed.now() is before
        module.weight.data = module.weight.data.t()  # same address and shape
        (now,) = followed.now()[1]
        assert torch.equal(now.tensor, module.weight)
    integers = torch.zeros(3, dtype=torch.int32)
    tensors = {"w": integers}
    followed = FollowedShards(tensors)
    tensors["w"] = integers.view(torch.float32)
    assert followed.now()[0][0].dtype == "float32"


def test_ties_that_move_to_other_names_are_followed() -> None:
    x, y = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    module = nn.Module()
    module.a, module.b, module.c = x, x, y
    buffered = nn.Module()
    for name, value in (("a", x.data), ("b", x.data), ("c", y.data)):
        buffered.register_buffer(name, value)
    mapping = {"a": x, "b": y}
    followed, of_buffers, of_mapping = (
        FollowedShards(module),
        FollowedShards(buffered, include_buffers=True),
        FollowedShards(mapping),
    )
    before = followed.now(), of_buffers.now(), of_mapping.now()
    assert (followed.now(), of_buffers.now(), of_mapping.now()) == before
    module.b, module.c = y, x
    buffered.b, buffered.c = y.data, x.data
    for now in (followed.now(), of_buffers.now()):
        assert [spec.names for spec in now[0]] == [("a", "c"), ("b",)]
        assert [float(one.tensor[0]) for one in now[1]] == [0, 1]
    mapping.clear()
    mapping |= {"b": x, "a": y}
    assert {one.name: float(one.tensor[0]) for one in of_mapping.now()[1]} == {"a": 1, "b": 0}


def test_the_order_in_which_ties_are_registered_makes_no_difference() -> None:
    class Other(Tied):
        def __init__(self) -> None:
            super().__init__()
            self._modules = dict(reversed(self._modules.items()))

    ours, theirs = manifest_of(Tied()), manifest_of(Other())
    assert (ours[0].name, theirs[0].name) == ("head.weight", "embed.weight")
    assert ours == theirs
    assert ours.fingerprint == theirs.fingerprint
    assert [spec.names for spec in ours] == [spec.names for spec in theirs]
    ours.check_same(theirs)
    untied = Tied()
    untied.head.weight = nn.Parameter(untied.embed.weight.clone())
    with pytest.raises(ManifestMismatch, match=r"tied names of embed.weight: \[\] instead of \['head.weight'\]"):
        theirs.check_same(manifest_of(untied))


def test_names_lose_what_compiling_adds() -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))
    expected = manifest_of(plain)
    inner: Any = torch.compile(plain[1], backend="eager")
    compiled: Any = torch.compile(nn.Sequential(plain[0], inner), backend="eager")
    assert any("_orig_mod." in name for name in compiled.state_dict())
    assert manifest_of(compiled) == expected
    assert manifest_of(compiled.state_dict()) == expected
    half = {name: torch.bfloat16 for name, _ in compiled.named_parameters()}
    assert {spec.dtype for spec in manifest_of(compiled, dtype=half)} == {"bfloat16"}
    assert checkpoint_name("my_orig_mod.w") == "my_orig_mod.w"
    with pytest.raises(ConfigurationError, match=r"two tensors are named a\.w"):
        manifest_of({"a.w": torch.zeros(1), "a._orig_mod.w": torch.zeros(1)})


@pytest.mark.parametrize("view", [torch._neg_view, lambda tensor: torch.complex(torch.zeros(4, 6), -tensor).conj().imag])
def test_lazily_negated_memory_is_refused(view: Any) -> None:
    """Its memory holds the opposite signs, and copies and digests read memory."""
    negated = view(torch.ones(4, 6))
    assert negated.is_neg()
    for declare in (lambda: shards_of({"w": negated}), lambda: ordered(manifest_of({"w": negated}), [whole_shard(negated)])):
        with pytest.raises(LayoutError, match=r"w is lazily negated.*resolve_conj\(\)\.resolve_neg\(\)"):
            declare()
    assert shards_of({"w": negated.resolve_neg()})[1]


def whole_shard(tensor: torch.Tensor) -> Shard:
    return shard("w", tensor, tensor.shape, [0] * tensor.dim())


@pytest.mark.parametrize("shape", [(6, 4), (24,), (2, 2, 6)])
def test_another_shape_of_the_same_memory_is_followed(shape: tuple[int, ...]) -> None:
    module = nn.Linear(6, 4, bias=False)
    followed = FollowedShards(module)
    before = followed.now()
    assert followed.now() is before
    module.weight.data = module.weight.data.view(shape)
    manifest, [held] = followed.now()
    assert manifest.tensors[0].shape == shape == held.shape
