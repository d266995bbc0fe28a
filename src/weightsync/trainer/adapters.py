"""What a training script uses to publish LoRA adapters, as separate versions beside those of the base weights.

The tensors and the configuration of an adapter, as PEFT holds them in a model or as a state dict.
"""

from __future__ import annotations

import itertools
import math
import re
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from msgspec import structs

from weightsync.closing import Closeable, OnFailure
from weightsync.config import Timeouts
from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, ProtocolError, RoundFailed, VersionError, WeightSyncError
from weightsync.forks import Origin
from weightsync.model import Manifest, Version
from weightsync.model.lora import MAX_FACTOR, PREFIX, AdapterSpec, LoraConfig, adapter_label, check_adapter_name, lora_modules
from weightsync.protocol.lora_messages import MAX_KEPT, Retired, RetireLora
from weightsync.protocol.messages import Hello, Publish, RoundResult
from weightsync.publishing.published_shards import publishing_transports
from weightsync.tensors.shards import FollowedShards, Shard, ShardedState, checkpoint_name, dtype_name, torch_dtype
from weightsync.trainer.trainer import Trainer
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import Network, Transport

_numbers: weakref.WeakKeyDictionary[Trainer, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counts the adapters that were made for each trainer. All ranks make them in the same order."""


class _AdapterPublisher(Trainer):
    """Joins as a rank that publishes adapters, from a copy in host memory, which every engine rank can read."""

    _source = ""
    _stores = False
    _stacks: tuple[Sequence[Shard], Stacks] | None = None
    """Shards that were published last, and their :func:`stacks_of`."""

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
            with self._armed(wanted, deadline, copies=False) as placing:  # which nothing places before the coordinator is asked
                if isinstance(self._role, TrainerRole):  # and no stream's
                    self._check_finite(self._role, wanted, deadline)
                return self._ask(wanted, deadline, placing)

    def _check_finite(self, role: TrainerRole, wanted: Publish, deadline: Deadline) -> None:
        try:
            if self._stacks is None or self._stacks[0] is not role.masters:
                self._stacks = role.masters, stacks_of(role.masters, role.manifest)
            check_finite(role.masters, "the adapter", self._stacks[1])
        except WeightSyncError as error:
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
        rank: As for :class:`Trainer`; by default that of ``base``, like ``world_size``. All ranks publish parts or copies of the
            same adapter. One that this rank publishes alone has ``rank=0, world_size=1``.
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
            rank, world_size = base.rank if rank is None else rank, world_size or base.world_size
            if world_size == base.world_size:  # otherwise a rank publishes its own
                source = source or f"{next(_numbers.setdefault(base, itertools.count(1)))}"
        elif not source and (world_size or 1) > 1:
            raise ConfigurationError("several ranks that publish an adapter without a Trainer need a common name: give source=...")
        self._publisher = _AdapterPublisher.of(source or uuid.uuid4().hex)(
            tensors, coordinator, token=token, rank=rank, world_size=world_size, dtype=dtype, transports=transports,
            timeouts=timeouts, start_coordinator=False,
        )  # fmt: skip
        with OnFailure(self._publisher.close):
            self._publisher.check_modules()

    def wait_for_replicas(self, count: int = 1, timeout: float | None = None) -> tuple[str, ...]:
        """Wait until ``count`` replicas have joined, and return their names.

        For a program without a :class:`Trainer`, which waits as well. Not with a token that is limited to adapters.

        Raises:
            WeightSyncError: As :meth:`Trainer.wait_for_replicas` raises.
        """
        return self._publisher.wait_for_replicas(count, timeout)

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
            ConfigurationError: ``keep`` is no number from 0 to 2^20.
            MembershipError: No version of ``name`` is known.
            RoundFailed: A replica could not be told. It drops them when it has reconnected.
        """
        check_adapter_name(name)
        if isinstance(keep, bool) or not isinstance(keep, int) or not 0 <= keep <= MAX_KEPT:
            raise ConfigurationError(f"keep is a number from 0 to {MAX_KEPT:,}, not {keep!r}")
        answer = self._publisher.retire(name, keep, timeout)
        if answer.errors:
            raise RoundFailed(f"versions of {name} were retired, but not everywhere: {'; '.join(answer.errors)}")
        return tuple(adapter_label(name, number) for number in answer.numbers)

    def close(self) -> None:
        """Leave the coordinator. Replicas keep what they serve. Safe twice."""
        if not self._origin.elsewhere:
            self._publisher.close()


_MATRIX = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.([^.]+))?(?:\.weight)?")
_STACKED = 32 << 20  # bytes of matrices whose numbers are looked at together, in a copy
_PART_OF_LORA = re.compile(r"\.lora_[A-Za-z_]+(\.|\Z)")

