"""What a training script uses to publish LoRA adapters, as separate versions beside those of the base weights."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from msgspec import structs

from weightsync.closing import Closeable, OnFailure
from weightsync.config import Timeouts
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, ProtocolError, RoundFailed, VersionError, WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Version
from weightsync.model.lora import AdapterSpec, adapter_label, check_adapter_name, lora_modules
from weightsync.protocol.lora_messages import Retired, RetireLora
from weightsync.protocol.messages import Hello, Publish, RoundResult
from weightsync.publishing.published_shards import publishing_transports
from weightsync.tensors.shards import ShardedState
from weightsync.trainer.lora_state import adapter_of, check_finite
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import Network, Transport

_numbers: weakref.WeakKeyDictionary[Trainer, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counts the adapters that were made for each trainer. All ranks make them in the same order."""


class _AdapterPublisher(Trainer):
    """Joins as a rank that publishes adapters, from a copy in host memory, which every engine rank can read."""

    _source = ""
    _stores = False

    @classmethod
    def of(cls, source: str) -> type[_AdapterPublisher]:
        """The class of the ranks of ``source``: a trainer joins while it is made."""
        return type(cls.__name__, (cls,), {"_source": f"adapters:{source}"})

    @staticmethod
    def _allowed(given: Sequence[Transport | str] | None, network: Network) -> tuple[Transport, ...]:
        return tuple(transport for transport in publishing_transports(given, network) if "cuda" not in transport.traits.reads)

    def _hello(self) -> Hello:
        return structs.replace(super()._hello(), role="adapters", name=self._source, version=None, published=-1)

    def check_modules(self) -> None:
        lora_modules(self._role.manifest)

    def publish_adapter(self, spec: AdapterSpec, number: int | None, step: int | None, timeout: float | None) -> RoundResult:
        with self._turn(number, step, timeout, None) as (wanted, deadline):
            wanted = structs.replace(wanted, adapter=spec)
            if isinstance(self._role, TrainerRole):  # and no stream's
                self._check_finite(self._role, wanted, deadline)
            with self._armed(wanted, deadline, copies=False) as placing:
                return self._ask(wanted, deadline, placing)

    def _check_finite(self, role: TrainerRole, wanted: Publish, deadline: Deadline) -> None:
        try:
            check_finite(role.masters(), "the adapter", role.manifest)
        except WeightSyncError as error:
            role.release()  # nothing is armed, so nothing else would
            self._tell_others(wanted, error, deadline)
            raise

    def retire(self, name: str, keep: int, timeout: float | None) -> Retired:
        self._check_open()
        deadline = Deadline(self._settings.timeouts.publish if timeout is None else timeout)
        answer = self._link.call(RetireLora(name, keep), deadline.remaining(f"retiring versions of {name}"))
        if not isinstance(answer, Retired):
            raise ProtocolError(f"the coordinator answered a retirement with {type(answer).__name__}")
        return answer


