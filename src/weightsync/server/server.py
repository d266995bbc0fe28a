"""Serving a coordinator: in the foreground (``weightsync serve``), or in a thread of the trainer's rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Self

from weightsync import forks
from weightsync.config import Address, Secret, SecretKind, ServerSettings, control_settings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.errors import ConfigurationError, DeadlineExceeded
from weightsync.protocol.endpoint import reason
from weightsync.protocol.tokens import Secrets, TokenFile, check_bind, generate, is_loopback
from weightsync.server.accept_limiter import AcceptLimiter
from weightsync.server.app import Service
from weightsync.server.mounts import load_mounts
from weightsync.server.store_key import adopt_newest, store_key

_log = logging.getLogger(__name__)

_START_SECONDS = 15.0
_STOP_SECONDS = 30.0
_ATTEMPTS = 16  # to find a port that is free in both families of loopback
_BACKLOG = 1024  # connections that the kernel keeps until there is time for them
_STOPPING = "the coordinator is shutting down"


def _listen(settings: ServerSettings, undo: contextlib.ExitStack) -> list[socket.socket]:
    """Listen until ``undo`` ends. On loopback with both families: ``localhost`` may mean either one.

    Otherwise a program of another user could listen at the same port of the other family, and pass everything on.
    """
    host = "127.0.0.1" if settings.host.lower() == "localhost" else settings.host
    other = {"127.0.0.1": "::1", "::1": "127.0.0.1"}.get(host)
    if other is None or not _has(other):
        return [undo.enter_context(_bound(host, settings.port))]
    attempts = 1 if settings.port else _ATTEMPTS
    while True:
        with contextlib.ExitStack() as opened:
            attempts -= 1
            first = opened.enter_context(_bound(host, settings.port))
            try:
                second = opened.enter_context(_bound(other, first.getsockname()[1]))
            except ConfigurationError as error:
                if attempts:
                    continue  # a port that is free in one family need not be free in the other
                raise ConfigurationError(f"a coordinator on loopback listens on 127.0.0.1 and ::1, and {error}") from None
            undo.push(opened.pop_all())
            return [first, second]


def _has(host: str) -> bool:
    """Return whether this machine has the address ``host``."""
    try:
        _bound(host, 0).close()
    except ConfigurationError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        everywhere = family == socket.AF_INET6 and _unspecified(str(where[0])) and socket.has_dualstack_ipv6()
        return socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG, dualstack_ipv6=everywhere)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {reason}. Another coordinator may hold it "
            "(`weightsync serve`, or that of another trainer on this machine), or another program. For a trainer to use the "
            f"coordinator there, set WEIGHTSYNC_COORDINATOR=http://{f'[{host}]' if ':' in host else host}:{port}. "
            "WEIGHTSYNC_PORT or --port chooses a port, 0 takes a free one; WEIGHTSYNC_HOST or --host chooses the address"
        ) from None


def _unspecified(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def _reachable(settings: ServerSettings, listener: socket.socket) -> Address:
    """The address to give to agents: where everything is listened on, this machine's name if it has one that resolves."""
    bound = listener.getsockname()
    host = "127.0.0.1" if settings.host.lower() == "localhost" and settings.scheme == "http" else settings.host
    if _unspecified(bound[0]):
        try:
            socket.getaddrinfo(socket.gethostname(), bound[1])
            host = socket.gethostname()
        except OSError:
            host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    return Address(settings.scheme, host, bound[1])


def _tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # With a password, so that an encrypted key is an error and not a prompt.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password="")
    except OSError as error:  # ssl.SSLError among them
        raise ConfigurationError(
            f"WEIGHTSYNC_TLS_CERTIFICATE={str(settings.tls_certificate)!r}, WEIGHTSYNC_TLS_KEY={str(settings.tls_key)!r}: "
            f"{reason(error)}"
        ) from None
    return context


def _generated(settings: ServerSettings, port: int, undo: contextlib.ExitStack) -> Secrets:
    """The secrets that were given. On loopback, those that were not are generated, and left in files until ``undo`` ends."""

    def made(kind: SecretKind, given: Secret | None) -> Secret | None:
        if given is not None or not is_loopback(settings.host):
            return given
        secret = generate()
        undo.callback(TokenFile(port, secret, kind=kind).remove)
        return secret

    token = made("token", settings.token)
    if token is None:
        raise ConfigurationError("a coordinator beyond loopback needs a token")  # as check_bind() has said
    return Secrets(token, made("operator", settings.operator_token), made("metrics", settings.metrics_token))


