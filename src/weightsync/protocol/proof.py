"""Mutual proof that both ends have the token, without sending it.

The agent asks for a challenge with a nonce of its own. The coordinator answers with a fresh nonce and a proof over both. If that
is right, the agent sends its own proof, in the ``Authorization`` header of one request. So a process that listens on the port of a
coordinator that died learns nothing that it could use. An HTTP client uses a challenge for several requests, which
it counts, and looks for a proof in each answer. The coordinator keeps no state for strangers: its nonces carry their time and its
signature. It remembers what holders of the token have used until that expires.

A limited token is made from the token and says what it admits to: the coordinator makes the same from what a peer names, so it
needs no list of those that were given out.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import quote

import msgspec

from weightsync.config import Address, Secret, SecretKind
from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError
from weightsync.protocol.messages import UNREADABLE

CHALLENGE_PATH = "/v1/challenge"
SCHEME = "Weightsync"
"""Of the ``Authorization`` header that carries a proof."""
ANSWER_HEADER = "Weightsync-Proof"
"""Of an answer to such a request: the coordinator's proof that it is the one that answers."""
_LIFETIME = 30.0  # seconds from a challenge to its last use
_MOST_REQUESTS = 1024  # that one challenge is good for
_MOST_USED = 1 << 16  # challenges that holders of the token may use in that time
_MOST_USED_LIMITED = 1 << 10
_STRETCH = 20_000  # rounds of PBKDF2: a proof is something to guess a weak token by, and each guess costs that much
_NAMES = {"token": ("token", "WEIGHTSYNC_TOKEN"), "operator": ("operator's token", "WEIGHTSYNC_OPERATOR_TOKEN")}
_NONCE = re.compile(r"[0-9a-f]{32}")
_SIGNED = re.compile(r"[0-9a-f]{96}")
_COUNT = re.compile(r"[0-9]{1,4}")
_LIMITED = re.compile(r"adapters:([^:]*):([0-9a-f]{64})")
PATTERNS = re.compile(r"[A-Za-z0-9._*-]{1,64}/[A-Za-z0-9._*-]{1,64}(,[A-Za-z0-9._*-]{1,64}/[A-Za-z0-9._*-]{1,64}){0,7}")


class Challenge(msgspec.Struct, frozen=True):
    """What the coordinator answers to an agent's nonce: a nonce of its own, and its proof over both."""

    nonce: str
    proof: str


def limited(token: Secret, adapters: str) -> Secret:
    """A token that admits to publishing adapters, and to nothing else: those whose names one of the patterns ``adapters`` matches.

    Raises :class:`~weightsync.errors.ConfigurationError` for what is no such list, and for a token that is limited itself.
    """
    if limits_of(token):
        raise ConfigurationError("this token is limited itself: limits are set with the coordinator's own")
    if PATTERNS.fullmatch(adapters) is None:
        raise ConfigurationError(f"a token is limited to 1 to 8 names of adapters, as in 'alice/*,bob/math', not {adapters[:80]!r}")
    return Secret(f"adapters:{adapters}:{_proof(token, 'adapters', adapters)}")


def limits_of(token: Secret) -> str:
    """The patterns of a :func:`limited` token; empty for any other."""
    match = _LIMITED.fullmatch(token.reveal())
    return "" if match is None else match[1]


def _key(token: Secret) -> bytes:
    match = _LIMITED.fullmatch(token.reveal())
    return _stretched(token) if match is None else bytes.fromhex(match[2])  # in which there is nothing to guess


@lru_cache(maxsize=16)
def _stretched(token: Secret) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", token.reveal().encode(), b"weightsync proof", _STRETCH)


def _proof(token: Secret, who: str, *parts: str) -> str:
    return hmac.new(_key(token), "\n".join((who, *parts)).encode(), hashlib.sha256).hexdigest()


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode("utf-8", "surrogateescape"), right.encode("utf-8", "surrogateescape"))