State = Mapping[str, torch.Tensor] | ShardedState
Stacks = Sequence[tuple[Sequence[int], torch.dtype]]
"""Indices of shards that are stacked into one tensor, and the dtype in which they are published."""


def adapter_of(
    state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState, which: str, alpha: float | None, rslora: bool
) -> tuple[State, LoraConfig]:
    """Return the tensors of an adapter under the names of PEFT's files, and its configuration.

    Args:
        state: A model with PEFT's adapters, or the adapter's tensors.
        which: Name of the adapter in the model.
        alpha: ``lora_alpha``, where ``state`` is no model.
        rslora: ``use_rslora``, where ``state`` is no model.

    Raises:
        ConfigurationError: The model has no such adapter, or it has parts that cannot be published.
    """
    tensors, config = _of_model(state, which) if isinstance(state, torch.nn.Module) else _of_tensors(state, alpha, rslora)
    if not all(abs(factor) <= MAX_FACTOR for factor in (config.alpha, *config.scalings.values())):
        raise ConfigurationError(f"an adapter's lora_alpha and scalings are numbers of at most {MAX_FACTOR:g}, and not NaN")
    return tensors, config


def _of_tensors(state: State, alpha: float | None, rslora: bool) -> tuple[State, LoraConfig]:
    if alpha is None:
        raise ConfigurationError("an adapter given as tensors needs its lora_alpha: Adapters(state, base=..., alpha=...)")
    state = state if isinstance(state, ShardedState) else {_name(name): tensor for name, tensor in state.items()}
    modules = lora_modules(FollowedShards(state).now()[0])
    chosen = LoraConfig(max(module.rank for module in modules), float(alpha), rslora)
    own = {module.name: structs.replace(chosen, rank=module.rank).scaling("") for module in modules if module.rank != chosen.rank}
    return state, structs.replace(chosen, scalings=own)  # as PEFT scales by each module's rank


def _of_model(model: torch.nn.Module, which: str) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    config = configs.get(which)
    if config is None:
        raise ConfigurationError(f"the model has no PEFT adapter {which!r}; it has {', '.join(configs) or 'none'}")
    if getattr(config, "peft_type", "LORA") != "LORA":
        raise ConfigurationError(f"the adapter {which!r} is of PEFT's type {config.peft_type}, and only LoRA can be published")
    if getattr(config, "bias", "none") != "none" or getattr(config, "modules_to_save", None):
        raise ConfigurationError("biases and modules_to_save cannot be published as part of an adapter: train it without them")
    if getattr(config, "alora_invocation_tokens", None):
        raise ConfigurationError("no engine here serves activated LoRA: train it without alora_invocation_tokens")
    if getattr(config, "use_dora", False):
        raise ConfigurationError("no engine here serves DoRA adapters: train it with use_dora=False, or publish merged weights")
    tensors = {}
    for name, parameter in model.named_parameters():
        match = _MATRIX.fullmatch(checkpoint_name(name))
        if match is not None and match[3] == which:
            tensors[_name(name)] = parameter.detach()
        elif re.search(rf"\.(lora|trainable_tokens)_\w+\.{re.escape(which)}(\.|\Z)", name):
            raise ConfigurationError(f"{name} cannot be published with an adapter: train without lora_bias and token indices")
    chosen = LoraConfig(int(config.r), float(config.lora_alpha), bool(getattr(config, "use_rslora", False)))
    others = {module: scaling for module, scaling in _scalings(model, which) if scaling != chosen.scaling(module)}
    rank = max([chosen.rank, *getattr(config, "rank_pattern", {}).values()])
    if rank != chosen.rank:  # a module without an entry has the scaling of the rank that is stated
        others = dict(_scalings(model, which))
    return tensors, LoraConfig(rank, chosen.alpha, chosen.rslora, scalings=others)


