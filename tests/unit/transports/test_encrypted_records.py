"""Records of an encrypted channel: what was sealed opens once, in order, at the other end, and nothing else does."""

from __future__ import annotations

import secrets

import pytest

from weightsync.errors import AuthenticationError
from weightsync.transports.net import encrypted_records
from weightsync.transports.net.encrypted_records import KEY_BYTES, LENGTH_BYTES, RECORD_BYTES, TAG_BYTES, Opening, Sealing


@pytest.fixture
def ends() -> tuple[Sealing, Opening]:
    key = secrets.token_bytes(KEY_BYTES)
    return Sealing(key), Opening(key, "the owner")


def _sealed(sealing: Sealing, *plains: bytes) -> list[tuple[bytes, bytes]]:
    records = [bytes(sealing.seal(memoryview(plain))) for plain in plains]
    return [(record[:LENGTH_BYTES], record[LENGTH_BYTES:]) for record in records]


def test_records_open_in_order(ends: tuple[Sealing, Opening]) -> None:
    sealing, opening = ends
    plains = [b"a", secrets.token_bytes(1000), secrets.token_bytes(RECORD_BYTES), b"a"]
    found = _sealed(sealing, *plains)
    assert len({sealed for _, sealed in found}) == 4, "equal records are sealed differently"
    for plain, (length, sealed) in zip(plains, found, strict=True):
        assert plain not in sealed or len(plain) == 1
        assert opening.sizes(length) == (len(plain), len(sealed))
        assert len(sealed) == len(plain) + TAG_BYTES
        assert opening.open(length, memoryview(sealed)) == plain


@pytest.mark.parametrize("harm", ["flip", "flip the tag", "repeat", "leave out", "swap", "shorten", "send back"])
def test_whatever_is_done_to_records_is_noticed(ends: tuple[Sealing, Opening], harm: str) -> None:
    sealing, opening = ends
    first, second = _sealed(sealing, b"first record", b"second one, longer")
    flipped = bytearray(first[1])
    flipped[0 if harm == "flip" else -1] ^= 1
    shorter = len(first[1]) - TAG_BYTES - 1
    arrived = {
        "flip": [(first[0], bytes(flipped))],
        "flip the tag": [(first[0], bytes(flipped))],
        "repeat": [first, first],
        "leave out": [second],
        "swap": [second, first],
        "shorten": [(2 * shorter.to_bytes(4, "little"), first[1][:-1])],
        "send back": _sealed(Sealing(secrets.token_bytes(KEY_BYTES)), b"first record"),  # the other direction's key
    }[harm]
    *good, (length, sealed) = arrived
    if harm != "swap":
        for one in good:
            opening.open(one[0], memoryview(one[1]))
    else:
        length, sealed = good[0]
    with pytest.raises(AuthenticationError, match="not the one that the owner sent"):
        opening.open(length, memoryview(sealed))


@pytest.mark.parametrize(("plain", "content"), [(0, 0), (RECORD_BYTES + 1,) * 2, ((1 << 32) - 1,) * 2, (7, 8), (8, 0)])
def test_lengths_are_checked_before_anything_is_allocated(ends: tuple[Sealing, Opening], plain: int, content: int) -> None:
    with pytest.raises(AuthenticationError, match=f"{plain:,} bytes"):
        ends[1].sizes(plain.to_bytes(4, "little") + content.to_bytes(4, "little"))


def test_keys_follow_each_other(ends: tuple[Sealing, Opening], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_records, "RECORDS_PER_KEY", 3)
    sealing, opening = ends
    keys = set()
    for number in range(10):
        (record,) = _sealed(sealing, bytes([number]) * 20)
        assert opening.open(record[0], memoryview(record[1])) == bytes([number]) * 20
        keys.add(sealing._key)
    assert len(keys) == 4
