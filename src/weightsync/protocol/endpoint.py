"""What both ends of the coordinator's address agree on: paths, the socket's subprotocol, TLS."""

from __future__ import annotations

import errno
import os
import re
import ssl
from http import HTTPStatus

from weightsync.config import ClientSettings
from weightsync.errors import HINT, ConfigurationError
from weightsync.protocol.messages import PROTOCOL

AGENTS_PATH = "/v1/agents"
FRAME_LIMIT_HEADER = "X-Weightsync-Frame-Bytes"
"""In the answer to an agent's upgrade: the largest frame that the coordinator takes, for agents to respect."""
SUBPROTOCOL = f"weightsync.{PROTOCOL}"
"""Offered by every agent, so that two ends of different protocols part before a frame is read."""

TRANSIENT_STATUS = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Answers after which another attempt may succeed."""


def tls_context(settings: ClientSettings) -> ssl.SSLContext | None:
    """How to check an https coordinator's certificate; ``None`` for plain http."""
    if settings.coordinator.scheme != "https":
        return None
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"WEIGHTSYNC_CA_FILE={str(settings.ca_file)!r} holds no usable certificates: {error}") from None


def reason(error: BaseException) -> str:
    """What went wrong, in words: without the number that the system and the libraries put in front."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return re.sub(r"^\[Errno -?[0-9]+\] ", "", str(error)) or type(error).__name__


def no_challenge(settings: ClientSettings, status: int) -> str:
    """The message for a server that answers the request for a challenge with another ``status`` than 200."""
    return (
        f"what answers at {settings.coordinator} is not a weightsync coordinator, or one of an older release: it gives no "
        f"challenge (HTTP {status})"
    )


def unreachable(settings: ClientSettings, why: object) -> str:
    """The message for a coordinator that does not answer: its URL, what went wrong, what to check."""
    url = settings.coordinator.url
    refused = os.strerror(errno.ECONNREFUSED) in str(why)  # the machine is there, and nothing listens
    hint = "" if refused else f", and look whether this machine reaches it: curl {url}/healthz"
    return (
        f"no coordinator answers at {url}: {why}{HINT}start it there (`weightsync serve`, `weightsync relay`, or the "
        f"trainer whose rank 0 holds it), or name another by WEIGHTSYNC_COORDINATOR (-c){hint}"
    )
