"""Quantized shards have the bits of the reference of their format, however the matrix is cut and over however many ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, ManifestMismatch
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.formats import FORMATS, format_of
from weightsync.tensors.quantization import AllMax, QuantizedShards, formats_by_pattern
from weightsync.tensors.shards import Shard, dtype_name, torch_dtype

from .quantized_references import NAMES, reference

GO = np.zeros(1, np.int8)
NAME = "layers.0.mlp.down_proj.weight"


class Ranks:
    """Trainer ranks that take maxima together, each on a thread."""

    def __init__(self, count: int) -> None:
        self._count, self._given = count, dict[int, torch.Tensor]()
        self._barrier = threading.Barrier(count, timeout=20)
        self.values = [0] * count
        """Elements that each rank gave away."""

    def of(self, rank: int) -> AllMax | None:
        def all_max(tensor: torch.Tensor, deadline: Deadline) -> None:
            self._given[rank] = tensor.clone()
            self.values[rank] += tensor.numel()
            self._barrier.wait()
            tensor.copy_(torch.stack([self._given[other] for other in range(self._count)]).amax(0))
            self._barrier.wait()

        return None if self._count == 1 else all_max

    def run(self, work: Callable[[int], object]) -> list[object]:
        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(work, range(self._count)))


def cut(matrices: Mapping[str, torch.Tensor], boxes: Sequence[Sequence[Box]]) -> list[list[Shard]]:
    """Shards of each rank: of every matrix the boxes of that rank."""
    return [
        [
            Shard(name, tuple(matrix.shape), box, matrix[tuple(map(slice, box.starts, box.stops))])
            for name, matrix in matrices.items()
            for box in of_rank
        ]
        for of_rank in boxes
    ]


def quantize(
    matrices: Mapping[str, torch.Tensor],
    shards: Sequence[Sequence[Shard]],
    patterns: Mapping[str, str | None],
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
) -> dict[str, torch.Tensor]:
    """What all ranks publish, put together; every element by exactly one of the ranks that do not hold the same box."""
    manifest = Manifest(
        TensorSpec(name, tuple(matrix.shape), dtype_name(dtype or matrix.dtype)) for name, matrix in matrices.items()
    )
    together = ranks or Ranks(len(shards))
    device = next(iter(matrices.values())).device

    def work(rank: int) -> tuple[Manifest, list[tuple[Shard, torch.Tensor]]]:
        made = QuantizedShards(manifest, shards[rank], formats_by_pattern(manifest, patterns), together.of(rank))
        made.exchange(Deadline(20))
        filled = [
            (shard, torch.empty(shard.box.shape, dtype=shard.tensor.dtype, device=device) if shard.tensor.is_meta else shard.tensor)
            for shard in made.shards
        ]
        made.write(filled, GO)
        return made.manifest, [(shard, memory.cpu()) for shard, memory in filled]

    results = together.run(work)
    published: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for known, filled in results:  # type: ignore[misc]
        assert known == results[0][0]  # type: ignore[index, has-type]
        for spec in known:  # type: ignore[has-type]
            published.setdefault(spec.name, torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)))
            times.setdefault(spec.name, torch.zeros(spec.shape, dtype=torch.int64))
        for shard, memory in filled:  # type: ignore[has-type]
            place = tuple(map(slice, shard.box.starts, shard.box.stops))
            published[shard.name][place] = memory
            times[shard.name][place] += 1
    assert all(bool((count >= 1).all()) for count in times.values())
    return published


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike to the bit."""
    alike = tensor.shape == other.shape and tensor.dtype == other.dtype
    return alike and torch.equal(tensor.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def hard(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A matrix of many magnitudes, with zeros of both signs, a block of zeros, denormals and ties."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) * torch.exp(2 * torch.randn(rows, 1, generator=generator))
    matrix[: rows // 3, : min(columns // 2, 128)] = 0
    matrix[rows // 2, ::3] = -0.0
    matrix[rows - 1] = torch.randint(-24, 25, (columns,), generator=generator) * 0.25  # E2M1's ties
    matrix[rows - 2] = (torch.arange(columns) % 29 - 14) * 1e-39
    matrix[rows - 3] = (torch.arange(columns) % 32 + 16) * 0.4375  # powers of two times 448
    return matrix.to(dtype)


def rows_of(count: int, rows: int, columns: int) -> list[list[Box]]:
    """FSDP2's cut of rows."""
    each = -(-rows // count)
    cuts = [(min(rank * each, rows), min(rank * each + each, rows)) for rank in range(count)]
    return [[Box((start, 0), (stop, columns))] if stop > start else [] for start, stop in cuts]


def columns_of(count: int, rows: int, columns: int) -> list[list[Box]]:
    """Tensor parallelism's cut of columns, as that of ``down_proj``."""
    each = columns // count
    return [[Box((0, rank * each), (rows, rank * each + each))] for rank in range(count)]


def interleaved(count: int, rows: int, columns: int) -> list[list[Box]]:
    """Megatron's: pieces of 24 rows, dealt out to ranks, and each cut in two at a column that is no block's border."""
    boxes: list[list[Box]] = [[] for _ in range(count)]
    for number, start in enumerate(range(0, rows, 24)):
        for first, end in ((0, 40), (40, columns)):
            boxes[number % count].append(Box((start, first), (min(start + 24, rows), end)))
    return boxes


CUTS: dict[str, Callable[[int, int], list[list[Box]]]] = {
    "gathered": lambda rows, columns: [[Box.whole((rows, columns))]],
    **{f"fsdp{count}": lambda rows, columns, count=count: rows_of(count, rows, columns) for count in (2, 3, 8)},  # type: ignore[misc]
    **{f"tp{count}": lambda rows, columns, count=count: columns_of(count, rows, columns) for count in (2, 4)},  # type: ignore[misc]
    "megatron": lambda rows, columns: interleaved(3, rows, columns),
    "replicated": lambda rows, columns: rows_of(2, rows, columns) * 2,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", CUTS)
def test_any_cut_gives_the_bits_of_the_reference(name: str, cuts: str, seed: int) -> None:
    matrix = hard(200, 384, torch.bfloat16, seed)
    published = quantize({NAME: matrix}, cut({NAME: matrix}, CUTS[cuts](200, 384)), {"*": name})
    expected = reference(name, matrix)
    assert sorted(published) == sorted(NAME.replace("weight", part) for part in NAMES[name])
    for part, tensor in zip(NAMES[name], expected, strict=True):
        assert same(published[NAME.replace("weight", part)], tensor), part


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(name: str, dtype: torch.dtype, seed: int) -> None:
    matrix = hard(130, 256, dtype, seed)
    published = quantize({NAME: matrix}, cut({NAME: matrix}, rows_of(3, 130, 256)), {"*": name})
    for part, tensor in zip(NAMES[name], reference(name, matrix), strict=True):
        assert same(published[NAME.replace("weight", part)], tensor), part


@pytest.mark.parametrize("name", NAMES)
def test_master_weights_are_converted_before(name: str, seed: int) -> None:
    masters = hard(100, 128, torch.float32, seed)
    published = quantize({NAME: masters}, cut({NAME: masters}, rows_of(2, 100, 128)), {"*": name}, torch.bfloat16)
    for part, tensor in zip(NAMES[name], reference(name, masters.bfloat16()), strict=True):
        assert same(published[NAME.replace("weight", part)], tensor), part


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (127, 128), (129, 384), (5, 128)])
def test_blocks_that_do_not_divide_and_zeros(name: str, rows: int, columns: int) -> None:
    for matrix in (torch.zeros(rows, columns).bfloat16(), torch.full((rows, columns), -3.5).bfloat16()):
        published = quantize({NAME: matrix}, cut({NAME: matrix}, columns_of(2, rows, columns)), {"*": name})
        for part, tensor in zip(NAMES[name], reference(name, matrix), strict=True):
            assert same(published[NAME.replace("weight", part)], tensor), part


def test_large_matrices_are_encoded_in_parts(seed: int) -> None:
    matrix = hard(700, 1100, torch.bfloat16, seed)
    for name in ("fp8-block", "fp8-tensor", "fp8-channel"):
        published = quantize({NAME: matrix}, cut({NAME: matrix}, rows_of(3, 700, 1100)), {"*": name})
        for part, tensor in zip(NAMES[name], reference(name, matrix), strict=True):
            assert same(published[NAME.replace("weight", part)], tensor), part


@pytest.mark.parametrize("name", ["fp8-tensor", "nvfp4", "nvfp4-modelopt"])
def test_matrices_that_engines_fuse_share_a_scale(name: str, seed: int) -> None:
    names = [f"layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkvo"]
    matrices = {each: hard(64, 128, torch.bfloat16, seed + place) * (place + 1) for place, each in enumerate(names)}
    published = quantize(matrices, cut(matrices, rows_of(2, 64, 128)), {"*": name})
    for each, matrix in matrices.items():
        fused = [other for other in names if other[:8] == each[:8]][:3]
        members = fused if each in fused else [each]
        largest = torch.stack([matrices[other].abs().max() for other in members]).max()
        for part, tensor in zip(NAMES[name], reference(name, matrix, largest), strict=True):
            assert same(published[each.removesuffix("weight") + part], tensor), (each, part)


def test_ranks_exchange_the_maxima_of_cut_blocks_only() -> None:
    matrix = torch.ones(1024, 1024).bfloat16()
    for boxes, exchanged in ((rows_of(8, 1024, 1024), 0), (rows_of(3, 1024, 1024), 2 * 8)):
        ranks = Ranks(len(boxes))
        quantize({NAME: matrix}, cut({NAME: matrix}, boxes), {"*": "fp8-block"}, ranks=ranks)
        agreed = 2 + 1 + (64 if exchanged else 0)  # at the start: the formats, whether the matrix is cut, and where
        assert ranks.values == [agreed + exchanged] * len(boxes)


@pytest.mark.parametrize("other", ["fp8-channel", "fp8-block-e8m0", None])
def test_ranks_that_differ_in_their_formats_hear_of_it_before_they_exchange_maxima(other: str | None) -> None:
    """As where each saw another engine: gloo ends a process whose partner sends more than it takes."""
    matrix = torch.ones(1024, 1024).bfloat16()
    manifest = Manifest([TensorSpec(NAME, (1024, 1024), "bfloat16")])
    shards, ranks = cut({NAME: matrix}, rows_of(2, 1024, 1024)), Ranks(2)

    def work(rank: int) -> str:
        chosen = "fp8-block" if rank else other
        formats = formats_by_pattern(manifest, {"*": chosen}) if chosen else {}
        with pytest.raises(ManifestMismatch) as refused:
            QuantizedShards(manifest, shards[rank], formats, ranks.of(rank))
        return str(refused.value)

    assert all("in other formats, than another one" in str(why) for why in ranks.run(work))
    assert ranks.values == [2, 2]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("row", "who"), [(99, "both"), (3, "one")])
@pytest.mark.parametrize("name", NAMES)
def test_inf_and_nan_are_an_error_with_the_name(name: str, row: int, who: str, bad: float) -> None:
    """In a block that ranks share, on each of them: none waits for the others."""
    matrix = torch.ones(200, 128).bfloat16()
    matrix[row, 5] = bad
    boxes = rows_of(2, 200, 128)
    manifest = Manifest([TensorSpec(NAME, (200, 128), "bfloat16")])
    ranks = Ranks(2)

    def work(rank: int) -> str:
        made = QuantizedShards(
            manifest, cut({NAME: matrix}, boxes)[rank], formats_by_pattern(manifest, {"*": name}), ranks.of(rank)
        )
        try:
            made.exchange(Deadline(20))
            made.write([(shard, torch.empty(shard.box.shape, dtype=shard.tensor.dtype)) for shard in made.shards], GO)
        except ConfigurationError as error:
            return str(error)
        return ""

    said = [str(text) for text in ranks.run(work)]
    assert f"{NAME} holds Inf or NaN" in said[0]
    shares = FORMATS[name].block[0] != 1 or FORMATS[name].uses_whole
    assert bool(said[1]) == (shares and (who == "both" or not name.startswith("fp8-block"))) or who == "one"


def test_what_cannot_be_quantized_is_refused_by_name() -> None:
    manifest = Manifest(
        [
            TensorSpec("norm.weight", (64,), "bfloat16"),
            TensorSpec("odd.weight", (64, 48), "bfloat16"),
            TensorSpec("ids.weight", (64, 64), "int32"),
            TensorSpec("experts.w1", (64, 64), "bfloat16"),
        ]
    )
    for pattern, name, words in (
        ("norm.*", "fp8-block", r"norm.weight cannot be .* shape \[64\]"),
        ("ids*", "fp8-block", "ids.weight cannot be .* int32"),
        ("odd*", "mxfp8", "odd.weight .* blocks of 32 do not divide its 48 columns"),
        ("experts*", "fp8-tensor", "experts.w1 .* ends with .weight"),
        ("nothing*", "fp8-block", "no tensor is left for the pattern 'nothing\\*'"),
        ("odd*", "fp7", "'fp7' is unknown; formats: fp8-block,"),
        ("odd*", "awq", "'awq' cannot be written by a trainer"),
        ("odd*", "gguf", "'gguf' cannot be"),
        ("odd*", "bitsandbytes", "'bitsandbytes' cannot be"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            formats_by_pattern(manifest, {pattern: name})
    with pytest.raises(ConfigurationError, match=r"quantize maps patterns to formats, .* not 'fp8-block'"):
        formats_by_pattern(manifest, "fp8-block")  # type: ignore[arg-type]
    assert formats_by_pattern(manifest, {"norm.*": None, "ids*": None, "e*": None, "*": "fp8-block"}) == {
        "odd.weight": format_of("fp8-block")
    }
    whole = torch.ones(64, 64).bfloat16()
    only = Manifest([TensorSpec("a.weight", (64, 64), "bfloat16")])
    shards = cut({"a.weight": whole}, [[Box((0, 0), (64, 20))]])[0]
    with pytest.raises(ConfigurationError, match=r"a.weight cannot be .* columns 0 to 20, and 8 values share an element"):
        QuantizedShards(only, shards, formats_by_pattern(only, {"*": "int4-group32"}))


def test_a_copy_can_be_stopped() -> None:
    matrix = torch.ones(64, 64).bfloat16()
    manifest = Manifest([TensorSpec(NAME, (64, 64), "bfloat16")])
    made = QuantizedShards(manifest, cut({NAME: matrix}, [[Box.whole((64, 64))]])[0], formats_by_pattern(manifest, {"*": "mxfp8"}))
    made.exchange(Deadline(20))
    with pytest.raises(Aborted):
        made.write([(shard, torch.empty(shard.box.shape, dtype=shard.tensor.dtype)) for shard in made.shards], np.ones(1, np.int8))


def test_other_tensors_stay_and_ties_are_renamed() -> None:
    manifest = Manifest([TensorSpec("a.weight", (64, 64), "bfloat16", ("b.weight",)), TensorSpec("norm.weight", (64,), "bfloat16")])
    values = {"a.weight": torch.ones(64, 64).bfloat16(), "norm.weight": torch.ones(64).bfloat16()}
    shards = [Shard(name, tuple(value.shape), Box.whole(tuple(value.shape)), value) for name, value in values.items()]
    made = QuantizedShards(manifest, shards, formats_by_pattern(manifest, {"b.*": "fp8-block"}))
    assert made.manifest == Manifest(
        [
            TensorSpec("a.weight", (64, 64), "float8_e4m3fn", ("b.weight",)),
            TensorSpec("a.weight_scale_inv", (1, 1), "float32", ("b.weight_scale_inv",)),
            TensorSpec("norm.weight", (64,), "bfloat16"),
        ]
    )
    assert [shard.name for shard in made.shards] == [spec.name for spec in made.manifest]
    moved = [Shard(shard.name, shard.shape, shard.box, shard.tensor.clone()) for shard in shards]
    assert made.derive(manifest, moved)[2].tensor is moved[1].tensor
    with pytest.raises(ConfigurationError, match="holds other tensors or shards"):
        made.derive(manifest, moved[1:])
