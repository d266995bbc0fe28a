"""All settings of the coordinator and of those who talk to it. The only module that reads the environment.

Frozen values, checked where they enter. A field ``round_deadline`` is read from ``WEIGHTSYNC_ROUND_DEADLINE`` unless the caller
gives it; a wrong value is a :class:`~weightsync.errors.ConfigurationError` that names it. Other variables: :data:`VARIABLES`.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from weightsync.errors import ConfigurationError, in_words
from weightsync.model import PauseMode

DEFAULT_PORT = 7400
_PREFIX = "WEIGHTSYNC_"
_MAX_TOKEN = 4096
_HOST = re.compile(r"[A-Za-z0-9._~:%-]{1,255}")
ROUTED_URL = re.compile(r"https?://[A-Za-z0-9._~:%\[\]-]{1,255}(/[A-Za-z0-9._~%/-]*)?")
"""URL of a server, without a user, a query or a fragment."""
_ROUTER = re.compile(rf"(sglang|webhook)\+({ROUTED_URL.pattern})")

SecretKind = Literal["token", "operator", "metrics"]
"""What a secret admits to: ``token``, all that a worker does; ``operator``, that and the operators' actions; ``metrics``, reading
the metrics. The variables are ``WEIGHTSYNC_TOKEN``, ``WEIGHTSYNC_OPERATOR_TOKEN`` and ``WEIGHTSYNC_METRICS_TOKEN``, or the same
with ``_FILE``."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Secret:
    """A token that does not show in logs, tracebacks or ``repr``. Raises :class:`ConfigurationError` if no header can carry it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not value or len(value) > _MAX_TOKEN or not all("!" <= char <= "~" for char in value):
            raise ConfigurationError("a token must be 1 to 4096 visible ASCII characters without spaces")
        self._value = value

    def reveal(self) -> str:
        """The token itself, for the one header that carries it."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "<secret>"


class Address(msgspec.Struct, frozen=True):
    """Where a coordinator answers. Built by :meth:`parse` from ``http(s)://host[:port]``, with IPv6 hosts in brackets."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address in ``url``. Raises :class:`ConfigurationError` for anything else than scheme, host and port.

        Without TLS, ``localhost`` is 127.0.0.1, where every coordinator on loopback listens. The name may resolve to ::1 first,
        where another user's program could listen and pass everything on.
        """
        example = f"write it as http://host:{DEFAULT_PORT}, or http://[::1]:{DEFAULT_PORT} for IPv6"
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(f"{url!r} is not a coordinator URL: {error}; {example}") from None
        if parts.scheme not in ("http", "https") or not host or _HOST.fullmatch(host) is None:
            raise ConfigurationError(f"{url!r} is not a coordinator URL; {example}")
        if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
            raise ConfigurationError(f"a coordinator URL has no user, path or query: {parts.scheme}://{host}...; {example}")
        if parts.scheme == "http" and host == "localhost":
            host = "127.0.0.1"
        return cls(parts.scheme, host, DEFAULT_PORT if port is None else port)

    @property
    def authority(self) -> str:
        """``host:port``, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base of all HTTP routes."""
        return f"{self.scheme}://{self.authority}"

    @property
    def websocket(self) -> str:
        """The base of the agents' socket."""
        return f"{'wss' if self.scheme == 'https' else 'ws'}://{self.authority}"

    def __str__(self) -> str:
        return self.url


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator accepts at most; beyond it, it refuses rather than grows."""

    frame_bytes: Count = 512 << 20
    """Bytes of one message of an agent. The largest is a Hello with its layout."""
    agents: Count = 8192
    """Agents at one time."""
    connections: Count = 16384
    """Connections of all kinds at one time."""
    unauthenticated: Count = 256
    """Connections that have not shown the token, at one time. A new one replaces the oldest of the host that has most of them."""
    arrivals: Count = 100
    """Connections accepted per second that then show no token, after an initial burst. More wait in the kernel's queue. Over TLS
    a fifth as many."""
    requests: Count = 64
    """HTTP requests in progress at one time, except readers of events."""
    hello_seconds: Seconds = 10.0
    """Seconds from the opening of a connection to the token, and from the opening of an agent's socket to its Hello."""
    body_bytes: Count = 64 << 10
    """Bytes of an HTTP request's body."""
    event_streams: Count = 64
    """Readers of ``/v1/events`` at one time."""
    plan_bytes: Count | None = None
    """Bytes of memory for all plans together; by default half of the machine's. A plan takes some 70 bytes for each piece that a
    rank reads, and three times that while it is made."""


