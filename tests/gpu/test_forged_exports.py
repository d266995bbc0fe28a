"""What an owner says of its device memory is checked before anything is mapped or read. No GPU is needed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from weightsync.errors import ProtocolError
from weightsync.transports.cuda.region import Exported

_GOOD = Exported(
    process="p",
    device=0,
    count=1,
    layout_digest="d",
    handles=(b"h" * 64, b"i" * 64),
    ids=(7, 8),
    bases=(1 << 40, 2 << 40),
    sizes=(1000, 2000),
    columns=np.array([[0, 1], [0, 500], [1000, 1500]], "<i8").tobytes(),
)


def test_honest_columns_pass() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(_GOOD), type=Exported)
    assert again.regions().tolist() == [[0, 1], [0, 500], [1000, 1500]]


@pytest.mark.parametrize(
    "columns",
    [
        [[0, 2], [0, 0], [1, 1]],
        [[0, -1], [0, 0], [1, 1]],
        [[0, 1], [-1, 0], [1, 1]],
        [[0, 1], [0, 501], [1, 1500]],
        [[0, 1], [0, (1 << 63) - 1], [1, (1 << 63) - 1]],
        [[0, 1], [0, 0], [-5, 1]],
    ],
)
def test_regions_outside_their_allocations_are_refused(columns: list[list[int]]) -> None:
    with pytest.raises(ProtocolError):
        msgspec.structs.replace(_GOOD, columns=np.array(columns, "<i8").tobytes()).regions()


@pytest.mark.parametrize(
    "change",
    [{"columns": b"123"}, {"handles": (b"h" * 64,)}, {"handles": (b"h" * 64, b"i" * 63)}, {"sizes": (1000,)}, {"ids": (7,)}],
    ids=str,
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        msgspec.structs.replace(_GOOD, **change).regions()