class Adapters(Closeable):
    """Publishes versions of a LoRA adapter from one trainer rank. Make one on every rank, and call it alike on every rank.

    Engines serve many versions of many adapters at once. Publishing one pauses nothing and drops no cache: each rank of a replica
    stages it and digests it, and only when all have it may requests use it. Running requests go on with the version that they began
    with. For a new request ``alice/math`` is the newest version that its replica has, and ``alice/math@2`` is that version.

    ::

        adapters = weightsync.Adapters(peft_model, base=trainer)
        adapters.publish("alice/math")          # alice/math@0, then @1, ...
        adapters.retire("alice/math", keep=2)

    Args:
        state: A model with PEFT's adapters, or an adapter's tensors (plain, DTensors, or a :class:`ShardedState`) by the names in
            PEFT's files, with or without ``base_model.model.``.
        base: The trainer of the base weights, which has published them; an adapter is for exactly the version that it published
            last. In another process, that :class:`Version`, which is the ``version`` of what its ``publish()`` returned, and
            the ``coordinator``. Send it there as JSON (``msgspec.json.encode`` and ``decode(..., type=Version)``). ``None``: base
            weights that weightsync does not deliver.
        adapter: Name of the adapter in a PEFT model.
        alpha: Its ``lora_alpha``, where ``state`` is no model. Each module is scaled by its own rank, as PEFT does.
        rslora: Its ``use_rslora``, where ``state`` is no model.
        on_base_update: Whether engines keep its versions when their base weights change (``"keep"``), or serve them no
            longer (``"refuse"``).
        coordinator: URL, if ``base`` is no trainer; by default ``WEIGHTSYNC_COORDINATOR``.
        token: The coordinator's token.
        rank: As for :class:`Trainer`; by default that of ``base``, like ``world_size``.
        world_size: As for :class:`Trainer`.
        source: A name for these ranks, equal on all and used by no others; needed for several ranks if ``base`` is no trainer.
        dtype: As for :class:`Trainer`; ``torch.bfloat16`` halves adapters that are trained in float32.
        transports: As for :class:`Trainer`. Adapters are read from host memory.
        timeouts: As for :class:`Trainer`.

    Raises:
        ConfigurationError: The adapter has parts that cannot be published, such as DoRA's magnitudes.
        WeightSyncError: As :class:`Trainer` raises.
    """

    def __init__(
        self,
        state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState,
        base: Trainer | Version | None,
        *,
        adapter: str = "default",
        alpha: float | None = None,
        rslora: bool = False,
        on_base_update: Literal["keep", "refuse"] = "keep",
        coordinator: str | None = None,
        token: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        source: str = "",
        dtype: torch.dtype | None = None,
        transports: Sequence[Transport | str] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        if on_base_update not in ("keep", "refuse"):
            raise ConfigurationError(f'on_base_update is "keep" or "refuse", not {on_base_update!r}')
        self._origin = Origin()
        self._base, self._on_base_update = base, on_base_update
        tensors, self._config = adapter_of(state, adapter, alpha, rslora)
        if isinstance(base, Trainer):
            environment = base.environment
            coordinator, token = environment["WEIGHTSYNC_COORDINATOR"], environment.get("WEIGHTSYNC_TOKEN")
            rank, world_size = base.rank, base.world_size
            source = source or f"{next(_numbers.setdefault(base, itertools.count(1)))}"
        elif not source and (world_size or 1) > 1:
            raise ConfigurationError("several ranks that publish an adapter without a Trainer need a common name: give source=...")
        self._publisher = _AdapterPublisher.of(source or uuid.uuid4().hex)(
            tensors, coordinator, token=token, rank=rank, world_size=world_size, dtype=dtype, transports=transports,
            timeouts=timeouts, start_coordinator=False,
        )  # fmt: skip
        with OnFailure(self._publisher.close):
            self._publisher.check_modules()

    def publish(
        self, name: str, number: int | None = None, *, step: int | None = None, timeout: float | None = None
    ) -> RoundResult:
        """Bring the adapter as it is now to every replica, as version ``number`` of ``name``, or as the next.

        Returns when every replica that takes adapters can serve it, or failed to take it: see the result's ``replicas``. The
        version in the result has the adapter's name as its run. Replicas that join later get it while this object lives and
        publishes nothing else.

        Raises:
            ConfigurationError: The name is not ``owner/name`` of letters, digits, ``.``, ``_`` and ``-``, or the adapter holds NaN
                or infinity.
            VersionError: The number is not above the name's last one, or the trainer has not published the base weights.
            RoundFailed: Fewer replicas than the coordinator's policy requires took it: another base, an unknown module, too large
                a rank, no free slot. If none could take it, the number stays free.
            WeightSyncError: As :meth:`Trainer.publish` raises.
        """
        check_adapter_name(name)
        base = self._base.version if isinstance(self._base, Trainer) else self._base
        if isinstance(self._base, Trainer) and base is None:
            raise VersionError(f"{name} has no base: publish the base weights first, with trainer.publish()")
        return self._publisher.publish_adapter(AdapterSpec(name, self._config, base, self._on_base_update), number, step, timeout)

    def retire(self, name: str, keep: int = 1, *, timeout: float | None = None) -> tuple[str, ...]:
        """Serve only the newest ``keep`` versions of ``name`` to new requests. Any rank may call it; twice does no harm.

        A retired version is freed when the last request that uses it has ended. A replica that missed newer versions keeps its own
        newest ``keep`` until it has them. Returns the labels of those that were retired somewhere.

        Raises:
            ConfigurationError: ``keep`` is no number from 0.
            MembershipError: No version of ``name`` is known.
            RoundFailed: A replica could not be told. It drops them when it has reconnected.
        """
        check_adapter_name(name)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise ConfigurationError(f"keep is a number from 0, not {keep!r}")
        answer = self._publisher.retire(name, keep, timeout)
        if answer.errors:
            raise RoundFailed(f"versions of {name} were retired, but not everywhere: {'; '.join(answer.errors)}")
        return tuple(adapter_label(name, number) for number in answer.numbers)

    def close(self) -> None:
        """Leave the coordinator. Replicas keep what they serve. Safe twice."""
        if not self._origin.elsewhere:
            self._publisher.close()