Require = Literal["all", "any"] | Annotated[int, msgspec.Meta(ge=0)]
"""Which replicas a round needs to be ``ok``: all that are known, at least one, or at least so many (0: none).

A replica is known from its first connection on, also while it is lost, refused (its tensors differ) or not complete. It is
dropped when all of its ranks were closed on purpose (``Engine.close()``, also by the end of a ``with`` block).
"""


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that code makes, not only the environment. Each value is checked against its type."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise ConfigurationError(f"{field.name}={value!r}: {error}") from None


class RoundSettings(_Checked, frozen=True, kw_only=True):
    """How rounds are run. Raises :class:`~weightsync.errors.ConfigurationError` for values that make no sense."""

    run: Annotated[str, msgspec.Meta(min_length=1)]
    """The run's id, part of every version."""
    pause_mode: PauseMode = "abort"
    require: Require = "any"
    max_unavailable: Count | None = None
    """Replicas that may be out of service at a time (a rolling round); ``None``: all at once. Who serves nothing is not counted."""
    fan_out: Count | None = None
    """Replicas that read from one source at a time; ``None``: all read from the trainer. See :class:`ServerSettings`."""
    timeout: Seconds = 300.0
    """Seconds for a round that names no timeout, and the most that any round gets."""
    grace: Seconds = 5.0
    """Seconds to take a replica out of service after a failure, even after the round's deadline or while the round is cancelled."""
    drain: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    """Seconds from the moment at which a replica gets no more requests to its pause, and the most that routers delay a round after
    it."""
    audit_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    """See :class:`ServerSettings`."""
    retry: bool = True
    """Whether replicas that a publication left out of service get one more attempt at once, in the background."""
    history: Count = 32
    """Ended rounds that status shows."""
    traces: Annotated[int, msgspec.Meta(ge=0)] = 16
    """Rounds whose traces are kept; 0: no round is traced."""
    plan_bytes: Count | None = None
    """Memory that plans may take, together; ``None``: half of this machine's."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a coordinator serves. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    """Address on which the coordinator listens; beyond loopback only with a token."""
    port: Port = DEFAULT_PORT
    """Port on which the coordinator listens; 0 takes a free one."""
    token: Secret | None = None
    """The token, here and on every agent. A coordinator on loopback generates one if it is given none, and clients of the same user
    on the same machine find it."""
    operator_token: Secret | None = None
    """The operator's token, which ``weightsync revoke`` and ``weightsync update`` need. No worker may have it. A coordinator on
    loopback generates one, and the same user's commands find it. Beyond loopback these commands are refused without it."""
    metrics_token: Secret | None = None
    """A token that admits to ``/metrics`` only, for Prometheus. A coordinator on loopback generates one if it is given none."""
    tls_certificate: Path | None = None
    """File with the certificate chain, to serve https."""
    tls_key: Path | None = None
    """File with the certificate's private key."""
    run: str = ""
    """Id of the run, part of every version; by default a new one. With the same id, a restarted coordinator knows its replicas."""
    pause_mode: PauseMode = "abort"
    """What a pause does to running requests, unless the trainer names a mode (``Trainer(pause_mode=)``): ``abort``, ``wait`` or
    ``keep``."""
    require: Require = "any"
    """Replicas that a round needs to succeed: ``all`` that are known, ``any``, or a number."""
    max_unavailable: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Serving replicas that a round may take out of service at a time; by default all at once."""
    routers: tuple[str, ...] = ()
    """Routers that are told which replicas serve a verified version, separated by commas: ``sglang+http://router:30000``,
    ``webhook+https://...``. Replicas say where they are reached by ``WEIGHTSYNC_REPLICA_URL``."""
    router_token: Secret | None = None
    """Secret that routers ask of the coordinator. It is sent to each of them as a bearer token."""
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)] | None = None
    """Seconds for which a replica still serves after routers were told that it will be paused. By default 1 with
    ``WEIGHTSYNC_ROUTERS``, and 0 without."""
    fan_out: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Replicas that read from one source at a time. The others wait, and read from replicas that were updated before them and serve
    their weights (``WEIGHTSYNC_SERVE_WEIGHTS``). By default all read from the trainer at once."""
    audit_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    """The most of its time in which a replica that serves reads its weights again, every 10 seconds or less often. A difference
    from what it installed takes it out of service. 0: never."""
    round_deadline: Seconds = 600.0
    """Seconds that a round may take from its start to its result."""
    heartbeat: Seconds = 10.0
    """Seconds between pings on an agent's socket. An agent whose pong takes as long again is lost."""
    shutdown_seconds: Seconds = 5.0
    """Seconds that open connections have to end when the coordinator stops."""
    traces: Annotated[int, msgspec.Meta(ge=0, le=10000)] = 16
    """Rounds whose traces are kept in memory; 0 turns tracing off."""
    state_dir: str | None = None
    """Folder of the history of rounds; ``off`` keeps it in memory. By default ``weightsync`` in the user's state folder
    (``$XDG_STATE_HOME``, by default ``~/.local/state``)."""
    otel: Literal["on", "off"] = "off"
    """Whether rounds are exported as OpenTelemetry traces, with the extra ``[otel]`` and the standard ``OTEL_`` variables."""
    store: str | None = None
    """Where the coordinator looks, when it starts, for the newest version of the run: a folder, or ``s3://bucket/prefix``."""
    store_key: Secret | None = None
    """The private key that signs the run's stored versions. By default it is made once for a run, and kept in the state folder."""
    mounts: tuple[str, ...] = ()
    """Names of routes to add to the coordinator's own (``rollouts``); see :mod:`weightsync.server.mounts`."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both a certificate and a key: WEIGHTSYNC_TLS_CERTIFICATE and WEIGHTSYNC_TLS_KEY")
        for router in self.routers:
            if _ROUTER.fullmatch(router) is None:
                raise ConfigurationError(
                    f"WEIGHTSYNC_ROUTERS: {router!r} is no router: write it as sglang+http://host:port or "
                    "webhook+https://host/path, without a user or a query"
                )
        given = [secret for secret in (self.token, self.operator_token, self.metrics_token) if secret is not None]
        if len(given) != len(set(given)):
            raise ConfigurationError(
                "two of WEIGHTSYNC_TOKEN, WEIGHTSYNC_OPERATOR_TOKEN and WEIGHTSYNC_METRICS_TOKEN are the same secret: a holder "
                "of one could then do what the other is for. Generate each separately"
            )

    @property
    def scheme(self) -> str:
        """``https`` with a certificate; otherwise ``http``."""
        return "https" if self.tls_certificate else "http"

    @classmethod
    def load(
        cls, environment: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None, /, **given: object
    ) -> ServerSettings:
        """Settings from the environment, which wins over ``defaults``, as ``given`` (entries that are not ``None``) over both."""
        source = {**(defaults or {}), **(os.environ if environment is None else environment)}
        limits = _load(Limits, source, {})
        loaded = _load(cls, source, {"limits": limits, **given})
        return loaded if loaded.state_dir is not None else msgspec.structs.replace(loaded, state_dir=_state_directory(source))

    @property
    def history_directory(self) -> Path | None:
        """Where the history of rounds is kept; ``None`` for memory."""
        return None if self.state_dir is None or self.state_dir == "off" else Path(self.state_dir)


class Timeouts(_Checked, frozen=True, kw_only=True):
    """How many seconds trainers and engines wait where a call gives no timeout. A wrong value is a ``ConfigurationError``.

    ``Trainer(..., timeouts=Timeouts(publish=60))``. A field ``publish`` is read from ``WEIGHTSYNC_PUBLISH_TIMEOUT`` where no object
    is given.
    """

    connect: Seconds = 30.0
    """Seconds for the first connection to the coordinator."""
    reconnect: Seconds = 10.0
    """Longest pause in seconds between two attempts to reconnect."""
    heartbeat: Seconds = 10.0
    """Seconds between pings to the coordinator, and until the pong to one."""
    publish: Seconds = 300.0
    """Seconds for a publication, from the call to the round's result; and for storing a version, which ``close`` waits for."""
    replicas: Seconds = 600.0
    """Seconds that ``Trainer.wait_for_replicas`` waits, and that ``Trainer(quantize="as-served")`` waits for the first replica."""
    version: Seconds = 600.0
    """Seconds that ``Engine.wait_for_version`` waits."""


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent or the command line finds the coordinator and proves itself."""

    coordinator: Address = Address("http", "127.0.0.1", DEFAULT_PORT)
    """URL of the coordinator. The default is for engines, the command line and ``Trainer(start_coordinator=False)``. Without a URL,
    other trainers start a coordinator."""
    token: Secret | None = None
    """The coordinator's token. By default that of a coordinator of the same user on the same machine."""
    ca_file: Path | None = None
    """File with the certificates that an https coordinator is checked against, instead of the system's."""
    data_host: str | None = None
    """Address, name or network interface of this host on which a trainer rank serves its shards over a network. By default loopback
    with a coordinator on loopback; otherwise the address of the interface by which the coordinator is reached."""
    data_encryption: Literal["on", "off"] | None = None
    """Whether a trainer rank encrypts its data sockets; by default beyond loopback. With ``on``, an engine rank refuses sources on
    a network that do not; else it does as the trainer does."""
    serve_weights: Literal["on", "off"] = "off"
    """Whether engine ranks let other replicas read the version that they serve, where ``Engine(serve_weights=)`` is not given."""
    frame_bytes: Count = 512 << 20
    """Bytes of one message from the coordinator."""
    store: str | None = None
    """Where trainer ranks store versions, and engine ranks read them instead of there: a folder, or ``s3://bucket/prefix``."""
    store_keep: Count | None = None
    """Versions that the trainer leaves in the store, the newest ones; by default all."""
    store_interval: Seconds = 10.0
    """Seconds between two looks of ``weightsync relay`` at the store. After failures they are up to 60 s apart."""
    metrics_port: Port | None = None
    """Port on loopback where the process of rank 0 serves its metrics, with the token or ``WEIGHTSYNC_METRICS_TOKEN``. The process
    of rank N takes the port N above it; 0 takes a free one. By default no metrics are served."""
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        if self.ca_file is not None and self.coordinator.scheme != "https":
            raise ConfigurationError(f"a CA file (WEIGHTSYNC_CA_FILE) needs an https coordinator, not {self.coordinator}")

    @classmethod
    def load(cls, environment: Mapping[str, str] = os.environ, /, **given: object) -> ClientSettings:
        """Settings from the environment, where ``given`` (entries that are not ``None``) wins; ``coordinator`` may be a URL."""
        timeouts = _load(Timeouts, environment, {})
        return _load(cls, environment, {"timeouts": timeouts, **{k: v for k, v in given.items() if v is not None}})


