"""Every message: there and back unchanged; cut off, changed or lengthened it is refused by one error and nothing else."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from weightsync.errors import ProtocolError
from weightsync.model import TensorSpec
from weightsync.model.layout import LayoutColumns
from weightsync.protocol import lora_messages, messages, store_messages, update_messages
from weightsync.protocol.fields import Message
from weightsync.protocol.messages import Answer, Body, Call, Frame, Hello, SourceAddress, decode, encode

BODIES: tuple[type[Any], ...] = get_args(Body)
FRAMES: tuple[type[Any], ...] = get_args(Frame)
LARGE = (1 << 64) - 1


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold on the wire."""
    match kind:
        case inspect.StructType():
            return st.builds(kind.cls, **{field.name: _values(field.type) for field in kind.fields})
        case inspect.UnionType():
            return st.one_of([_values(one) for one in kind.types])
        case inspect.VarTupleType():
            return st.lists(_values(kind.item_type), min_size=kind.min_length or 0, max_size=min(3, kind.max_length or 3)).map(
                tuple
            )
        case inspect.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=3)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.IntType():
            return st.integers(-(1 << 63) if kind.ge is None else kind.ge, LARGE if kind.le is None else kind.le)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le)
        case inspect.StrType():
            return st.text(max_size=8) if kind.pattern is None else st.from_regex(kind.pattern)
        case inspect.BytesType():
            return st.binary(max_size=24)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise TypeError(f"no values for {kind}")


def _frames(kind: type[Any]) -> st.SearchStrategy[Any]:
    made = _values(inspect.type_info(kind))
    return made.map(lambda body: Answer(1, body)) if kind in BODIES else made


ALL: list[type[Any]] = [*BODIES, *(kind for kind in FRAMES if kind not in (Call, Answer)), Call, Answer]
MADE = {kind: _frames(kind) for kind in ALL}
"""Once: Hypothesis takes longer to look through a new strategy than to draw from one."""
several = settings(max_examples=25, suppress_health_check=list(HealthCheck))


def test_every_message_of_the_module_is_among_them() -> None:
    structs = {
        found
        for found in (vars(messages) | vars(store_messages) | vars(update_messages) | vars(lora_messages)).values()
        if isinstance(found, type) and issubclass(found, Message)
    }
    assert structs - {Message} == set(ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@several
@given(data=st.data())
def test_there_and_back(kind: type[Any], data: st.DataObject) -> None:
    frame = data.draw(MADE[kind])
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@several
@given(data=st.data())
def test_cut_off_or_lengthened_it_is_refused(kind: type[Any], data: st.DataObject) -> None:
    whole = encode(data.draw(MADE[kind]))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0", whole + whole):
        with pytest.raises(ProtocolError):
            decode(wrong)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@several
@given(data=st.data())
def test_changed_it_is_another_message_or_refused(kind: type[Any], data: st.DataObject) -> None:
    whole = bytearray(encode(data.draw(MADE[kind])))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = decode(bytes(whole))
    except ProtocolError:
        return
    assert isinstance(frame, FRAMES)
    repr(frame)


@pytest.mark.parametrize("count", [1 << 21, (1 << 32) - 1])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Hello, "manifest"),
        (Hello, "offers"),
        (Hello, "transports"),
        (SourceAddress, "offers"),
        (messages.PlanSlice, "sources"),
        (LayoutColumns, "regions"),
        (TensorSpec, "shape"),
        (TensorSpec, "aliases"),
        (messages.Prepared, "transports"),
    ],
)
def test_a_count_that_nothing_has_is_refused_at_its_head(kind: type[Any], field: str, count: int) -> None:
    # Nine bytes announce the items; none follow. Without a bound the decoder would read on, and hold what it has read.
    head = b"\x81" + msgspec.msgpack.encode(field) + b"\xdd" + count.to_bytes(4, "big")
    with pytest.raises(msgspec.ValidationError, match="of length <="):
        msgspec.msgpack.decode(head, type=kind)


@pytest.mark.parametrize("number", [-1, 1 << 63, LARGE])
def test_no_version_is_beyond_what_a_region_can_hold(number: int) -> None:
    for body in (messages.Publish(number), messages.Place(number), messages.Move(number)):
        with pytest.raises(ProtocolError):
            decode(encode(Call(1, 1.0, body)))


def _floats(kind: inspect.Type, where: str) -> dict[str, inspect.FloatType]:
    """Every number with a fraction in messages of this kind, by where it is."""
    match kind:
        case inspect.StructType():
            parts = [_floats(field.type, f"{where}.{field.name}") for field in kind.fields]
        case inspect.UnionType():
            parts = [_floats(one, where) for one in kind.types]
        case inspect.VarTupleType():
            parts = [_floats(kind.item_type, where)]
        case inspect.DictType():
            parts = [_floats(kind.value_type, where)]
        case inspect.FloatType():
            return {where: kind}
        case _:
            return {}
    return {name: found for part in parts for name, found in part.items()}


def test_no_number_of_a_message_may_be_nan_or_infinite() -> None:
    found = {name: one for kind in ALL for name, one in _floats(inspect.type_info(kind), kind.__name__).items()}
    assert len(found) > 10
    assert not [name for name, one in found.items() if one.ge is None or one.le is None]
    assert not [name for name, one in found.items() if "seconds" in name and one.ge != 0]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_seconds_that_nothing_takes_are_refused(seconds: float) -> None:
    moved = messages.Moved(1, b"", seconds, 0.0, 0.0, "installed")
    for body in (moved, messages.Updated(moved, True, 0.0, 0.0), messages.Placed(b"", seconds)):
        with pytest.raises(ProtocolError):
            decode(encode(Answer(1, body)))
    with pytest.raises(ProtocolError):
        decode(encode(Call(1, seconds, messages.Resume())))


def test_the_kind_of_an_error_is_a_name() -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Call(1, 1.0, messages.CannotPublish(1, "x" * 201, ""))))
