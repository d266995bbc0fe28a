"""Messages between publisher and reader: each transport has its own set, without an edit of the common ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, ProtocolError, StaleSource
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.messages import (
    ANSWER_BYTES,
    ControlMessage,
    Fail,
    Messages,
    Ready,
    next_answer,
    next_control,
    reported,
    send_request,
)


class Resize(ControlMessage, frozen=True):
    """A message of somebody else's transport."""

    nbytes: int


MESSAGES: Messages = msgspec.msgpack.Decoder(Ready | Fail | Resize)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end, "the peer") for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_a_transport_brings_messages_of_its_own(ends: tuple[Channel, Channel]) -> None:
    for message in (Resize(8), Ready("cuda:0")):
        send_request(ends[0], message, Deadline(5))
        assert next_control(ends[1], ANSWER_BYTES, Deadline(5), MESSAGES) == message


def test_a_message_of_another_transport_is_refused(ends: tuple[Channel, Channel]) -> None:
    send_request(ends[0], Resize(8), Deadline(5))
    with pytest.raises(ProtocolError, match="cannot be read"):
        next_control(ends[1], ANSWER_BYTES, Deadline(5))


def test_an_answer_is_told_from_a_failure_that_the_publisher_reports(ends: tuple[Channel, Channel]) -> None:
    send_request(ends[0], Ready("cuda:1"), Deadline(5))
    assert next_answer(ends[1], ANSWER_BYTES, Deadline(5)) == Ready("cuda:1")
    send_request(ends[0], Fail("StaleSource", "version 3 is gone"), Deadline(5))
    with pytest.raises(StaleSource, match="version 3 is gone") as failed:
        next_answer(ends[1], ANSWER_BYTES, Deadline(5))
    assert reported(failed.value)
    with pytest.raises(DeadlineExceeded) as late:
        next_answer(ends[1], ANSWER_BYTES, Deadline(0.05))
    assert not reported(late.value)
