"""Windows of a stream: layouts of what is described, and what is refused."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest

from weightsync.errors import ConfigurationError, LayoutError, ManifestMismatch
from weightsync.model import Box
from weightsync.model.window import KnownWindows, StreamedTensors, WindowPart, measured, window_layout

WHOLE = WindowPart("layers.10.w", (3, 5), "float32", 256)
FIRST = WindowPart("layers.2.w", (2,), "bfloat16", 0)
EMPTY = WindowPart("empty", (0, 4), "float32", 512)
SCALAR = WindowPart("scalar", (), "int64", 512)
PART = WindowPart("big", (4, 6), "float32", 768, (1, 0), (3, 6))


def test_rows_are_in_the_manifests_order_and_point_back_to_their_parts() -> None:
    parts = (WHOLE, FIRST, EMPTY, SCALAR, PART)
    manifest, layout, order = window_layout(parts, 1024)
    names = [manifest[int(tensor)].name for tensor in layout.tensor]
    assert names == ["big", "layers.2.w", "layers.10.w", "scalar"]
    assert [parts[index].name for index in order] == names
    assert layout.offset.tolist() == [768, 0, 256, 512]
    assert [layout.box(row, manifest) for row in range(4)] == [
        Box((1, 0), (3, 6)),
        Box((0,), (2,)),
        Box((0, 0), (3, 5)),
        Box((), ()),
    ]
    assert layout.strides[0].tolist() == [24, 4]


def test_a_part_is_put_together_in_the_memory_of_its_tensor() -> None:
    _, layout, _ = window_layout((WHOLE, PART), 1024, assembled=True)
    assert layout.regions == (1024, 96)
    assert layout.region.tolist() == [1, 0]
    assert layout.offset.tolist() == [24, 256]


@pytest.mark.parametrize(
    ("parts", "nbytes", "error"),
    [
        ((WHOLE,), 256 + 59, LayoutError),
        ((WHOLE, WHOLE), 1024, ConfigurationError),
        ((WindowPart("w", (1 << 62, 4), "float32", 0),), 1024, ConfigurationError),
        ((WindowPart("w", (2,), "complex", 0),), 1024, ConfigurationError),
        ((WindowPart("w\n", (2,), "int8", 0),), 1024, ConfigurationError),
    ],
)
def test_a_window_that_is_impossible_is_refused(parts: tuple[WindowPart, ...], nbytes: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        window_layout(parts, nbytes)


def test_parts_of_two_tensors_in_a_window_are_refused() -> None:
    other = WindowPart("huge", (4, 6), "float32", 256, (1, 0), (3, 6))
    with pytest.raises(LayoutError, match="two"):
        window_layout((PART, other), 1024, assembled=True)


@pytest.mark.parametrize(
    "forged",
    [
        {"offset": -256},
        {"offset": 100},
        {"starts": (0,)},
        {"starts": (0, 0), "stops": (0, 5)},
        {"starts": (0, 0), "stops": (4, 5)},
        {"starts": (-1, 0), "stops": (3, 5)},
        {"starts": (0,), "stops": (3,)},
        {"shape": (-3, 5)},
    ],
)
def test_a_forged_part_is_refused(forged: dict[str, object]) -> None:
    fields = {"name": "w", "shape": (3, 5), "dtype": "float32", "offset": 0} | forged
    part = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=WindowPart)
    with pytest.raises(LayoutError):
        window_layout((part,), 1024)
    with pytest.raises(LayoutError):
        measured((part,))


def test_digests_add_up_over_the_parts_of_a_tensor() -> None:
    streamed = StreamedTensors()
    streamed.add_window(measured((WindowPart("b", (4, 2), "int8", 0, (0, 0), (3, 2)),)), [2**64 - 1])
    assert not streamed.complete("b")
    streamed.add_window(measured((FIRST, EMPTY, WindowPart("b", (4, 2), "int8", 0, (3, 0), (4, 2)))), [5, 0, 3])
    assert streamed.complete("b")
    manifest, digests = streamed.end()
    assert [spec.name for spec in manifest] == ["b", "empty", "layers.2.w"]
    assert digests.dtype == np.uint64 and digests.tolist() == [2, 0, 5]


def test_a_window_counts_as_its_parts_do() -> None:
    first, last = ((WindowPart("big", (4, 6), "float32", 0, (a, 0), (b, 6)),) for a, b in ((0, 1), (3, 4)))
    windows: list[tuple[WindowPart, ...]] = [(WHOLE, FIRST, EMPTY), (*first, PART), last]
    known = KnownWindows(lambda parts, _: measured(parts))
    for _ in range(2):  # the second time they are known
        apart, together = StreamedTensors(), StreamedTensors()
        for number, window in enumerate(windows):
            digests = [2**64 - 1 - index for index in range(len(window))]
            together.add_window(known.get(number, window, 1024), digests)
            for part, digest in zip(window, digests, strict=True):
                apart.add_window(measured((part,)), [digest])
        assert together.nbytes == apart.nbytes == 60 + 4 + 96
        (manifest, totals), (same, expected) = together.end(), apart.end()
        assert manifest == same
        assert totals.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="shorter"):
        StreamedTensors().add_window(measured(windows[0]), [0])


def test_a_window_is_worked_on_once_until_it_changes() -> None:
    worked: list[tuple[tuple[WindowPart, ...], int]] = []

    def work(parts: tuple[WindowPart, ...], nbytes: int) -> int:
        worked.append((parts, nbytes))
        return len(worked)

    known, same = KnownWindows(work), WindowPart("empty", (0, 4), "float32", 512)
    asked = [(0, EMPTY, 512), (1, FIRST, 512), (0, same, 512), (1, FIRST, 1024), (1, WHOLE, 1024), (0, EMPTY, 512)]
    assert [known.get(number, (part,), nbytes) for number, part, nbytes in asked] == [1, 2, 1, 3, 4, 1]
    assert worked == [((EMPTY,), 512), ((FIRST,), 512), ((FIRST,), 1024), ((WHOLE,), 1024)]
    known.end(1)
    assert [known.get(0, (EMPTY,), 512), known.get(1, (WHOLE,), 1024)] == [1, 5]


def test_what_is_known_of_windows_goes_with_its_owner() -> None:
    known = KnownWindows(window_layout)
    layout = weakref.ref(known.get(0, (WHOLE,), 1024)[1])
    assert layout() is not None
    del known
    gc.collect()
    assert layout() is None


@pytest.mark.parametrize(
    "parts", [[FIRST, FIRST], [EMPTY, EMPTY], [PART, PART, PART], [PART, WindowPart("big", (4, 6), "int8", 0, (0, 0), (1, 6))]]
)
def test_a_tensor_comes_once_and_as_one_tensor(parts: list[WindowPart]) -> None:
    streamed = StreamedTensors()
    with pytest.raises(ManifestMismatch, match="twice"):
        for part in parts:
            streamed.add_window(measured((part,)), [0])
    with pytest.raises(ManifestMismatch, match="twice"):
        StreamedTensors().add_window(measured(tuple(parts)), [0] * len(parts))


def test_a_tensor_that_did_not_come_whole_ends_nothing() -> None:
    streamed = StreamedTensors()
    streamed.add_window(measured((PART,)), [0])
    with pytest.raises(ManifestMismatch, match="middle of big"):
        streamed.end()
