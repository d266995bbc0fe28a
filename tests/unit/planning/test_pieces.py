"""Pieces on the wire: what arrives is checked against the layout that it is to fill, field by field."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.unit.planning.simulation import layout_of, ranks_of, spec, targets_of

from weightsync.errors import PlanMismatch
from weightsync.model import Manifest
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import plan_transfer
from weightsync.protocol.messages import PieceColumns
from weightsync_bench.sharding import fsdp

MANIFEST = Manifest([spec("a", 6, 4), spec("b", 3, dtype="bfloat16")])
TARGET = layout_of(MANIFEST, [("a", (0, 0), (6, 2)), ("a", (0, 2), (6, 4)), ("b", (0,), (3,))])
SOURCES = {f"s{index}": layout for index, layout in enumerate(fsdp(MANIFEST, 3))}
PIECES = plan_transfer(MANIFEST, ranks_of(SOURCES), targets_of({"t": TARGET})).pieces("t")
COLUMNS = PIECES.to_columns()
WIDE = {"source_offset", "source_strides", "starts", "stops"}


def changed(name: str, change: Callable[[np.ndarray[tuple[int], np.dtype[np.int64]]], None]) -> PieceColumns:
    kind = "<i8" if name in WIDE else "<i4"
    values = np.frombuffer(getattr(COLUMNS, name), kind).astype(np.int64)
    change(values)
    return msgspec.structs.replace(COLUMNS, **{name: values.astype(kind).tobytes()})


def setter(at: int, value: int) -> Callable[[np.ndarray[tuple[int], np.dtype[np.int64]]], None]:
    def change(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        values[at] = value

    return change


def received(columns: PieceColumns, sources: int = 3) -> Pieces:
    return Pieces.from_columns(MANIFEST, TARGET, sources, columns)


def test_what_was_sent_arrives() -> None:
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(COLUMNS), type=PieceColumns)
    pieces = received(there)
    assert pieces.digest == PIECES.digest
    assert PIECES.sources == ("s0", "s1", "s2")
    assert pieces.sources == ("0", "1", "2")
    for name in ("source", "source_region", "source_offset", "source_strides", "target_row", "starts", "stops"):
        mine, theirs = getattr(PIECES, name), getattr(pieces, name)
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert np.array_equal(mine, theirs)


def test_column_types_are_as_documented() -> None:
    assert len(PIECES) == 9
    for name in ("source", "source_region", "target_row"):
        assert getattr(PIECES, name).dtype == np.int32
    for name in WIDE:
        assert getattr(PIECES, name).dtype == np.int64
    assert PIECES.source_strides.shape == PIECES.starts.shape == PIECES.stops.shape == (9, 2)


@pytest.mark.parametrize("name", ["source", "source_region", "source_offset", "source_strides", "target_row", "starts", "stops"])
def test_any_change_changes_the_digest(name: str) -> None:
    values = getattr(PIECES, name).copy()
    values.flat[0] += 1
    assert msgspec.structs.asdict(COLUMNS)[name] != values.tobytes()
    assert Pieces(**{**vars_of(PIECES), name: values}).digest != PIECES.digest


def vars_of(pieces: Pieces) -> dict[str, object]:
    return {name: getattr(pieces, name) for name in Pieces.__dataclass_fields__}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (msgspec.structs.replace(COLUMNS, rows=-1), "does not fit"),
        (msgspec.structs.replace(COLUMNS, rows=1 << 60), "wrong size for"),
        (msgspec.structs.replace(COLUMNS, dims=3), "does not fit"),
        (msgspec.structs.replace(COLUMNS, stops=COLUMNS.stops[:-1]), "'stops'"),
        (msgspec.structs.replace(COLUMNS, source=COLUMNS.source + b"\0\0\0\0"), "'source'"),
        (changed("source", setter(0, 3)), "source that does not exist"),
        (changed("source", setter(0, -1)), "source that does not exist"),
        (changed("source_region", setter(0, -1)), "negative"),
        (changed("source_offset", setter(0, -8)), "negative"),
        (changed("source_strides", setter(0, -8)), "negative"),
        (changed("source_offset", setter(0, 2**63 - 1)), "impossibly far"),
        (changed("source_strides", setter(0, 2**62)), "impossibly far"),
        (changed("target_row", setter(-1, 3)), "do not exist"),
        (changed("target_row", setter(0, 1)), "out of order"),
        (changed("starts", setter(0, -1)), "outside"),
        (changed("stops", setter(1, 3)), "outside"),
        (changed("stops", setter(0, 0)), "empty or outside"),
        (changed("stops", setter(0, 1)), r"1 of 3 layout rows exactly; row 0 would receive 10 of 12"),
        (changed("stops", setter(0, 3)), r"row 0 would receive 14 of 12"),
        (PieceColumns(0, 2, b"", b"", b"", b"", b"", b"", b""), "without pieces"),
    ],
)
def test_nothing_is_believed(columns: PieceColumns, said: str) -> None:
    with pytest.raises(PlanMismatch, match=said):
        received(columns)


def test_sources_must_be_as_many_as_said() -> None:
    with pytest.raises(PlanMismatch, match="there are 2"):
        received(COLUMNS, 2)


def test_a_row_that_gets_nothing() -> None:
    short = {name: getattr(COLUMNS, name) for name in ("source", "source_region", "target_row")}
    long = {name: getattr(COLUMNS, name) for name in WIDE}
    width = {"source_offset": 8}
    fewer = {n: v[:-12] for n, v in short.items()} | {n: v[: -3 * width.get(n, 16)] for n, v in long.items()}
    with pytest.raises(PlanMismatch, match="1 of 3 layout rows"):
        received(PieceColumns(rows=6, dims=2, **fewer))
