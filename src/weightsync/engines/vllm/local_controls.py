"""Control of a vLLM engine object in another process of this machine, or in this process, without HTTP.

``vllm.LLM`` and ``AsyncLLM`` usually run their workers in other processes. Rank 0's worker reaches the process that owns the
engine over an authenticated Unix socket. If the two are the same process, it calls the controls directly.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import closing
from typing import Literal

import msgspec

from weightsync.closing import Closeable
from weightsync.deadline import Deadline
from weightsync.engines.vllm.controls import Controls, HttpControls
from weightsync.errors import ConfigurationError, DeadlineExceeded, PeerLost, ProtocolError, from_wire, to_wire
from weightsync.model import PauseMode
from weightsync.transports.host.unix_socket import connect_local, listen_local
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.messages import ANSWER_BYTES, ControlMessage, Fail, next_control, send_request

# None of these may import numba: vLLM's CPU build does not start in a process that loaded it.

_PREFIX = "weightsync-vllm-"
_PEER = "the process that owns vLLM's engine"
_HELLO_SECONDS = 5.0


class _ControlCall(ControlMessage, frozen=True):
    name: Literal["pause", "install", "flush", "label", "resume", "add_lora", "drop_lora"]
    timeout: float
    mode: PauseMode | None = None
    version: str | None = None


class _ControlAnswer(ControlMessage, frozen=True):
    flushed: bool


_MESSAGES = msgspec.msgpack.Decoder(_ControlCall | _ControlAnswer | Fail)

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
        self._controls = controls
        self._turn = threading.Lock()
        self._running = ""
        key = secrets.token_bytes(32)
        self._listener, place = listen_local(_PREFIX, "vllm-controls", key, self._serve)
        self.address = f"{place}:{key.hex()}"
        _owned[self.address] = os.getpid(), controls

    def _serve(self, channel: Channel) -> None:
        call = next_control(channel, ANSWER_BYTES, Deadline(_HELLO_SECONDS), _MESSAGES)
        answer: ControlMessage
        try:
            if not isinstance(call, _ControlCall):
                raise ProtocolError(f"{type(call).__name__} is not a call")
            answer = _ControlAnswer(self._run_in_turn(channel, call))
        except Exception as error:  # noqa: BLE001 - sent to the caller
            answer = Fail(*to_wire(error))
        send_request(channel, answer, Deadline(_HELLO_SECONDS))

    def _run_in_turn(self, channel: Channel, call: _ControlCall) -> bool:
        deadline, name = Deadline(call.timeout), call.name
        if not self._turn.acquire(timeout=call.timeout):
            raise DeadlineExceeded(f"{name} could not start within {call.timeout:.3g} s: vLLM's {self._running} is still running")
        try:
            if not channel.peer_lives():
                raise PeerLost(f"the worker that requested {name} has given up")
            self._running = name
            arguments = [argument for argument in (call.mode, call.version) if argument is not None]
            return getattr(self._controls, name)(*arguments, deadline.remaining(name)) is True
        finally:
            self._turn.release()

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

    def add_lora(self, label: str, timeout: float) -> None:
        """See :meth:`Controls.add_lora`."""
        self._ask(_ControlCall("add_lora", timeout, version=label))

    def drop_lora(self, label: str, timeout: float) -> None:
        """See :meth:`Controls.drop_lora`."""
        self._ask(_ControlCall("drop_lora", timeout, version=label))

    def _ask(self, call: _ControlCall) -> bool:
        deadline = Deadline(call.timeout)
        try:
            with closing(connect_local(_PREFIX, self._place, self._key, _PEER, deadline)) as channel:
                send_request(channel, call, deadline)
                answer = next_control(channel, ANSWER_BYTES, deadline, _MESSAGES)
        except DeadlineExceeded:
            raise DeadlineExceeded(f"{_PEER} did not answer {call.name} within {call.timeout:.3g} s") from None
        if isinstance(answer, Fail):
            raise from_wire(answer.kind, answer.message)
        return isinstance(answer, _ControlAnswer) and answer.flushed