async def run_server(
    settings: ServerSettings, stop: asyncio.Event, started: Callable[[Address, Secrets, Coordinator], None] | None = None
) -> None:
    """Serve a new coordinator until ``stop`` is set; ``started`` gets its address once it listens.

    Agents' sockets are closed with a reason, event streams end, the coordinator's rounds are cancelled. Raises
    :class:`~weightsync.errors.ConfigurationError` for an address that cannot be listened on, an unsafe one without a token, or
    unusable TLS files.
    """
    check_bind(settings)
    context, mounts = _tls_context(settings), load_mounts(settings)
    with contextlib.ExitStack() as undo:
        listeners = _listen(settings, undo)
        address = _reachable(settings, listeners[0])
        secrets = _generated(settings, address.port, undo)
        rounds = control_settings(settings)
        coordinator = Coordinator(rounds, lambda: store_key(settings, rounds.run))
        service = Service(coordinator, settings, secrets, mounts)
        limiters = [AcceptLimiter(sock, service.asgi, settings, service.connections, context) for sock in listeners]
        try:
            await service.continue_rounds()
            if settings.store is not None:
                read = partial(adopt_newest, settings.store, rounds.run, coordinator.stored)
                coordinator.stored.read = read if await read() else None
            for limiter in limiters:
                limiter.open()
            if started is not None:
                started(address, secrets, coordinator)
            await stop.wait()
        finally:
            await service.aclose(_STOPPING)
            await asyncio.gather(*(limiter.aclose(settings.shutdown_seconds) for limiter in limiters))


def serve(settings: ServerSettings, started: Callable[[Address, Secrets, Coordinator], None] | None = None) -> None:
    """Serve in the foreground until SIGINT or SIGTERM, then shut down in order; a second signal ends it at once.

    Must run in the main thread.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)

        def end() -> None:
            stop.set()
            for number in numbers:  # the second one is not asked to wait
                loop.remove_signal_handler(number)

        for number in numbers:
            loop.add_signal_handler(number, end)
        await run_server(settings, stop, started)

    forks.run(main())


class BackgroundServer:
    """A coordinator in a thread of this process, for a trainer's rank 0.

    ``with BackgroundServer(settings) as server: ... server.url ...``, or :meth:`start` and :meth:`stop`. Without ``settings``
    they come from the environment.
    """

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self._origin = forks.Origin()
        self._settings = ServerSettings.load() if settings is None else settings
        self._started: Future[tuple[Address, Secrets, Coordinator]] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """Where it answers, with the real port."""
        return self._started.result(0)[0]

    @property
    def url(self) -> str:
        """The same as text, for agents."""
        return self.address.url

    @property
    def token(self) -> str:
        """What agents must present."""
        return self.secrets.token.reveal()

    @property
    def secrets(self) -> Secrets:
        """All its secrets: that of the agents, and those of operators and of the metrics, if it has them."""
        return self._started.result(0)[1]

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator itself, which lives on the loop of its thread."""
        return self._started.result(0)[2]

    def start(self) -> Address:
        """Start the thread; returns when the socket listens. Raises what :func:`run_server` raises before that."""
        if self._thread is not None:
            raise ConfigurationError("a server starts once; make a new one")
        self._thread = threading.Thread(target=self._run, name="weightsync-coordinator", daemon=True)
        self._thread.start()
        try:
            return self._started.result(_START_SECONDS)[0]
        except TimeoutError:
            self.stop()
            raise DeadlineExceeded(f"the coordinator did not start within {_START_SECONDS:g} s") from None

    def stop(self) -> None:
        """Shut down in order and join the thread. Safe twice. In a forked child, which has no such thread: nothing."""
        if self._origin.elsewhere:
            return
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            limit = 2 * self._settings.shutdown_seconds + _STOP_SECONDS
            self._thread.join(limit)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"the coordinator's thread did not end within {limit:g} s")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await run_server(self._settings, self._stop, lambda *what: self._started.set_result(what))

        try:
            forks.run(main())
        except Exception as error:  # noqa: BLE001 - start() raises it, or it is logged
            if self._started.done():
                _log.exception("the coordinator ended by an unexpected error")
            else:
                self._started.set_exception(error)
