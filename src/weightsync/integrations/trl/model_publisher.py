"""The model of one of TRL's trainers: of a PEFT model the base once, and then each version of the adapter as ``name@number``."""

from __future__ import annotations

import itertools
import logging
import re
import uuid
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from weightsync.coordinator.status import AdapterStatus
from weightsync.errors import ConfigurationError, RoundFailed, WeightSyncError
from weightsync.integrations.trl.reporting import report
from weightsync.integrations.trl.rollout_server import RolloutServer
from weightsync.launch import from_rank_zero
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.notices import tell
from weightsync.trainer.adapters import Adapters, adapter_of, is_quantized
from weightsync.trainer.trainer import Trainer

if TYPE_CHECKING:
    from weightsync.integrations.trl.transfer import JoinOptions

_KEPT = 2  # versions that new requests may name
OWNER = "trl/"
"""Beginning of default names. Versions of earlier runs under such names are retired."""
MERGING = "each update merges the adapter into its base and moves all weights:"
_log = logging.getLogger(__name__)


class ModelPublisher:
    """Publishes the model of one of TRL's trainers from one rank. Make one on every rank, and call it alike. Nothing is gathered.

    Each rank publishes its own shards, of a PEFT model those of the adapter alone where that is possible. ``server`` is the one
    that TRL samples from, on rank 0 alone.
    """

    def __init__(self, options: JoinOptions, server: RolloutServer | None) -> None:
        self._options, self._server, self._merges = options, server, options.merge
        self._adapters: Adapters | None = None
        self._model: Any = None
        self._weights: dict[str, torch.Tensor] = {}  # of a PEFT model, as they are in this update
        self._published = False
        self._name = ""
        self.adapter = ""
        """Name by which requests find the newest version, if the last update published the adapter alone."""
        self.base: Trainer | None = None
        """The publisher of the base weights, once it has published them. A quantized base is the server's own."""
        self.trainer: Trainer | None = None
        """The publisher of the base or of whole models, once it has joined."""
        self._owned = ExitStack()
        self.close = weakref.finalize(self, self._owned.close)
        """Leave the coordinator, at the latest at the end of the process. Replicas keep what they serve. Safe twice."""

    def of(self, model: Any) -> ModelPublisher:  # noqa: ANN401 - Transformers' or PEFT's
        """The publisher of ``model``: this one, or one that joins in its place because the trainer has another model now."""
        self._model = model if self._model is None else self._model
        if model is self._model:
            return self
        self.close()
        return ModelPublisher(self._options, self._server).of(model)

    def publish(self, model: Any, trainer: object) -> RoundResult:  # noqa: ANN401 - Transformers' or PEFT's
        """Bring ``model`` as it is now to every replica. ``trainer`` is TRL's.

        With an adapter alone nothing is paused, and running requests go on with the version that they began with. One log line says
        why an adapter is merged.

        Raises what :class:`weightsync.Trainer`, :class:`weightsync.Adapters` and their ``publish`` raise, and
        :class:`~weightsync.errors.ConfigurationError` if the server that TRL samples from does not serve the version afterwards.
        """
        peft, options = hasattr(model, "merge_adapter"), self._options
        for part in model.modules() if peft else ():
            if hasattr(part, "reshard"):  # FSDP2, after a pass without gradients: the gathered copy would be read and merged
                part.reshard()
        result = self._publish_adapter(model, trainer)
        self.adapter = "" if result is None else self._name
        if result is None:
            with _merged(model) if peft else nullcontext():
                if peft:
                    self._weights.update(base_parameters(model))
                if self.trainer is None:
                    self.trainer = self._owned.enter_context(options.join(self._weights if peft else model))
                result = self.trainer.publish(options.number(self.trainer), timeout=options.timeout)
            if self._server is not None:
                self._server.check_label(result.version)
        return result

    def _publish_adapter(self, model: Any, trainer: object) -> RoundResult | None:  # noqa: ANN401 - Transformers' or PEFT's
        if self._merges or not hasattr(model, "merge_adapter"):
            return None
        if self._adapters is None:
            try:
                choice, failed = self._choice(model, trainer), None
            except WeightSyncError as error:  # the other ranks wait to hear of it
                choice, failed = f"\n\n{error}", error
            self._name, _, source = (answer := from_rank_zero(choice)).partition("\n")
            if source.startswith("\n"):
                raise failed or ConfigurationError(f"rank 0 could not publish: {source.strip()}")
            if not source:
                self._merge(answer)
                return None
            self._adapters = self._joined(model, source)
        if beside := _trained_beside(model):
            raise ConfigurationError(
                f"{beside} is trained now, and only the adapter is sent, so the server would never get it: train it from the first "
                "update on, or enable(merge=True) and WeightTransfer(merge=True) send all weights"
            )
        try:
            result = self._adapters.publish(self._name, timeout=self._options.timeout)
        except RoundFailed as error:
            if self._published or self.base is None:
                raise
            self._merge(str(error))  # it changes layers that this server has no LoRA for, say
            return None
        self._published = True
        if self._server is not None:
            self._server.check_label(result.version, adapter=True)
            with suppress(WeightSyncError):  # a replica that is away drops them when it is back
                self._adapters.retire(self._name, _KEPT, timeout=self._options.timeout)
        return result

    def _choice(self, model: Any, trainer: object) -> str:  # noqa: ANN401 - PEFT's
        """On rank 0 the adapter's name, and one of its ranks after a newline; or only why it is merged."""
        if self._server is None:
            return ""
        run = re.sub(r"[^A-Za-z0-9._-]", "-", self._options.check())[:60].lstrip("._-") or "policy"
        live = {adapter.name for adapter in self._served() if adapter.published}
        names = (f"{OWNER}{run}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        name = self._options.adapter or next(name for name in names if name not in live)  # another trainer has those
        return _why_merged(model, name, live, self._server, trainer).replace("\n", " ") or f"{name}\n{uuid.uuid4().hex}"

    def _served(self) -> tuple[AdapterStatus, ...]:
        with self._options.client() as client:
            return client.status().adapters

    def _joined(self, model: Any, source: str) -> Adapters:  # noqa: ANN401 - PEFT's
        """Publish the base, unless it is quantized: then its bytes are not the checkpoint's, which the server has loaded."""
        options, base = self._options, None
        with ExitStack() as owned:
            if not is_quantized(model):
                self._weights.update(base_parameters(model))
                base = owned.enter_context(options.join(self._weights))
                result = base.publish(options.number(base), timeout=options.timeout)
                if self._server is not None:
                    report(result, None)
            else:
                with options.client() as client:
                    client.served(options.timeout)
            adapters = Adapters(
                model, base, adapter=model.active_adapters[0], coordinator=options.coordinator, token=options.token,
                source=source, transports=options.transports,
            )  # fmt: skip
            owned.enter_context(adapters)
            left = {lora.name for lora in (self._served() if self._server else ()) if not lora.published}
            for name in {name for name in left if name.startswith(OWNER)} - {self._name}:
                with suppress(WeightSyncError):  # an earlier run's versions would keep their slots
                    adapters.retire(name, 0)
            self._owned.callback(owned.pop_all().close)
        self.base = self.trainer = base
        return adapters

    def _merge(self, why: str) -> None:
        self._merges = True
        if self._server is not None:
            tell(_log, f"{MERGING} {why}")


@contextmanager
def _merged(model: Any) -> Iterator[None]:  # noqa: ANN401 - PEFT's
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


def _trained_beside(model: Any) -> str:  # noqa: ANN401 - PEFT's
    """A parameter that is trained and belongs to no adapter; empty if there is none."""
    return next((name for name, own in model.named_parameters() if own.requires_grad and model.prefix not in name), "")


def _why_merged(model: Any, name: str, live: Collection[str], server: RolloutServer, trainer: Any) -> str:  # noqa: ANN401
    """Why the adapter cannot be published alone, and what to do; empty if it can. ``live`` are names of other trainers."""
    names, worker = model.active_adapters, getattr(trainer, "rollout_worker", None)
    if len(names) != 1 or model.peft_config[names[0]].peft_type != "LORA":
        return f"a single adapter of LoRA can be served, and the model's active ones are {', '.join(names)}"
    beside = _trained_beside(model)
    if beside and "modules_to_save" not in beside:  # those are refused by name
        return f"{beside} is trained beside the adapter"
    if trainer is None:
        return "a method of TRL's trainer has to ask for the first update"
    if (worker is not None and "model_name" not in getattr(worker, "_loop_kwargs", {})) or any(
        getattr(trainer, name, None) for name in ("rollout_func", "use_teacher_server")
    ):
        return "a rollout_worker or rollout_func of your own, or a teacher on the same server, names the base in its requests"
    try:
        rank, config, labels = adapter_of(model, names[0], None, False)[1].rank, server.config(), server.labels()
    except ConfigurationError as error:
        return str(error)
    lora = config.get("lora_config") or {"max_lora_rank": 0, "max_cpu_loras": 0}
    versions = {label: label.partition("@")[0] for label in labels if "@" in label}
    others = [label for label, of in versions.items() if of != name and (of in live or not of.startswith(OWNER))]
    slots = _KEPT + 1 + getattr(getattr(trainer, "args", None), "max_staleness", 0) + len(others)
    if lora["max_lora_rank"] >= rank and lora["max_cpu_loras"] >= slots:
        parallel = config.get("parallel_config") or {}
        several = parallel.get("_api_process_count", parallel.get("data_parallel_size", 1)) > 1
        return "the vLLM server has several API servers: start it with --api-server-count 1" if several else ""
    has = f"with --max-lora-rank {lora['max_lora_rank']} --max-cpu-loras {lora['max_cpu_loras']}, and holds {len(others)} of others"
    return (
        f"the vLLM server was started {has if lora['max_lora_rank'] else 'without --enable-lora'}. To send the adapter alone, "
        f"start it with --enable-lora --max-lora-rank {max(8, 1 << (rank - 1).bit_length())} --max-cpu-loras {slots}"
    )


def base_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401 - PEFT's
    """Yield the parameters without the adapters under the names of the checkpoint, tied ones with all of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "").replace("_checkpoint_wrapped_module.", "")
        if model.prefix in plain or "original_module" in plain:
            continue
        yield plain.replace("modules_to_save.default.", ""), parameter
