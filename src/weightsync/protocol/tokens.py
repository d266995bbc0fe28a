"""Who may talk to a coordinator: its secrets, compared in constant time, and where the same user's processes find them.

A coordinator on loopback makes the secrets that it was not given, and leaves each in an owner-only file named after its port, so
that clients of the same user on the same machine need nothing but the URL. What another user could have written is never believed.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
import os
import secrets
import stat
import string
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from weightsync.config import Address, ClientSettings, Secret, SecretKind, ServerSettings, runtime_directory, secret_in_environment
from weightsync.errors import AuthenticationError, ConfigurationError

_log = logging.getLogger(__name__)
_MAX_FILE = 4096
_ENOUGH_BITS = 128
_ZLIB_BYTES = 8  # that it adds to what cannot be made shorter
_MAKE_ONE = "make one with `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"


def generate() -> Secret:
    """A new token of 256 random bits."""
    return Secret(secrets.token_urlsafe(32))


class Secrets(NamedTuple):
    """The secrets of one coordinator. Without an operator's, operators' actions are refused."""

    token: Secret
    operator: Secret | None = None
    metrics: Secret | None = None


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


def plausible_bits(secret: Secret) -> int:
    """The most random bits that a secret of these characters could hold. Words and names hold fewer."""
    text = secret.reveal()
    classes = (string.ascii_lowercase, string.ascii_uppercase, string.digits, "-_")
    alphabet = sum(len(kind) for kind in classes if set(kind) & set(text)) + (30 if set(text) - set("".join(classes)) else 0)
    if set(text.lower()) <= set(string.hexdigits):
        alphabet = min(alphabet, 16)
    elif text.lower() != text != text.upper():
        alphabet = max(alphabet, 64)  # a short one of base64 may lack a class
    repeated = 8 * (len(zlib.compress(text.encode(), 9)) - _ZLIB_BYTES)
    return max(min(int(len(text) * math.log2(max(alphabet, 1))), repeated), 0)


def check_bind(settings: ServerSettings) -> None:
    """Raise :class:`ConfigurationError` if this would let others in without a token, or with one that they can guess.

    On loopback a weak secret is a warning.
    """
    local = is_loopback(settings.host)
    if settings.token is None and not local:
        raise ConfigurationError(
            f"refusing to listen on {settings.host!r} without a token: any peer of this address could replace the weights "
            f"that your engines serve. Set WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE here and on every agent ({_MAKE_ONE}), or "
            "listen on 127.0.0.1"
        )
    for name, secret in (("TOKEN", settings.token), ("OPERATOR_TOKEN", settings.operator_token)):
        bits = _ENOUGH_BITS if secret is None else plausible_bits(secret)
        if bits < _ENOUGH_BITS:
            weak = (
                f"WEIGHTSYNC_{name} holds at most {bits} random bits, and fewer if it is made of words. Who reaches this port can "
                f"ask for one proof of it, and try out guesses elsewhere. Use {_ENOUGH_BITS} bits or more ({_MAKE_ONE})"
            )
            if not local:
                raise ConfigurationError(f"refusing to listen on {settings.host!r}: {weak}")
            _log.warning("%s", weak)


def token_path(port: int, directory: Path | None = None, kind: SecretKind = "token") -> Path:
    """Where a coordinator of this user at ``port`` leaves the secret of a kind that it generated."""
    return (runtime_directory() if directory is None else directory) / f"{port}.{kind}"


def login_url(address: Address, token: Secret) -> str:
    """A link that opens the status page with its token, in the fragment, which browsers do not send."""
    return f"{address.url}/#token={quote(token.reveal(), safe='')}"


class TokenFile:
    """A generated secret of one running coordinator, in the runtime directory under its port. Removed by :meth:`remove`."""

    def __init__(self, port: int, token: Secret, directory: Path | None = None, kind: SecretKind = "token") -> None:
        self.path = token_path(port, directory, kind)
        self._content = token
        try:
            fresh = _written_beside(self.path, token)
            os.replace(fresh, self.path)  # a file that a killed coordinator left at this port goes in the same step
        except (OSError, AuthenticationError) as error:
            raise ConfigurationError(
                f"cannot leave the token for local clients in {self.path.parent}: {error}. Remove that path, or set "
                "WEIGHTSYNC_TOKEN"
            ) from None

    def remove(self) -> None:
        """Take the file away, unless a later coordinator has put its own there. Safe twice."""
        try:
            if self.path.read_text(encoding="ascii") == self._content.reveal():
                self.path.unlink()
        except FileNotFoundError:
            return


def find_token(address: Address, directory: Path | None = None, kind: SecretKind = "token") -> Secret | None:
    """The secret of a kind that this user's coordinator at ``address`` left on this machine, or ``None``.

    Raises :class:`AuthenticationError` for a file or directory that somebody else could have written.
    """
    if not is_loopback(address.host):
        return None
    path = token_path(address.port, directory, kind)
    try:
        _check_private(path.parent, os.lstat(path.parent), stat.S_ISDIR)
        content = _read_private(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AuthenticationError(f"not using the token in {path}: {error}; set WEIGHTSYNC_TOKEN instead") from None
    try:
        return Secret(content.decode("ascii"))
    except (UnicodeDecodeError, ConfigurationError):
        raise AuthenticationError(f"{path} does not hold a token; remove it, or set WEIGHTSYNC_TOKEN") from None


def secret_of(settings: ClientSettings, kind: SecretKind = "token") -> Secret | None:
    """The secret of a kind for the coordinator: the configured one, otherwise the one that it left on this machine.

    Agents never ask for the operator's. Raises what :func:`find_token` and
    :func:`~weightsync.config.secret_in_environment` raise.
    """
    given = settings.token if kind == "token" else secret_in_environment(kind)
    return given if given is not None else find_token(settings.coordinator, kind=kind)


def operator_secret(settings: ClientSettings) -> Secret:
    """The operator's secret for the coordinator. Raises :class:`AuthenticationError` if this process has none."""
    secret = secret_of(settings, "operator")
    if secret is None:
        raise AuthenticationError(
            f"this needs the operator's token of the coordinator at {settings.coordinator}: set WEIGHTSYNC_OPERATOR_TOKEN or "
            "WEIGHTSYNC_OPERATOR_TOKEN_FILE to the one that it was started with. A coordinator on loopback that was given none "
            "makes one, which processes of its user on its machine find; any other refuses operators' actions"
        )
    return secret


