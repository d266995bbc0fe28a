"""Updates of a vLLM worker inside a call of the framework that started its engine, by methods of vLLM's worker.

A framework calls them on all workers with vLLM's own ``collective_rpc``. While :func:`update` runs, the worker's thread and the
engine's loop are in the call, so no step can start. Nothing else of vLLM is needed: no weight-transfer backend, no routes.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from typing import Any, cast

from weightsync import __version__
from weightsync.config import read_token, variable
from weightsync.engine.engine import Engine
from weightsync.engines.attach_options import AttachOptions
from weightsync.engines.hf_checkpoint import HfCheckpoint, checkpoint_of
from weightsync.engines.owner_call import OwnerCall
from weightsync.engines.traced_shards import DirectShards, chosen_shards
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.engines.vllm.direct import direct_shards
from weightsync.engines.vllm.loading import install
from weightsync.engines.vllm.together import global_rank, refuse_balancing, together
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import ConfigurationError
from weightsync.model import Version
from weightsync.protocol.messages import Delivery
from weightsync.releases import IN_CALL, check_interface, warn_if_untested

_OWN = "_weightsync_called"
_SETTLE = 10.0  # seconds from the end of the last step to the end of the update


class _CalledAdapter(VllmWorkerAdapter):
    """Each rank waits for its own worker's call, and loads there."""

    owner_pauses = True
    sleeps = True  # the framework may let the engine sleep between two updates
    no_source = "its weights may be asleep while it serves, because its framework pauses it"

    def __init__(self, call: OwnerCall, checkpoint: HfCheckpoint, direct: DirectShards | None, device: Any) -> None:  # noqa: ANN401
        super().__init__(checkpoint, call, direct, device)
        self._call = call

    def announced(self, order: tuple[int, int] | None) -> None:
        """Take note of the version of the next pause."""
        self._call.announced(order)

    def aborted(self, reason: str) -> None:
        """End the framework's call with an error."""
        self._call.aborted(reason)

    def call_ended(self, call: int, reason: str, refuse: bool) -> None:
        """End the framework's call, if no update is in it."""
        self._call.ended(call, reason, refuse)

    def begin(self) -> None:
        """Start a new version in the framework's call."""
        self._call.require_call()
        super().begin()

    @property
    def nbytes(self) -> int:
        """Bytes that an update brings to this rank."""
        shards = self.shards() if self.received_direct else None
        if shards is None:
            return sum(spec.nbytes for spec in self.manifest() if spec.name not in self.kept)
        return sum(shard.tensor.nbytes for shard in shards)


def called(worker: Any) -> CalledWorker:  # noqa: ANN401 - vLLM's
    """Return what updates ``worker``, which keeps it."""
    own = worker.__dict__.get(_OWN)
    if own is None:
        own = worker.__dict__[_OWN] = CalledWorker(worker)
    return cast(CalledWorker, own)