def control_settings(settings: ServerSettings) -> RoundSettings:
    """What the coordinator itself needs of these settings; a run without an id gets a new one."""
    run = settings.run or f"run-{secrets.token_hex(4)}"
    return RoundSettings(
        run=run, pause_mode=settings.pause_mode, require=settings.require, max_unavailable=settings.max_unavailable,
        drain=float(bool(settings.routers)) if settings.drain_seconds is None else settings.drain_seconds,
        fan_out=settings.fan_out, timeout=settings.round_deadline, traces=settings.traces, plan_bytes=settings.limits.plan_bytes,
        audit_share=settings.audit_share,
    )  # fmt: skip


_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def variable_of(cls: type[msgspec.Struct], field: str) -> str:
    """Return the environment variable that a field is read from."""
    return f"{_PREFIX}{field.upper()}{'_TIMEOUT' if cls is Timeouts and field != 'heartbeat' else ''}"


def _load(cls: type[_Settings], environment: Mapping[str, str], given: Mapping[str, object]) -> _Settings:
    values: dict[str, Any] = {}
    if unknown := given.keys() - set(cls.__struct_fields__):
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    for field in msgspec.structs.fields(cls):
        value = given.get(field.name)
        variable = variable_of(cls, field.name)
        if value is None and field.type == Secret | None:
            value = _token(environment, variable)
        elif value is None:
            value = environment.get(variable) or None
        else:
            variable = field.name  # what the caller gave is named as the caller named it
        if value is not None:
            values[field.name] = _convert(value, field.type, variable)
    return cls(**values)


