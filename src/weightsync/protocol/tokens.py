"""Who may talk to a coordinator: a bearer token, compared in constant time, and where the same user's processes find it.

A coordinator without a token of its own makes one and leaves it in an owner-only file named after its port, so that clients of
the same user on the same machine need nothing but the URL. What another user could have written is never believed.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import stat
from pathlib import Path
from urllib.parse import quote

from weightsync.config import Address, ClientSettings, Secret, ServerSettings, runtime_directory
from weightsync.errors import AuthenticationError, ConfigurationError

__all__ = [
    "TokenFile",
    "bearer",
    "check_bind",
    "find_token",
    "generate",
    "is_loopback",
    "login_url",
    "matches",
    "token_for",
    "token_path",
]

_MAX_FILE = 4096


def generate() -> Secret:
    """A new token of 256 random bits."""
    return Secret(secrets.token_urlsafe(32))


def bearer(token: Secret | None) -> dict[str, str]:
    """The header that carries ``token``; none without one."""
    return {} if token is None else {"Authorization": f"Bearer {token.reveal()}"}


def matches(header: str | None, token: Secret) -> bool:
    """Whether an ``Authorization`` header holds ``token``. Takes the same time wherever the first difference is."""
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.reveal().encode())
    return same and scheme.lower() == "bearer"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than ``localhost`` counts as reachable from outside."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_bind(settings: ServerSettings) -> None:
    """Raise :class:`ConfigurationError` if this would let others in without a token that they were given on purpose."""
    if settings.token is None and not is_loopback(settings.host):
        raise ConfigurationError(
            f"refusing to listen on {settings.host!r} without a token: any peer of this address could replace the weights "
            "that your engines serve. Set WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE here and on every agent (make one with "
            "`python -c 'import secrets; print(secrets.token_urlsafe(32))'`), or listen on 127.0.0.1"
        )


def token_path(port: int, directory: Path | None = None) -> Path:
    """Where a coordinator of this user at ``port`` leaves the token that it generated."""
    return (runtime_directory() if directory is None else directory) / f"{port}.token"


def login_url(address: Address, token: Secret) -> str:
    """A link that opens the status page with its token, in the fragment, which browsers do not send."""
    return f"{address.url}/#token={quote(token.reveal(), safe='')}"


class TokenFile:
    """The generated token of one running coordinator, in the runtime directory under its port. Removed by :meth:`remove`."""

    def __init__(self, port: int, token: Secret, directory: Path | None = None) -> None:
        directory = runtime_directory() if directory is None else directory
        self.path = token_path(port, directory)
        self._content = token.reveal()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(directory, os.lstat(directory), stat.S_ISDIR)
            fresh = directory / f".{port}.{secrets.token_hex(8)}"
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(descriptor, self._content.encode())
            finally:
                os.close(descriptor)
            os.replace(fresh, self.path)  # a file that a killed coordinator left at this port goes in the same step
        except (OSError, AuthenticationError) as error:
            raise ConfigurationError(
                f"cannot leave the token for local clients in {directory}: {error}. Remove that path, or set WEIGHTSYNC_TOKEN"
            ) from None

    def remove(self) -> None:
        """Take the file away, unless a later coordinator has put its own there. Safe twice."""
        try:
            if self.path.read_text(encoding="ascii") == self._content:
                self.path.unlink()
        except FileNotFoundError:
            return


def find_token(address: Address, directory: Path | None = None) -> Secret | None:
    """The token that this user's coordinator at ``address`` left on this machine, or ``None``.

    Raises :class:`AuthenticationError` for a file or directory that somebody else could have written.
    """
    if not is_loopback(address.host):
        return None
    directory = runtime_directory() if directory is None else directory
    path = token_path(address.port, directory)
    try:
        _check_private(directory, os.lstat(directory), stat.S_ISDIR)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AuthenticationError(f"not using the token in {path}: {error}; set WEIGHTSYNC_TOKEN instead") from None
    try:
        _check_private(path, os.fstat(descriptor), stat.S_ISREG)
        content = os.read(descriptor, _MAX_FILE + 1)
    finally:
        os.close(descriptor)
    try:
        return Secret(content.decode("ascii"))
    except (UnicodeDecodeError, ConfigurationError):
        raise AuthenticationError(f"{path} does not hold a token; remove it, or set WEIGHTSYNC_TOKEN") from None


def token_for(settings: ClientSettings) -> Secret | None:
    """The token to present to the coordinator: the configured one, else the one that it left on this machine."""
    return settings.token if settings.token is not None else find_token(settings.coordinator)


def _check_private(path: Path, status: os.stat_result, kind: object) -> None:
    if not callable(kind) or not kind(status.st_mode):
        raise AuthenticationError(f"{path} is not what it should be (a link, or another kind of file)")
    if status.st_uid != os.getuid():
        raise AuthenticationError(f"{path} belongs to user {status.st_uid}, not to you ({os.getuid()})")
    if status.st_mode & 0o077:
        raise AuthenticationError(f"{path} is open to other users (mode {status.st_mode & 0o777:o}); expected owner only")