class CalledWorker:
    """One worker of an engine that a framework owns. All methods run on the worker's thread.

    If one fails in any worker, it fails in all: see :func:`~weightsync.engines.vllm.together.together`.
    """

    def __init__(self, worker: Any) -> None:  # noqa: ANN401 - vLLM's
        self._worker, self._parallel = worker, worker.parallel_config
        self._rank = global_rank(self._parallel)
        self._chosen: dict[Delivery, tuple[DirectShards | None, str]] = {}
        self._call = OwnerCall(self._load, f"rank {self._rank}")
        self._adapter: _CalledAdapter | None = None
        self._engine: Engine | None = None
        self._joined_as: tuple[str, str, str] | None = None
        self._owned = ExitStack()
        self._discarded = False
        for name in ("sleep", "discard"):
            wrap_once(worker, name, self._note_discard)

    def _note_discard(self, discards: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        """Note that weights may be gone: after a sleep of level 2 their memory holds anything."""
        level = kwargs.get("level", args[0] if args else 1)
        self._discarded = self._discarded or level != 1
        return discards(*args, **kwargs)

    def _load(self) -> None:
        if self._adapter is not None:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(self._worker.vllm_config):
                install(self._worker.get_model(), self._worker.model_config, self._adapter.staged())
            self._adapter.loaded()

    @functools.cached_property
    def _checkpoint(self) -> HfCheckpoint:
        config = self._worker.model_config
        check_interface("vllm", IN_CALL)
        warn_if_untested("vllm")
        refuse_balancing(self._parallel)
        return checkpoint_of(config.model, config.revision, config.hf_config)

    @functools.cached_property
    def _traced(self) -> DirectShards | str:
        worker, ranks = self._worker, self._parallel.world_size_across_dp
        return direct_shards(worker.vllm_config, worker.get_model(), worker.device, self._checkpoint, ranks)

    def _find(self, request: Delivery) -> tuple[HfCheckpoint, DirectShards | None, str]:
        """Return the checkpoint, and shards for direct delivery; ``None`` and the reason to stream."""
        checkpoint = self._checkpoint
        if request not in self._chosen:
            self._chosen[request] = chosen_shards(request, lambda: self._traced, "this vLLM worker", "vLLM")
        return checkpoint, *self._chosen[request]

    def ready(self, delivery: Delivery | None = None, release: str | None = None) -> dict[str, Any]:
        """Prepare to join: learn how weights are delivered. The engine must be awake. The first call may take seconds.

        Args:
            delivery: See :meth:`join`.
            release: The caller's release of weightsync. With another one here this raises, for frameworks that drop answers.

        Returns:
            Release of weightsync, rank, number of ranks, delivery, and why it is not direct.
        """
        about: dict[str, Any] = {}  # it stays empty if another worker raises the error
        with together(self._parallel):
            if release not in (None, __version__):
                raise ConfigurationError(f"vLLM's workers have weightsync {__version__}, and the caller has {release}")
            about = self._about(*self._find(AttachOptions(delivery=delivery).chosen_delivery())[1:])
        return about

    def _about(self, direct: DirectShards | None, because: str) -> dict[str, Any]:
        return {
            "weightsync": __version__, "rank": self._rank, "ranks": self._parallel.world_size_across_dp,
            "delivery": "streamed" if direct is None else "direct",
            "reason": because,
        }  # fmt: skip

    def join(
        self,
        coordinator: str | None = None,
        replica: str | None = None,
        *,
        token_file: str | None = None,
        run: str = "",
        delivery: Delivery | None = None,
        transports: list[str] | None = None,
        bucket_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Join a coordinator as a rank of ``replica``, as :meth:`ready` prepares it. The engine must be awake.

        Does nothing if this worker has joined that coordinator under that name. Otherwise it leaves the earlier one.

        Args:
            coordinator: URL of the coordinator; by default ``WEIGHTSYNC_COORDINATOR`` of the worker's environment.
            replica: Name of the replica; by default ``WEIGHTSYNC_REPLICA``.
            token_file: File with the coordinator's token, readable by every worker. Without it, the environment's token is used
                for the environment's coordinator, and a coordinator of the same user on the same machine needs none.
            run: Run of the coordinator; empty for any.
            delivery: See :class:`~weightsync.engines.attach_options.AttachOptions`, as the next two.
            transports: Transports that may be used.
            bucket_bytes: Size of a staging bucket; by default chosen from free memory.

        Returns:
            As :meth:`ready` does, and the replica.
        """
        name = replica or variable("WEIGHTSYNC_REPLICA")
        place = (coordinator or variable("WEIGHTSYNC_COORDINATOR"), name, run)
        about: dict[str, Any] = {}  # it stays empty if another worker raises the error
        with together(self._parallel, self.leave):
            if not name:
                raise ConfigurationError("a vLLM replica needs a name: give replica, or set WEIGHTSYNC_REPLICA")
            if getattr(getattr(self._worker, "weight_transfer_engine", None), "joined", False) is True:
                raise ConfigurationError(
                    "this vLLM has joined a coordinator by its weight-transfer backend (attach or WEIGHTSYNC_COORDINATOR), which "
                    "pauses and updates it: use one way only"
                )
            options = AttachOptions(
                replica=name, coordinator=coordinator, run=run, bucket_bytes=bucket_bytes, transports=transports,
                delivery=delivery, token=read_token(token_file, "token_file ").reveal() if token_file else None,
            )  # fmt: skip
            chosen = options.chosen_delivery()
            checkpoint, direct, because = self._find(chosen)
            if self._joined_as != place:
                self.leave()
                adapter = _CalledAdapter(self._call, checkpoint, direct, self._worker.device)
                adapter.no_shards = because
                self._engine = self._owned.enter_context(
                    options.join(adapter, self._rank, self._parallel.world_size_across_dp, chosen)
                )
                self._adapter, self._joined_as = adapter, place
            about = {**self._about(direct, because), "replica": name}
        return about

    def update(self, number: int | None = None, epoch: int | None = None, timeout: float = 300.0, call: int = 0) -> dict[str, Any]:
        """Let one update in, and return when this engine's ranks have verified and committed it.

        The framework has paused the engine in its own way and mapped the weights' memory. It drops the engine's caches (prefix
        cache, keys and values) itself. After an error it must not resume the engine before a later update succeeds, unless the
        message says that the engine keeps its weights. vLLM passes on the message alone, not the class of the error.

        Args:
            number: Number of the version that the trainer publishes. An update to an earlier version does not enter. If the
                engine holds this version already, the call returns at once. ``None``: the next update, whatever its version.
            epoch: Epoch of that version, for a trainer that uses numbers again; ``None``: any.
            timeout: Seconds in which the update must come.
            call: Number of this call, by which the coordinator ends it if nothing is published.

        Returns:
            The version, its digest, how it was verified (``installed`` or ``received``), this rank's bytes (0 if the engine held
            the version already), the seconds until the update came, and those of the update.
        """
        started = time.monotonic()
        about: dict[str, Any] = {}  # it stays empty if another worker raises the error
        with together(self._parallel):
            adapter, engine = self._adapter, self._engine
            if adapter is None or engine is None:
                raise ConfigurationError("this vLLM worker has not joined a coordinator: call weightsync_join first")
            held, waited, nbytes = engine.serving, 0.0, 0
            if held is None or self._discarded or not _is_there(held, number, epoch):
                waited = self._call.serve(number, epoch, timeout, call)
                held, nbytes = engine.wait_for_version(0, timeout=_SETTLE), adapter.nbytes
                self._discarded = False
            about = {
                "replica": engine.replica, "rank": self._rank, "version": str(held), "epoch": held.epoch, "number": held.number,
                "digest": held.digest, "verified": "installed" if adapter.received_direct and not adapter.repacks else "received",
                "nbytes": nbytes, "waited": waited, "seconds": time.monotonic() - started - waited,
            }  # fmt: skip
        return about

    def leave(self) -> None:
        """Leave the coordinator. The engine keeps its weights. Idempotent."""
        self._adapter = self._engine = self._joined_as = None
        self._owned.close()
        self._owned = ExitStack()


def _is_there(held: Version, number: int | None, epoch: int | None) -> bool:
    if number is None:
        return False
    return held.number == number if epoch is None else held.order >= (epoch, number)