def _convert(value: object, kind: object, variable: str) -> object:
    if isinstance(value, Secret | Address | Limits | Timeouts | Path):
        return value
    try:
        if kind is Address and isinstance(value, str):
            return Address.parse(value)
        if kind == tuple[str, ...] and isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if kind == Path | None and isinstance(value, str):
            return _readable(Path(value))
        return msgspec.convert(value, type=kind, strict=False)
    except (msgspec.ValidationError, ConfigurationError) as error:
        why = in_words(str(error)) if isinstance(error, msgspec.ValidationError) else str(error)
        raise ConfigurationError(f"{variable}: {why}" if repr(value) in why else f"{variable}={value!r}: {why}") from None


def _readable(path: Path) -> Path:
    try:
        usable = path.is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):  # a name that is too long, say
        usable = False
    if not usable:
        raise ConfigurationError("no such file, or not readable")
    return path


def _token(environment: Mapping[str, str], variable: str) -> Secret | None:
    # The value must not show in the message, whatever is wrong with it.
    direct, path = environment.get(variable), environment.get(f"{variable}_FILE")
    if direct and path:
        raise ConfigurationError(f"{variable} and {variable}_FILE are both set; unset one")
    if direct:
        try:
            return Secret(direct.strip())
        except ConfigurationError as error:
            raise ConfigurationError(f"{variable}: {error}") from None
    return read_token(path, f"{variable}_FILE=") if path else None