def _scalings(model: torch.nn.Module, which: str) -> Iterable[tuple[str, float]]:
    for name, module in model.named_modules():
        scalings = getattr(module, "scaling", None)
        if isinstance(scalings, Mapping) and which in scalings:
            yield checkpoint_name(name).removeprefix(PREFIX), float(scalings[which])


def _name(name: str) -> str:
    """``base_model.model.layers.0.q.lora_A.weight``, with or without the prefix and the adapter's name."""
    match = _MATRIX.fullmatch(checkpoint_name(name))
    if match is None:
        return name  # the manifest's check names it
    kind = match[2]
    return f"{PREFIX}{match[1].removeprefix(PREFIX)}.{kind}" + ("" if "embedding" in kind else ".weight")


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether the base weights of an adapter are quantized, by Transformers or by layers of bitsandbytes."""
    layers = any(type(module).__name__ in ("Linear4bit", "Linear8bitLt") for module in model.modules())
    return layers or getattr(model, "hf_quantizer", None) is not None


def base_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model with PEFT's adapters without the adapters, by their names without PEFT.

    ``weightsync.Trainer(weightsync.base_weights(peft_model))`` publishes the base of its adapters.

    Raises:
        ConfigurationError: The weights are quantized; or an adapter is merged into them, and engines would add it a second time.
    """
    if is_quantized(model):
        raise ConfigurationError(
            "this model's base weights are quantized (QLoRA), and their bytes are not those of a checkpoint: let engines serve the "
            "checkpoint, and publish the adapter alone, with Adapters(model, base=None)"
        )
    for name, module in model.named_modules():
        if merged := getattr(module, "merged_adapters", None):
            raise ConfigurationError(
                f"{', '.join(merged)} is merged into {checkpoint_name(name)}: call the model's unmerge_adapter() first, or publish "
                "the merged weights and no adapter"
            )
    named = ((checkpoint_name(name), tensor) for name, tensor in model.state_dict(keep_vars=True).items())
    buffers = {checkpoint_name(name) for name, _ in model.named_buffers()}
    return {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor.detach()
        for name, tensor in named
        if _PART_OF_LORA.search(name) is None and name not in buffers
    }


def stacks_of(shards: Sequence[Shard], manifest: Manifest) -> Stacks:
    """Group shards of one form, so that :func:`check_finite` looks at many of them at once."""
    kinds = {spec.name: torch_dtype(spec.dtype) for spec in manifest}
    alike = defaultdict[tuple[torch.device, torch.dtype, torch.Size, torch.dtype], list[int]](list)
    for index, shard in enumerate(shards):
        alike[shard.tensor.device, shard.tensor.dtype, shard.tensor.shape, kinds[shard.name]].append(index)
    steps = ((same, max(_STACKED // max(shards[same[0]].tensor.nbytes, 1), 1), key[-1]) for key, same in alike.items())
    return [(same[first : first + step], dtype) for same, step, dtype in steps for first in range(0, len(same), step)]


@torch.no_grad()
def check_finite(shards: Sequence[Shard], what: str, stacks: Stacks) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` if a number is not finite in the dtype in which it is published.

    In few launches, because an adapter of experts has 18,000 matrices: one for each takes ten times as long. A sum is not finite if
    one of its numbers is not, and takes a tenth of the time of looking at each. If it overflows, each is looked at.
    """
    stacked = ((torch.stack([shards[index].tensor for index in same]).to(dtype), dtype) for same, dtype in stacks)
    sums = [tensor.sum(dtype=torch.float32 if dtype.itemsize == 1 else None) for tensor, dtype in stacked]  # torch adds no 8 bits
    for (same, dtype), total in zip(stacks, sums, strict=True):
        if not math.isfinite(total.item()):
            for shard in (shards[index] for index in same):
                if not shard.tensor.to(dtype).double().isfinite().all():
                    raise ConfigurationError(f"{what} is not published: {shard.name} holds NaN or infinity as {dtype_name(dtype)}")
