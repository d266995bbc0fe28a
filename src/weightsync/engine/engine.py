"""What an engine's process uses: one object on every engine rank, around an adapter."""

from __future__ import annotations

import os
import secrets
import uuid
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import get_args

from weightsync.closing import Closeable
from weightsync.config import ClientSettings, Secret, Timeouts, replica_url, variable
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine_role import EngineRole
from weightsync.engine.served_weights import ServedWeights
from weightsync.errors import ConfigurationError
from weightsync.forks import Origin
from weightsync.launch import place_in_world
from weightsync.model import Version
from weightsync.protocol.connection import CoordinatorConnection
from weightsync.protocol.messages import PROTOCOL, Body, Delivery, Hello
from weightsync.protocol.round_log import LoggedCalls
from weightsync.publishing.published_shards import network_of, publishing_transports
from weightsync.transports.base import Transport
from weightsync.transports.hostinfo import this_host

_LONGEST = 1000  # characters of a reason


class Engine(Closeable):
    """Joins one engine rank to the coordinator and keeps its weights current, from threads of its own.

    The constructor asks the ``adapter`` which tensors the engine takes and where its parameters are, and joins the coordinator by
    one WebSocket, over which each round sends its steps to this rank. Only :class:`~weightsync.engine.session.EngineSession`, the
    rank's state machine, calls the adapter:

    1. *Prepare*, while the engine serves: check the plan, open a reader for each publisher that it names, expand the copy tables.
    2. *Pause*: the adapter stops generating. From here the rank is out of service until it commits.
    3. *Move*: read this rank's boxes. Direct delivery writes them into the parameters; streamed delivery assembles whole tensors in
       two buckets, one of which is read while the engine's own loader takes the other. The installed bytes are digested.
    4. *Commit*, once the digests of all ranks of the replica add up to the published ones: the engine finishes loading, flushes
       its caches and takes the version's label.
    5. *Resume*: the adapter generates again.

    A rank never resumes bytes that were not committed, whatever the coordinator says. If a step fails or a connection breaks, the
    replica stays paused and gets another attempt. A replica that joins late gets the last version, where it can still be read.

    ``replica`` names the serving engine; its ranks are ``rank`` of ``world_size`` (0 of 1) under the same name, and it takes part
    in rounds when all have joined. The name defaults to ``WEIGHTSYNC_REPLICA``; rank and world size default to those of the launch
    (``torch.distributed``, torchrun, Slurm); ``coordinator``, a URL, to ``WEIGHTSYNC_COORDINATOR``.

    ``delivery`` is ``"direct"`` (into the adapter's shards), ``"streamed"`` (through its loader) or ``"auto"``. ``bucket_bytes`` is
    the size of each of the ``staging_buckets`` (2, or 1); a larger tensor gets a bucket of its own size. It defaults to 256 MiB;
    where the buckets are GPU memory, to a 32nd of what is free there, from 64 MiB to 1 GiB. ``transports`` are the schemes allowed,
    best first. With ``serve_weights`` (or ``WEIGHTSYNC_SERVE_WEIGHTS=on``) other replicas may read a version from this engine while
    it serves it, so that they need no trainer. That takes an adapter with ``shards``, and host memory for a copy of them, unless
    they are on one CUDA device and a transport reads them there. Close it, or use it in a ``with``.

    Raises :class:`~weightsync.errors.CoordinatorUnreachable`, :class:`~weightsync.errors.AuthenticationError`,
    :class:`~weightsync.errors.MembershipError` (the name is in use),
    :class:`~weightsync.errors.ManifestMismatch` (the engine does not take the trainer's tensors) and
    :class:`~weightsync.errors.TransportUnavailable`.

    ::

        engine = weightsync.Engine(weightsync.ModuleAdapter(model), replica="mine-0", coordinator="http://head:7400")
    """

    _served: ServedWeights | None = None

    def __init__(
        self,
        adapter: EngineAdapter,
        replica: str | None = None,
        coordinator: str | None = None,
        *,
        token: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        run: str = "",
        delivery: Delivery = "auto",
        bucket_bytes: int | None = None,
        staging_buckets: int = 2,
        timeouts: Timeouts | None = None,
        transports: Sequence[Transport | str] | None = None,
        serve_weights: bool | None = None,
    ) -> None:
        if not isinstance(adapter, EngineAdapter):
            raise ConfigurationError(
                f"{adapter!r} is not an engine adapter: give an object of a class that derives from weightsync.EngineAdapter "
                "(weightsync.ModuleAdapter for a torch.nn.Module)"
            )
        replica, rank, world_size = _place_in_replica(replica, rank, world_size)
        if not replica or "/" in replica or not replica.isprintable():
            raise ConfigurationError(f"a replica's name is printable characters without '/', not {replica!r}")
        if delivery not in get_args(Delivery):
            raise ConfigurationError(f"delivery {delivery!r} is none of {', '.join(get_args(Delivery))}")
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ConfigurationError(f"bucket_bytes must be positive, not {bucket_bytes}")
        if staging_buckets not in (1, 2):
            raise ConfigurationError(f"staging_buckets must be 1 or 2, not {staging_buckets!r}")
        self._origin = Origin()
        adapter.replica_ranks = world_size
        self.replica, self.rank, self.world_size = replica, rank, world_size
        self._run, self._session, self._delivery = run, Secret(uuid.uuid4().hex), delivery
        self._host = this_host()
        settings = ClientSettings.load(coordinator=coordinator, token=Secret(token) if token else None, timeouts=timeouts)
        self._timeouts, self._url = settings.timeouts, replica_url()
        with ExitStack() as owned:
            self._role = EngineRole(
                adapter, transports, self._host, progress=self._progress, report=self._report, bucket_bytes=bucket_bytes,
                buffers=staging_buckets,
                encrypted=settings.data_encryption == "on", rank=rank, alone=world_size == 1, member=f"{replica}/{rank}",
            )  # fmt: skip
            if delivery == "direct" and self._role.layout is None:
                raise ConfigurationError(f"the {adapter.name} adapter has no shards(): it can only be streamed to")
            if not adapter.can_load and (delivery == "streamed" or self._role.layout is None):
                raise ConfigurationError(
                    f"the {adapter.name} adapter has no load(), so it cannot be streamed to: define load(), or shards() and "
                    'another delivery than "streamed"'
                )
            self._link = CoordinatorConnection(
                settings,
                hello=self._hello,
                receive=LoggedCalls(f"{replica}/{rank}", self._role.receive, hands_over=adapter.name == "receiver"),
                on_lost=self._lost,
                name=f"{replica}/{rank}",
            )
            owned.callback(self._link.close)
            owned.callback(self._role.close)  # first: it ends what a call is still doing
            if settings.serve_weights == "on" if serve_weights is None else serve_weights:
                network = network_of(settings)
                self._served = self._role.serve_weights(
                    publishing_transports(transports, network), secrets.token_bytes(32), network
                )
            if settings.metrics_port is not None:
                from weightsync.server.agent_metrics import agent_metrics

                owned.callback(
                    agent_metrics.join(settings, f"{replica}/{rank}", rank, self._link, lambda: self._role.session.served_version)
                )
            self._link.connect()
            self._owned = owned.pop_all()

    def _progress(self, nbytes: int) -> None:
        self._link.progress(nbytes)

    def _report(self, body: Body) -> None:
        self._link.report(body, self._timeouts.heartbeat)

    def _lost(self, _: str) -> None:
        self._role.session.abort()
        self._role.loras.session.abort()

    def _hello(self) -> Hello:
        role = self._role
        direct = role.layout is not None and self._delivery != "streamed"
        served = self._served
        return Hello(
            protocol=PROTOCOL, run=self._run, role="engine", name=self.replica, rank=self.rank, world_size=self.world_size,
            session=self._session.reveal(), host=self._host, pid=os.getpid(), manifest=role.manifest.tensors,
            layout=role.layout.to_columns() if direct and role.layout is not None else None,
            no_layout="" if direct else str(role.adapter.no_shards)[:_LONGEST], device_memory=direct and role.device_memory,
            transports=tuple(transport.name for transport in role.transports),
            delivery=self._delivery, bucket_bytes=role.bucket_bytes, adapter=role.adapter.name,
            serving=role.session.served_version, version=role.session.latest, takes_any=role.adapter.takes_any,
            moves=role.adapter.moves,
            offers=served.offers if served is not None else (), key=served.key if served is not None else b"",
            source_layout=served.layout.to_columns() if served is not None else None,
            live=served is not None and served.in_place, url=self._url, lora_slots=role.loras.slots,
            loras=role.loras.served, taken_loras=role.loras.taken,
            refuted=(role.session.refuted or (None, ""))[1][:_LONGEST],
        )  # fmt: skip

    @property
    def serving(self) -> Version | None:
        """The version whose bytes this rank holds, verified and committed; ``None`` before the first and during an update."""
        return self._role.session.serving

    def wait_for_version(self, version: int | Version, timeout: float | None = None) -> Version:
        """Wait until this rank serves ``version`` or a later one, and return the one that it serves.

        A number is compared with the number alone, a :class:`~weightsync.Version` with its epoch first. Raises
        :class:`~weightsync.errors.DeadlineExceeded`, :class:`~weightsync.errors.Aborted` once the engine is closed, and
        :class:`~weightsync.errors.ConfigurationError` for a version that cannot come.
        """
        self._origin.require("this engine")
        if not isinstance(version, Version) and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise ConfigurationError(f"a version to wait for is a number from 0, or a Version, not {version!r}")
        return self._role.session.wait_for_version(version, Deadline(self._timeouts.version if timeout is None else timeout))

    def drain(self, timeout: float) -> None:
        """Wait until what the coordinator asked of this rank is answered, up to ``timeout`` seconds."""
        self._link.drain(timeout)

    def settle(self, timeout: float) -> None:
        """Call :meth:`drain`, which it was called before. Deprecated."""
        warnings.warn("Engine.settle is now Engine.drain", DeprecationWarning, stacklevel=2)
        self.drain(timeout)

    def close(self) -> None:
        """Leave the coordinator. The engine keeps its weights. Safe twice. In a forked child: nothing."""
        if self._origin.elsewhere:
            return
        self._owned.close()


def _place_in_replica(replica: str | None, rank: int | None, world_size: int | None) -> tuple[str, int, int]:
    if replica is None:
        # All processes of a launch share its environment: they are ranks of one replica.
        replica = variable("WEIGHTSYNC_REPLICA")
        if not replica:
            raise ConfigurationError("an engine needs the name of its replica: give replica=..., or set WEIGHTSYNC_REPLICA")
        return replica, *place_in_world(rank, world_size)
    # Named in code, it may be one of several in a launch (one a trainer's rank, say), and the launch says nothing about it.
    rank, world_size = rank or 0, 1 if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is not one of the {world_size} ranks of replica {replica!r}")
    return replica, rank, world_size