def _variable(kind: SecretKind) -> str:
    return variable_of(ServerSettings, "token" if kind == "token" else f"{kind}_token")


def secret_in_environment(kind: SecretKind) -> Secret | None:
    """The environment's secret of a kind. Raises :class:`ConfigurationError` for one that cannot be used."""
    return _token(os.environ, _variable(kind))


def token_source(kind: SecretKind = "token") -> str | None:
    """The variable or file that the environment's secret comes from; ``None`` if the environment has none."""
    variable = _variable(kind)
    return variable if os.environ.get(variable) else os.environ.get(f"{variable}_FILE") or None


def worker_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for a child that is a worker: without the secrets that are not its."""
    hidden = ("WEIGHTSYNC_OPERATOR_TOKEN", "WEIGHTSYNC_ROUTER_TOKEN", "WEIGHTSYNC_STORE_KEY")
    return {name: value for name, value in environment.items() if name.removesuffix("_FILE") not in hidden}


def read_token(path: str, named: str) -> Secret:
    """The token in a file. Raises :class:`ConfigurationError` that starts with ``named`` and the path, never with the content."""
    try:
        with open(path, encoding="ascii") as file:
            return Secret(file.read(_MAX_TOKEN + 2).strip())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise ConfigurationError(f"{named}{path!r} cannot be read: {why}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{named}{path!r}: {error}") from None


def token_for_request(coordinator: str | None, token: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token for a coordinator that a request named, over a route that others may reach.

    It is what the request holds. The environment's token belongs to the environment's coordinator: for another one it is not used,
    which is a :class:`ConfigurationError`. ``None``: neither has one (a coordinator of this user may have left its own).
    """
    if token or coordinator is None:
        return token or None
    named = environment.get("WEIGHTSYNC_COORDINATOR")
    asked, own = Address.parse(coordinator), Address.parse(named) if named else ClientSettings().coordinator
    if asked != own and _token(environment, "WEIGHTSYNC_TOKEN") is not None:
        raise ConfigurationError(
            f"the request names the coordinator {asked}, and this process belongs to {own} (WEIGHTSYNC_COORDINATOR): the token "
            "of the environment is for that one alone. Give the token with the request, or set WEIGHTSYNC_COORDINATOR here"
        )
    return None