class Challenger:
    """The coordinator's side. Used on one event loop; ``clock`` gives seconds that only go up."""

    def __init__(self, token: Secret, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._signer = secrets.token_bytes(32)
        self._used: dict[str, dict[str, tuple[float, int]]] = {}
        """For each token, by its patterns: when each used nonce expires, in that order, and a bit for each request with it.

        Its holder uses up no places of others. Only a proof adds anything.
        """
        _key(token)  # takes milliseconds, once

    def challenge(self, nonce: str, adapters: str = "") -> Challenge:
        """The answer to an agent's nonce, for a token that is limited to ``adapters`` if they are given.

        Raises :class:`~weightsync.errors.ConfigurationError` if one of them is malformed.
        """
        if _NONCE.fullmatch(nonce) is None:
            raise ConfigurationError("a challenge needs ?nonce= with 32 hexadecimal digits")
        unsigned = int(self._clock() * 1000).to_bytes(8, "big").hex() + secrets.token_hex(8)
        mine = unsigned + self._sign(unsigned)
        return Challenge(mine, _proof(limited(self._token, adapters) if adapters else self._token, "coordinator", nonce, mine))

    def admits(self, header: str, request: str) -> tuple[str, str] | None:
        """The proof for the answer, if an ``Authorization`` header proves the token for ``request`` (method and target).

        With it the patterns of a :func:`limited` token, empty for the token itself. ``None`` if nothing is proved, and for a header
        that was used before.
        """
        parts = header.split(" ")
        if not 5 <= len(parts) <= 6 or parts[0] != SCHEME:
            return None
        (_, nonce, mine, count, proof), adapters = parts[:5], "".join(parts[5:])
        if _NONCE.fullmatch(nonce) is None or _SIGNED.fullmatch(mine) is None or _COUNT.fullmatch(count) is None:
            return None
        if len(parts) > 5 and (PATTERNS.fullmatch(adapters) is None or limits_of(self._token)):
            return None
        token = limited(self._token, adapters) if adapters else self._token
        now = self._clock()
        fresh = 0 <= now - int(mine[:16], 16) / 1000 + 0.001 <= _LIFETIME
        genuine = _same(mine[32:], self._sign(mine[:32]))
        right = _same(proof, _proof(token, "agent", nonce, mine, count, request))
        if not (fresh and genuine and right) or int(count) >= _MOST_REQUESTS:
            return None
        nonces = self._used.setdefault(adapters, {})
        while nonces and (oldest := next(iter(nonces.items())))[1][0] < now:
            del nonces[oldest[0]]
        until, used = nonces.get(mine, (now + _LIFETIME, 0))
        this = 1 << int(count)
        if used & this or (not used and len(nonces) >= (_MOST_USED_LIMITED if adapters else _MOST_USED)):
            return None
        nonces[mine] = until, used | this
        return _proof(token, "answer", nonce, mine, count), adapters

    def _sign(self, unsigned: str) -> str:
        return hmac.new(self._signer, unsigned.encode(), hashlib.sha256).hexdigest()


class Claimant:
    """The agent's side of one challenge by ``coordinator``. :meth:`accept` comes before :meth:`authorization`.

    Operators prove another secret in the same way: ``token`` is then that one, and ``kind`` says so.
    """

    def __init__(self, token: Secret, coordinator: Address, kind: SecretKind = "token") -> None:
        self._token, self._coordinator, self._kind = token, coordinator, kind
        self._nonce, self._challenge = secrets.token_hex(16), ""
        self._count = 0
        self._since = time.monotonic()

    @property
    def target(self) -> str:
        """What to ask the coordinator for."""
        adapters = limits_of(self._token)
        more = f"&adapters={quote(adapters, safe='')}" if adapters else "" if self._kind == "token" else f"&of={self._kind}"
        return f"{CHALLENGE_PATH}?nonce={self._nonce}{more}"

    @property
    def spent(self) -> bool:
        """Whether the challenge may not be good for another request."""
        return self._count >= _MOST_REQUESTS or time.monotonic() - self._since > _LIFETIME / 2

    def accept(self, body: bytes) -> None:
        """Take the coordinator's answer, if it proves that it has the token.

        Raises :class:`~weightsync.errors.AuthenticationError` if it does not, and :class:`~weightsync.errors.ProtocolError` for an
        answer that no coordinator gives.
        """
        try:
            challenge = msgspec.json.decode(body, type=Challenge)
        except UNREADABLE:
            raise ProtocolError(f"what answers at {self._coordinator} is not a weightsync coordinator") from None
        if not _same(challenge.proof, _proof(self._token, "coordinator", self._nonce, challenge.nonce)):
            name, variable = _NAMES[self._kind]
            raise AuthenticationError(
                f"the coordinator at {self._coordinator} could not prove that it has the {name} of this process, so nothing was "
                f"sent to it. Either it was started with another {name}: set {variable} or {variable}_FILE to that one. "
                "Or something else answers at its address: check which process listens there"
            )
        self._challenge = challenge.nonce

    def authorization(self, request: str) -> tuple[str, str]:
        """The header for ``request`` (method and target), and what :data:`ANSWER_HEADER` is in the coordinator's answer to it."""
        parts = self._nonce, self._challenge, str(self._count)
        self._count += 1
        header = SCHEME, *parts, _proof(self._token, "agent", *parts, request), *filter(None, [limits_of(self._token)])
        return " ".join(header), _proof(self._token, "answer", *parts)
