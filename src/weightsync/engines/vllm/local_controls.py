"""Control of a vLLM engine object in another process of this machine, or in this process, without HTTP.

``vllm.LLM`` and ``AsyncLLM`` usually run their workers in other processes. Rank 0's worker reaches the process that owns the
engine over an authenticated Unix socket. If the two are the same process, it calls the controls directly.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from weightsync.closing import Closeable
from weightsync.deadline import Deadline
from weightsync.engines.vllm.controls import Controls, HttpControls
from weightsync.errors import ConfigurationError, DeadlineExceeded, PeerLost, ProtocolError, from_wire, to_wire
from weightsync.model import PauseMode
from weightsync.protocol.messages import UNREADABLE

if TYPE_CHECKING:
    from weightsync.transports.net.channel import Channel

# Transports are imported late, because they import numba, and vLLM's CPU build does not start in a process that loaded numba.

__all__ = ["ControlsServer", "LocalControls", "controls_at", "is_local"]

_PREFIX = "weightsync-vllm-"
_PEER = "the process that owns vLLM's engine"
_LENGTH_BYTES = 4
_LONGEST = 1 << 16  # bytes of a message
_HELLO_SECONDS = 5.0

T = TypeVar("T")


class _ControlCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Literal["pause", "install", "flush", "label", "resume"]
    timeout: float
    mode: PauseMode = "abort"
    version: str = ""


class _ControlAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    flushed: bool = False
    failure: tuple[str, str] | None = None


_owned: dict[str, tuple[int, Controls]] = {}
"""Served controls by address, with the id of the process that serves them."""


def is_local(address: str) -> bool:
    """Return whether ``address`` is that of a :class:`ControlsServer`, not a server's URL."""
    return address.startswith(_PREFIX)


def controls_at(address: str) -> Controls:
    """Return the controls at ``address``: a server's URL, or the address of a :class:`ControlsServer`.

    Raises:
        ConfigurationError: It is neither.
    """
    if not is_local(address):
        return HttpControls(address)
    process, controls = _owned.get(address, (0, None))
    return controls if controls is not None and process == os.getpid() else LocalControls(address)


class ControlsServer(Closeable):
    """Serves ``controls`` to processes of this user that know :attr:`address`. Close it, or use it in a ``with``.

    Calls run one at a time. A call whose caller has given up before its turn is not run, so an engine that was paused meanwhile
    is not resumed by a call from before the pause.
    """

    def __init__(self, controls: Controls) -> None:
        from weightsync.transports.host.unix_socket import listen_local

        self._controls = controls
        self._turn = threading.Lock()
        self._running = ""
        key = secrets.token_bytes(32)
        self._listener, place = listen_local(_PREFIX, "vllm-controls", key, self._serve)
        self.address = f"{place}:{key.hex()}"
        _owned[self.address] = os.getpid(), controls

    def _serve(self, channel: Channel) -> None:
        call = _receive(channel, _ControlCall, Deadline(_HELLO_SECONDS))
        try:
            answer = _ControlAnswer(self._run_in_turn(channel, call))
        except Exception as error:  # noqa: BLE001 - sent to the caller
            answer = _ControlAnswer(failure=to_wire(error))
        _send(channel, answer, Deadline(_HELLO_SECONDS))

    def _run_in_turn(self, channel: Channel, call: _ControlCall) -> bool:
        deadline, name = Deadline(call.timeout), call.name
        if not self._turn.acquire(timeout=call.timeout):
            raise DeadlineExceeded(f"{name} could not start within {call.timeout:.3g} s: vLLM's {self._running} is still running")
        try:
            if not channel.peer_lives():
                raise PeerLost(f"the worker that requested {name} has given up")
            self._running = name
            return self._run(call, deadline.remaining(name))
        finally:
            self._turn.release()

    def _run(self, call: _ControlCall, timeout: float) -> bool:
        match call.name:
            case "pause":
                self._controls.pause(call.mode, timeout)
            case "install":
                self._controls.install(timeout)
            case "flush":
                return self._controls.flush(timeout)
            case "label":
                self._controls.label(call.version, timeout)
            case "resume":
                self._controls.resume(timeout)
        return False

    def close(self) -> None:
        """Stop serving. Idempotent."""
        _owned.pop(self.address, None)
        self._listener.close()


class LocalControls:
    """:class:`~weightsync.engines.vllm.controls.Controls` served by a :class:`ControlsServer` of another process.

    Raises:
        ConfigurationError: The address has no valid key. Methods raise the following errors.
        PeerLost: No process serves the address.
        AuthenticationError: The key is wrong.
        DeadlineExceeded: The time limit of a call passed.
        WeightSyncError: The controls raised it.
    """

    def __init__(self, address: str) -> None:
        self._place, _, key = address.partition(":")
        try:
            self._key = bytes.fromhex(key)
        except ValueError:
            raise ConfigurationError(f"{self._place!r} has no valid key of {_PEER}") from None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """See :meth:`Controls.pause`."""
        self._ask(_ControlCall("pause", timeout, mode))

    def install(self, timeout: float) -> None:
        """See :meth:`Controls.install`."""
        self._ask(_ControlCall("install", timeout))

    def flush(self, timeout: float) -> bool:
        """See :meth:`Controls.flush`."""
        return self._ask(_ControlCall("flush", timeout))

    def label(self, version: str, timeout: float) -> None:
        """See :meth:`Controls.label`."""
        self._ask(_ControlCall("label", timeout, version=version))

    def resume(self, timeout: float) -> None:
        """See :meth:`Controls.resume`."""
        self._ask(_ControlCall("resume", timeout))

    def _ask(self, call: _ControlCall) -> bool:
        from weightsync.transports.host.unix_socket import connect_local

        deadline = Deadline(call.timeout)
        try:
            with closing(connect_local(_PREFIX, self._place, self._key, _PEER, deadline)) as channel:
                _send(channel, call, deadline)
                answer = _receive(channel, _ControlAnswer, deadline)
        except DeadlineExceeded:
            raise DeadlineExceeded(f"{_PEER} did not answer {call.name} within {call.timeout:.3g} s") from None
        if answer.failure is not None:
            raise from_wire(*answer.failure)
        return answer.flushed


def _send(channel: Channel, message: msgspec.Struct, deadline: Deadline) -> None:
    data = msgspec.msgpack.encode(message)
    channel.send([len(data).to_bytes(_LENGTH_BYTES, "little"), data], deadline)


def _receive(channel: Channel, kind: type[T], deadline: Deadline) -> T:
    length = int.from_bytes(channel.receive(_LENGTH_BYTES, deadline), "little")
    if length > _LONGEST:
        raise ProtocolError(f"{channel.peer} sent a message of {length:,} bytes, which is too long")
    try:
        return msgspec.msgpack.decode(channel.receive(length, deadline), type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"{channel.peer} sent an unreadable message: {error}") from None