def kept_secret(path: Path, make: Callable[[], Secret]) -> Secret:
    """The secret in an owner-only file of an owner-only folder, which is made with what ``make`` returns if there is none.

    Raises :class:`AuthenticationError` for a file or folder that others could have written, and :class:`ConfigurationError` if it
    cannot be made.
    """
    try:
        fresh = _written_beside(path, make())
        try:
            os.link(fresh, path)  # whole, or not at all, and never over another one
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        return Secret(_read_private(path).decode("ascii"))
    except OSError as error:
        raise ConfigurationError(f"no secret can be kept in {path}: {error.strerror or error}") from None


def _written_beside(path: Path, secret: Secret) -> Path:
    """Write a secret to a new owner-only file in the owner-only folder of ``path``, which is made if there is none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path.parent, os.lstat(path.parent), stat.S_ISDIR)
    fresh = path.with_name(f".{path.stem}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(secret.reveal())
    return fresh


def _read_private(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check_private(path, os.fstat(descriptor), stat.S_ISREG)
        return os.read(descriptor, _MAX_FILE + 1)
    finally:
        os.close(descriptor)


def _check_private(path: Path, status: os.stat_result, kind: object) -> None:
    if not callable(kind) or not kind(status.st_mode):
        raise AuthenticationError(f"{path} is not what it should be (a link, or another kind of file)")
    if status.st_uid != os.getuid():
        raise AuthenticationError(f"{path} belongs to user {status.st_uid}, not to you ({os.getuid()})")
    if status.st_mode & 0o077:
        raise AuthenticationError(f"{path} is open to other users (mode {status.st_mode & 0o777:o}); expected owner only")
