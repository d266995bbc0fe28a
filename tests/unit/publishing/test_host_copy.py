"""Placing shards on a region (bit for bit, or converted as asked, with the right digests), and the staging ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.tensors.samples import DTYPES, MEMORIES, random_bits, raw, stored

from weightsync.errors import Aborted, LayoutError
from weightsync.model import Layout, Manifest
from weightsync.publishing.copied_shards import HostPublisher
from weightsync.tensors.digest import digest_box, digest_rows
from weightsync.tensors.memory_layout import layout_in_place, packed_layout
from weightsync.tensors.shards import Shard, shard, shards_of, torch_dtype
from weightsync.tensors.staging import Staging

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (33,), (3, 5), (2, 3, 4), (0, 4), (5, 0), (2, 1, 3, 9), (3, 8200))


def placed(manifest: Manifest, shards: list[Shard]) -> tuple[Layout, np.ndarray[tuple[int], np.dtype[np.uint8]], HostPublisher]:
    layout = packed_layout(manifest, shards)
    region = np.zeros(max(layout.regions[0], 1), np.uint8)
    return layout, region, HostPublisher(manifest, shards, layout, region.ctypes.data)


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_bit_arrives(memory: str) -> None:
    generator = np.random.default_rng(23)
    state = {f"{i}.{dtype}": stored(random_bits(shape, dtype, generator), memory)
             for i, shape in enumerate(SHAPES) for dtype in DTYPES}  # fmt: skip
    manifest, shards = shards_of(state)
    layout, region, placer = placed(manifest, shards)
    for _ in range(2):
        digests = placer.place()
        for row, one in enumerate(shards):
            first = int(layout.offset[row])
            expected = raw(state[one.name])
            assert np.array_equal(region[first : first + expected.size], expected.reshape(-1)), one.name
            assert int(digests[row]) == digest_box(state[one.name], one.shape, one.box.starts), one.name
        for tensor in state.values():  # the next version
            tensor.copy_(random_bits(tuple(tensor.shape), tensor.dtype, generator))


@pytest.mark.parametrize(
    ("shape", "memory"),
    [((), "plain"), ((7,), "shifted"), ((600_001,), "plain"), ((3, 300_000), "transposed"), ((2, 3, 5), "sliced")],
)
@pytest.mark.parametrize(("own", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_conversion_is_torchs(shape: tuple[int, ...], memory: str, own: torch.dtype, wanted: torch.dtype) -> None:
    tensor = stored(torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(own), memory)
    manifest, shards = shards_of({"t": tensor}, dtype={"t": wanted})
    _, region, placer = placed(manifest, shards)
    digests = placer.place()
    expected = tensor.to(wanted).contiguous()
    assert np.array_equal(region[: expected.nbytes], raw(expected).reshape(-1))
    assert int(digests[0]) == digest_box(expected, shape, (0,) * len(shape))


def test_a_box_of_a_larger_tensor() -> None:
    whole = torch.randn(6, 7, 5)
    one = shard("t", whole[2:5, :, 1:4], (6, 7, 5), (2, 0, 1))
    manifest, _ = shards_of({"t": whole})
    layout, region, placer = placed(manifest, [one])
    digest = int(placer.place()[0])
    rest = digest_box(whole[:2], whole.shape, (0, 0, 0)) + digest_box(whole[5:], whole.shape, (5, 0, 0))
    sides = digest_box(whole[2:5, :, :1], whole.shape, (2, 0, 0)) + digest_box(whole[2:5, :, 4:], whole.shape, (2, 0, 4))
    assert (digest + rest + sides) % 2**64 == digest_box(whole, whole.shape, (0, 0, 0))
    read = np.zeros(1, np.uint64)
    digest_rows(manifest, layout, (region.ctypes.data,), 0, 1, read)
    assert int(read[0]) == digest


def test_the_digest_is_of_the_trainers_memory() -> None:
    """An error on the way to the region is found, because the digest was not taken from the region."""
    manifest, shards = shards_of({"t": torch.randn(100, 100)})
    layout, region, placer = placed(manifest, shards)
    digests = placer.place()
    region[77] ^= 4
    read = np.zeros(1, np.uint64)
    digest_rows(manifest, layout, (region.ctypes.data,), 0, 1, read)
    assert read[0] != digests[0]


def test_memory_may_move_between_rounds() -> None:
    model = torch.nn.Linear(3, 4)
    manifest, shards = shards_of(dict(model.named_parameters()))
    _, region, placer = placed(manifest, shards)
    placer.place()
    shards[1].tensor.set_(torch.full((3, 4), 2.5).t())  # type: ignore[call-overload]
    placer.place()
    assert (region.view(np.float32)[16:28] == 2.5).all()


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_stops_when_told(wanted: torch.dtype) -> None:
    manifest, shards = shards_of({"t": torch.zeros(1 << 20)}, dtype=wanted)
    _, _, placer = placed(manifest, shards)
    with pytest.raises(Aborted, match="mixture"):
        placer.place(np.ones(1, np.int8))
    placer.place(np.zeros(1, np.int8))


def staged() -> tuple[dict[str, torch.Tensor], Manifest, Layout]:
    """A staging layout of three buckets, made by hand."""
    generator = np.random.default_rng(2)
    state = {f"t{i}": random_bits(shape, DTYPES[i % len(DTYPES)], generator) for i, shape in enumerate(SHAPES)}
    manifest, shards = shards_of(state)
    packed = packed_layout(manifest, shards)
    bucket = np.arange(len(packed), dtype=np.int32) * 3 // len(packed)
    first = np.array([packed.offset[bucket == k].min() for k in range(3)])
    ends = packed.ends(manifest)
    sizes = tuple(int(ends[bucket == k].max() - first[k]) for k in range(3))
    offset = packed.offset - first[bucket]
    return state, manifest, Layout(manifest, packed.tensor, packed.starts, packed.stops, bucket, offset, packed.strides, sizes)


def test_staging_holds_whole_tensors_bucket_by_bucket() -> None:
    state, manifest, layout = staged()
    staging = Staging(manifest, layout)
    assert staging.buckets == 3
    assert staging.addresses[0] == staging.addresses[2] != staging.addresses[1]
    assert staging.nbytes == max(layout.regions[::2]) + max(layout.regions[1::2])
    assert Staging(manifest, layout, buffers=1).nbytes == max(layout.regions)
    assert all(address % 4096 == 0 for address in staging.addresses)
    seen: set[str] = set()
    for bucket in range(3):
        for name, tensor in staging.tensors(bucket):
            spec = manifest[manifest.index[name]]
            assert tuple(tensor.shape) == spec.shape
            assert tensor.dtype == torch_dtype(spec.dtype)
            tensor.copy_(state[name])
            seen.add(name)
        out = np.zeros(len(layout), np.uint64)
        digest_rows(manifest, layout, staging.addresses, 0, len(layout), out)
        for row in np.flatnonzero(layout.region == bucket).tolist():
            spec = manifest[int(layout.tensor[row])]
            assert int(out[row]) == digest_box(state[spec.name], spec.shape, (0,) * len(spec.shape))
    assert seen == set(state)  # tensors without elements too
    with pytest.raises(LayoutError, match="bucket 3 does not exist; there are 3"):
        staging.tensors(3)


def test_lent_tensors_outlive_the_ring() -> None:
    _, manifest, layout = staged()
    staging = Staging(manifest, layout)
    lent = staging.tensors(1)
    staging.close()
    staging.close()
    for _, tensor in lent:
        tensor.zero_()
    with pytest.raises(LayoutError):
        staging.tensors(1)


def test_one_bucket_takes_one_buffer() -> None:
    manifest, shards = shards_of({"t": torch.zeros(5)})
    assert Staging(manifest, packed_layout(manifest, shards)).nbytes == 64


def test_staging_refuses_parts_and_strides() -> None:
    manifest, shards = shards_of({"t": torch.zeros(4, 6)})
    part = packed_layout(manifest, [shard("t", torch.zeros(2, 6), (4, 6), (0, 0))])
    with pytest.raises(LayoutError, match="whole tensors"):
        Staging(manifest, part)
    turned, _ = layout_in_place(manifest, [Shard("t", (4, 6), shards[0].box, torch.zeros(6, 4).t())], None)
    with pytest.raises(LayoutError, match="contiguous"):
        Staging(manifest, turned)
