"""Records are compressed where that is faster by measurement, arrive whole either way, and a wrong one is an error."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import zstandard

from weightsync.errors import ProtocolError
from weightsync.transports.net.compression import Compression, packed, unpacked
from weightsync.transports.net.encrypted_records import KEY_BYTES, LENGTH_BYTES, RECORD_BYTES, TAG_BYTES, Opening, Sealing


class Link:
    """A network of so many seconds a byte, and a processor that compresses a byte in so many."""

    def __init__(self, wire: float, processor: float) -> None:
        self.now, self.wire, self.processor = 0.0, wire, processor
        self.compression = Compression(self.clock)
        self.wired = 0

    def clock(self) -> float:
        """The first call of each pair begins a trial, the second ends it."""
        self.now += 65536 * self.processor / 2
        return self.now

    def send(self, plain: bytes) -> bool:
        view = memoryview(plain)
        content = self.compression.pack(view)
        self.wired += len(content)
        took = max(len(content) * self.wire, len(plain) * self.processor if len(content) < len(plain) else 0.0)
        self.compression.sent(view, took)
        return len(content) < len(plain)


def words(share: float = 1.0, nbytes: int = RECORD_BYTES) -> bytes:
    """Lists of changed words of bfloat16 weights, or the weights."""
    numbers = np.random.default_rng(3)
    weights = (numbers.standard_normal(nbytes // 2).astype(np.float32) * 0.02).view(np.uint32) >> 16
    if share == 1.0:
        return weights.astype(np.uint16).tobytes()
    lists, size = [], 0
    while size < nbytes:
        places = np.flatnonzero(numbers.random(4096) < share).astype(np.uint16)
        lists.append(places.tobytes() + weights[places].astype(np.uint16).tobytes())
        size += 4 * len(places)
    return b"".join(lists)[:nbytes]


def test_a_changed_word_of_a_hundred_takes_less_than_three_bytes() -> None:
    plain = words(0.01)
    assert len(packed(memoryview(plain))) * 4 / len(plain) < 3


@pytest.mark.parametrize("plain", [words(), words(0.01), secrets.token_bytes(RECORD_BYTES), b"ab" * 40000], ids=len)
def test_what_is_packed_is_unpacked(plain: bytes) -> None:
    into = bytearray(len(plain))
    unpacked(memoryview(packed(memoryview(plain))), memoryview(into))
    assert into == plain


@pytest.mark.parametrize(
    "content",
    [b"nothing", packed(memoryview(bytes(998))), packed(memoryview(bytes(1002))), packed(memoryview(words()))[:-9], b""],
)
def test_what_is_no_record_of_that_size_is_an_error(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="compressed"):
        unpacked(memoryview(content), memoryview(bytearray(1000)))


def test_a_frame_that_hides_its_size_is_an_error() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(ProtocolError, match="another size"):
        unpacked(memoryview(hidden), memoryview(bytearray(1000)))


def test_a_slow_network_gets_compressed_records_and_a_fast_one_none() -> None:
    plain = words(0.01)
    slow, fast = Link(wire=8e-9, processor=5e-9), Link(wire=0.3e-9, processor=5e-9)
    sent = [slow.send(plain) for _ in range(400)]
    assert not any(sent[:8]), "the first ones fill the system's buffers"
    assert sum(sent) > 350
    assert slow.wired < 0.8 * 400 * len(plain)
    assert not any(fast.send(plain) for _ in range(400))


def test_what_does_not_get_shorter_goes_as_it_is() -> None:
    slow = Link(wire=8e-9, processor=1e-9)
    assert not any(slow.send(secrets.token_bytes(RECORD_BYTES)) for _ in range(80))


def test_a_network_that_becomes_fast_again_is_noticed() -> None:
    link, plain = Link(wire=8e-9, processor=2e-9), words(0.01)
    assert any([link.send(plain) for _ in range(100)][-4:])
    link.wire = 0.3e-9
    later = [link.send(plain) for _ in range(600)]
    assert not any(later[400:])


def test_a_network_that_becomes_slow_is_noticed() -> None:
    link, plain = Link(wire=0.3e-9, processor=2e-9), words(0.01)
    assert not any(link.send(plain) for _ in range(100))
    link.wire = 8e-9
    assert all([link.send(plain) for _ in range(100)][-4:])


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compressed_record_opens_and_is_authenticated_before_it_is_unpacked(in_place: bool) -> None:
    key = secrets.token_bytes(KEY_BYTES)
    sealing, opening = Sealing(key), Opening(key, "the publisher")
    sealing.compression.active = True
    plain = words(0.01)
    record = bytes(sealing.seal(memoryview(plain)))
    nbytes, following = opening.sizes(record[:LENGTH_BYTES])
    assert (nbytes, following) == (len(plain), len(record) - LENGTH_BYTES)
    assert following < 0.8 * len(plain) + TAG_BYTES
    into = memoryview(bytearray(len(plain))) if in_place else None
    assert opening.open(record[:LENGTH_BYTES], memoryview(record)[LENGTH_BYTES:], into) == plain
    if into is not None:
        assert into == plain
    short = bytes(sealing.seal(memoryview(plain)[:1000]))
    assert opening.sizes(short[:LENGTH_BYTES]) == (1000, 1000 + TAG_BYTES)