_LAUNCHERS = (("", "RANK", "WORLD_SIZE"), ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
"""Rank and world size as torchrun (and what imitates it) and Slurm's srun set them, where the first one is set. A batch script and
``salloc``'s shell have a ``SLURM_PROCID`` too, and are no rank of anything; what srun starts has the number of its step."""


def launched_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and world size that torchrun or Slurm set for this process, or ``None``.

    Raises :class:`ConfigurationError` if only one of the two is set, or if the rank is not below the world size.
    """
    for sign, rank, world_size in _LAUNCHERS:
        values = environment.get(rank), environment.get(world_size)
        if (sign and not environment.get(sign)) or not any(values):
            continue
        if not all(values):
            raise ConfigurationError(f"{rank}={values[0]!r} and {world_size}={values[1]!r}: set both or neither")
        try:
            place = int(values[0] or ""), int(values[1] or "")
        except ValueError:
            place = -1, 0
        if not 0 <= place[0] < place[1]:
            raise ConfigurationError(f"{rank}={values[0]!r} is no rank of {world_size}={values[1]!r}")
        return place
    return None


def update_networks(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Where the process group of an update from outside may meet (``WEIGHTSYNC_UPDATE_NETWORKS``); empty: anywhere."""
    text = environment.get("WEIGHTSYNC_UPDATE_NETWORKS") or ""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def replica_url(environment: Mapping[str, str] = os.environ) -> str:
    """Where routers reach this engine's replica (``WEIGHTSYNC_REPLICA_URL``); empty if it is not said."""
    url = (environment.get("WEIGHTSYNC_REPLICA_URL") or "").rstrip("/")
    if url and ROUTED_URL.fullmatch(url) is None:
        raise ConfigurationError(f"WEIGHTSYNC_REPLICA_URL={url!r}: write it as http://host:port, without a user or a query")
    return url


def runtime_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this user's running coordinators leave their tokens; may not exist yet. Callers check its owner and mode."""
    base = environment.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and os.path.isdir(base):
        return Path(base) / "weightsync"
    return Path(environment.get("TMPDIR") or tempfile.gettempdir()) / f"weightsync-{os.getuid()}"


def _state_directory(environment: Mapping[str, str]) -> str | None:
    base, home = environment.get("XDG_STATE_HOME"), environment.get("HOME")
    if base and os.path.isabs(base):
        return os.path.join(base, "weightsync")
    return os.path.join(home, ".local", "state", "weightsync") if home and os.path.isabs(home) else None


def agent_environment(settings: ClientSettings) -> dict[str, str]:
    """The variables that give a child process the same coordinator, token, CA file and demand for encryption.

    (The token is never an argument.)
    """
    values = {name: getattr(settings, name) for name in ("coordinator", "token", "ca_file", "data_encryption")}
    return {
        variable_of(ClientSettings, name): value.reveal() if isinstance(value, Secret) else str(value)
        for name, value in values.items()
        if value is not None
    }


class Variable(NamedTuple):
    """An environment variable that is no field of a settings class."""

    readers: str
    meaning: str
    default: str = "none"


VARIABLES = {
    "WEIGHTSYNC_TOKEN_FILE": Variable("all", "File with the token, instead of ``WEIGHTSYNC_TOKEN``; both is an error."),
    "WEIGHTSYNC_OPERATOR_TOKEN_FILE": Variable("coordinator, operators' commands", "File with the operator's token."),
    "WEIGHTSYNC_METRICS_TOKEN_FILE": Variable("coordinator, agents", "File with the token that admits to ``/metrics`` only."),
    "WEIGHTSYNC_ROUTER_TOKEN_FILE": Variable("coordinator", "File with the secret that routers ask for."),
    "WEIGHTSYNC_STORE_KEY_FILE": Variable("coordinator", "File with the private key that signs the run's stored versions."),
    "WEIGHTSYNC_STORE_PUBLIC_KEY": Variable("``store``, ``relay``", "The run's public key, as ``weightsync store key`` prints it."),
    "WEIGHTSYNC_REPLICA": Variable("engines", "Replica that this process is a rank of.", "vLLM and SGLang: host and process id"),
    "WEIGHTSYNC_REPLICA_URL": Variable("engines", "URL at which routers reach this replica, told to them by the coordinator."),
    "WEIGHTSYNC_DELIVERY": Variable("vLLM, SGLang", "``direct``, ``streamed``, or ``auto``: direct if possible.", "``auto``"),
    "WEIGHTSYNC_DRAFT_PREFIX": Variable("vLLM", "Prefix of the names of a speculative decoder's tensors."),
    "WEIGHTSYNC_UPDATE_NETWORKS": Variable("vLLM", "Networks where updates from outside may meet, separated by commas.", "any"),
    "WEIGHTSYNC_ADAPTER": Variable("TRL's trainers", "``owner/name`` under which an adapter is published.", "``trl/RUN``"),
    "RANK": Variable("trainers, engines", "Rank of this process, as torchrun sets it. Needs ``WORLD_SIZE``.", "torch, Slurm, or 0"),
    "WORLD_SIZE": Variable("trainers, engines", "Number of ranks, as torchrun sets it. Needs ``RANK``.", "torch, Slurm, or 1"),
    "SLURM_STEP_ID": Variable("trainers, engines", "Set by srun: the two variables below count."),
    "SLURM_PROCID": Variable("trainers, engines", "Rank of this process, as srun sets it."),
    "SLURM_STEP_NUM_TASKS": Variable("trainers, engines", "Number of ranks, as srun sets it."),
    "XDG_RUNTIME_DIR": Variable("all", "Folder in which a coordinator leaves its tokens for this user.", "``TMPDIR``"),
    "TMPDIR": Variable("all", "Folder in which a coordinator leaves its tokens for this user.", "the system's"),
    "XDG_STATE_HOME": Variable("coordinator", "Folder of the history of rounds.", "``~/.local/state``"),
    "HOME": Variable("coordinator", "Folder of the history of rounds, without ``XDG_STATE_HOME``."),
    "SGLANG_PLUGINS": Variable("``weightsync.integrations sglang``", "Plugins that SGLang loads.", "all"),
    "VERL_USE_EXTERNAL_PLUGINS": Variable("``weightsync.integrations verl``", "Plugins that verl loads.", "``auto``"),
    "RAY_LOCAL_WORLD_SIZE": Variable("verl's rollout ranks", "Ranks of the rollout on this node, as verl sets it."),
    "VLLM_PLUGINS": Variable("frameworks' ranks", "Plugins that vLLM loads.", "all"),
}
"""Every variable that weightsync reads, beside the fields of the settings. Their documentation is generated from here."""

_FIELDS = {variable_of(cls, field) for cls in (ServerSettings, Limits, ClientSettings, Timeouts) for field in cls.__struct_fields__}


def variable(name: str, default: str = "") -> str:
    """Return an environment variable as it is, or ``default`` if it is not set.

    Raises:
        ConfigurationError: The name is in no table of variables.
    """
    if name not in VARIABLES and name not in _FIELDS:
        raise ConfigurationError(f"weightsync reads no environment variable {name}")
    return os.environ.get(name, default)
