"""The publisher's end of every socket transport: accept, authenticate, serve, and leave nothing behind."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightsync import forks
from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, WeightSyncError
from weightsync.transports.base import Key
from weightsync.transports.net.channel import Channel
from weightsync.transports.net.handshake import HELLO_SECONDS, greet_reader

_MAX_READERS = 1024
_MAX_STRANGERS = 32
# Connections a second that are taken in and then prove nothing. A flood of them must not slow what is being sent.
_ARRIVALS = 50.0
_BUSY_ARRIVALS = 25.0  # while a transfer runs
_BACKLOG = 1024
_RETRY_SECONDS = 0.2
_log = logging.getLogger("weightsync.transports")

_JOIN_SECONDS = 10.0


def same_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user (Linux)."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


class Listener:
    """Serves authenticated connections to ``sock``, a thread each, until closed.

    ``serve`` runs in the connection's thread with a channel whose peer has proved to know ``key``; when it returns or raises
    a weightsync error, the connection is closed. ``admit`` may refuse a connection before its first byte is read. At most 1,024
    readers may be connected, and over a network 32 that are unproven (a newer one pushes out the oldest of the host that has most).
    Unproven ones are taken in at a bounded rate, which is lowest while a transfer is :meth:`busy`.

    All readers have the same key, so over a network the address tells them apart: when all places are taken, a new reader gets that
    of the oldest one at the address with most, of its own if there are as many there. A reader that is pushed out while it asks for
    nothing connects again with its next request.

    A peer at the Unix socket is this user's process, and need not be quick: many ranks may start on a busy host at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        key: bytes,
        publisher_id: bytes,
        serve: Callable[[Channel], None],
        admit: Callable[[socket.socket], bool] = lambda _: True,
        channel: Callable[[socket.socket, str], Channel] = Channel,
    ) -> None:
        self._socket, self._name, self._key, self._publisher_id = sock, name, Key(key), publisher_id
        self._serve, self._admit, self._make = serve, admit, channel
        self._origin = forks.Origin()
        self._lock = threading.Lock()
        self._closing = False
        self._max_unauthenticated = _MAX_READERS if sock.family == socket.AF_UNIX else _MAX_STRANGERS
        self._transfers: list[threading.Thread] = []
        self._readers: dict[Channel, str] = {}  # over a network, in the order of their proofs
        self._permits, self._since = float(self._max_unauthenticated), time.monotonic()
        self._unauthenticated: dict[Channel, str] = {}  # in order of arrival, with the host that each comes from
        self._channels: dict[Channel, threading.Thread] = {}
        self._woken, self._waker = socket.socketpair()
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name=f"weightsync-{name}-accept", daemon=True)
        self._thread.start()
        forks.in_children(self, Listener._after_fork)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]  # ended by close()
                if self._woken in ready:
                    return
                wait = self._acquire() or self._take_in()
                if wait:  # the others stay in the backlog
                    selector.unregister(self._socket)
                    if selector.select(wait):
                        return
                    selector.register(self._socket, selectors.EVENT_READ)

    def _acquire(self) -> float:
        """Take the turn of one more connection, or say in how many seconds there will be one."""
        with self._lock:
            now = time.monotonic()
            rate = _BUSY_ARRIVALS if self._transfers else _ARRIVALS
            self._permits = min(self._max_unauthenticated, self._permits + (now - self._since) * rate)
            self._since = now
            if self._permits < 1:
                return (1 - self._permits) / rate
            self._permits -= 1
            return 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While a transfer runs: strangers wait longer. Any thread."""
        thread = threading.current_thread()
        with self._lock:
            self._transfers.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._transfers.remove(thread)

    def _take_in(self) -> float:
        """Serve one connection; how many seconds to wait before the next, where something ran out."""
        try:
            sock, peer = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return 0.0
        except OSError as error:
            # Out of descriptors: the connection stays in the backlog; wait for some to be closed, not in a busy loop.
            _log.warning("%s cannot accept a connection: %s", self._name, error)
            return _RETRY_SECONDS
        try:
            self._start(sock, str(peer[0]) if isinstance(peer, tuple) else "")
        except RuntimeError as error:
            _log.warning("%s dropped a connection: %s; raise the limit of processes (ulimit -u, pids.max)", self._name, error)
            return _RETRY_SECONDS
        return 0.0

    def _start(self, sock: socket.socket, host: str) -> None:
        """Serve ``sock`` in a thread. Raises RuntimeError, having closed it, if there can be no thread."""
        try:
            channel = self._make(sock, f"the reader at {self._name}")
        except (OSError, ValueError):  # it is gone already
            sock.close()
            return
        thread = threading.Thread(target=self._run, args=(channel, host), name=f"weightsync-{self._name}-serve", daemon=True)
        with self._lock:
            most = _MAX_READERS + (_MAX_STRANGERS if host else 0)
            if self._closing or len(self._channels) >= most or not self._admit(sock):
                channel.close()
                return
            if len(self._unauthenticated) >= self._max_unauthenticated:
                victim = self._dispensable()
                del self._unauthenticated[victim]
                victim.abort()
            try:
                thread.start()  # it takes the lock before it is done
            except RuntimeError:
                channel.close()
                raise
            self._unauthenticated[channel] = host
            self._channels[channel] = thread

    def _dispensable(self) -> Channel:
        """The oldest unproven connection of the host that has most of them: a flood pushes out itself, not a reader elsewhere."""
        most, _ = Counter(self._unauthenticated.values()).most_common(1)[0]
        return next(channel for channel, host in self._unauthenticated.items() if host == most)

    def _make_room(self, host: str) -> Channel | None:
        """The reader that makes room for one at ``host``; ``None`` if no other address has more and all at this one are busy."""
        readers = Counter(self._readers.values())
        [(crowded, most)] = readers.most_common(1)
        if most <= readers[host] + 1:
            crowded = host
        there = [channel for channel, where in self._readers.items() if where == crowded]
        idle = [channel for channel in there if self._channels[channel] not in self._transfers]
        return next(iter(idle or (there if crowded != host else [])), None)

    def _take_place(self, channel: Channel, host: str) -> None:
        """Count a connection that has proved to know the key. Raises PeerLost if there is no place for it."""
        with self._lock:
            self._unauthenticated.pop(channel, None)
            self._permits += 1
            if not host:
                return
            if len(self._readers) >= _MAX_READERS:
                victim = self._make_room(host)
                if victim is None:
                    raise PeerLost(f"{self._name} has {_MAX_READERS:,} readers already")
                del self._readers[victim]
                victim.abort()
            self._readers[channel] = host

    def _run(self, channel: Channel, host: str) -> None:
        try:
            deadline = Deadline(HELLO_SECONDS)
            channel.secure(deadline)
            greet_reader(channel, self._key.reveal(), self._publisher_id, deadline)
            self._take_place(channel, host)
            self._serve(channel)
        except WeightSyncError as error:
            _log.debug("%s: a connection ended: %s", self._name, error)
        finally:
            with self._lock:
                self._unauthenticated.pop(channel, None)
                self._readers.pop(channel, None)
                self._channels.pop(channel, None)
                channel.close()

    def _after_fork(self) -> None:
        """In a forked child: it would keep readers waiting for a trainer that died. Channels do the same for themselves."""
        for sock in (self._socket, self._woken, self._waker):
            forks.silence(sock.fileno())

    def close(self) -> None:
        """End every connection and thread. Safe twice, and from any thread but the listener's own. In a forked child: nothing."""
        if self._origin.elsewhere:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
            running = dict(self._channels)
            for channel in running:
                channel.abort()
        self._waker.send(b"\0")
        for thread in (self._thread, *running.values()):
            thread.join(_JOIN_SECONDS)  # their sockets are shut down, so this takes a moment
            if thread.is_alive():
                _log.warning("%s: thread %s did not end within %g s", self._name, thread.name, _JOIN_SECONDS)
        for sock in (self._socket, self._woken, self._waker):
            sock.close()
