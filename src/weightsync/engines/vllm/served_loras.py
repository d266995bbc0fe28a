"""Names of LoRA adapters in the process that owns an ``AsyncLLM``: which requests may use which version, and who still does."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from weightsync.engines.vllm.controls import DROP_LORA, LORA_PATH
from weightsync.engines.wrapped_methods import wrap_once
from weightsync.errors import ConfigurationError
from weightsync.external.versioned_requests import check_adapter, held_by_request
from weightsync.model.lora import newest_label

_log = logging.getLogger(__name__)

_OWN = "_weightsync_loras"
_FIRST_ID = 1 << 24
"""vLLM's server numbers the adapters that it loads itself from 1."""


class _Names(dict[str, Any]):
    """What vLLM's server looks names up in: from then on a request keeps the version that it got."""

    def __init__(self, hold: Callable[[str], bool]) -> None:
        super().__init__()
        self._hold = hold

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - vLLM's LoRARequest
        request = super().__getitem__(name)
        if _is_ours(request):
            self._hold(request.lora_name)
        return request


class ServedLoras:
    """Adapters of ``engine``, an ``AsyncLLM``. All methods run on its event loop.

    ``requests`` is what vLLM's server finds names in: ``alice/math@3``, and ``alice/math`` for the newest.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's
        self.requests = _Names(self._hold)
        self.models: frozenset[str] = frozenset()
        """Names of the base model, which vLLM's server looks for behind those of adapters."""
        self._engine = engine
        self.live: dict[str, Any] = {}
        self._dropped: dict[str, Any] = {}
        self._uses: Counter[str] = Counter()
        self._ids = itertools.count(_FIRST_ID)
        self._freeing: set[asyncio.Task[None]] = set()
        for method in ("generate", "encode"):
            wrap_once(engine, method, self._counted)
        self._add, engine.add_lora = engine.add_lora, self._add_foreign

    async def _add_foreign(self, request: Any) -> Any:  # noqa: ANN401 - vLLM's
        self._check_foreign(request)
        return await self._add(request)

    def _check_foreign(self, request: Any) -> None:  # noqa: ANN401 - vLLM's
        """Raise ValueError if another client's adapter would take the place of a version, as ``load_inplace`` does, or its name."""
        for label, own in {**self._dropped, **self.live}.items():
            if request.lora_int_id == own.lora_int_id or request.lora_name in (label, label.rpartition("@")[0]):
                raise ValueError(f"weightsync serves {label} here: load your adapter under another name and id")

    async def _counted(self, generate: Any, *args: Any, lora_request: Any = None, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        ours = _is_ours(lora_request)
        label = lora_request.lora_name if ours else ""
        check_adapter(label or None)
        if ours and not self._hold(label):  # retired since its name was looked up: the workers may have freed it
            raise ValueError(f"{label} is not served any more")  # vLLM's server answers 400, and goes on with the connection
        if lora_request is not None and not ours:
            self._check_foreign(lora_request)
        self._uses[label] += ours
        try:
            async for output in generate(*args, lora_request=lora_request, **kwargs):
                yield output
        finally:
            self._let_go(label)

    def _hold(self, label: str) -> bool:
        """Keep a version for the request of this context until it has ended, as it may have several calls. False if it is gone."""
        held = held_by_request()
        if held is not None and label in held:
            return True
        if held is not None and label in self.live:
            self._uses[label] += 1
            held[label] = functools.partial(self._let_go, label)
        return label in self.live

    def _let_go(self, label: str) -> None:
        self._uses[label] -= bool(label)
        if label in self._dropped and not self._uses[label]:
            task = asyncio.ensure_future(self._free(label))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def add(self, label: str) -> None:
        """Let every worker take what it has staged as ``label``, then make it visible.

        Raises:
            ConfigurationError: vLLM serves something else under its name.
        """
        from vllm.lora.request import LoRARequest

        for name in (label.rpartition("@")[0], label):
            if name in self.models or not _is_ours(self.requests.get(name), missing=True):
                raise ConfigurationError(f"{name} is a model that vLLM was started with, or has loaded: choose another name")
        request = LoRARequest(lora_name=label, lora_int_id=next(self._ids), lora_path=f"{LORA_PATH}{label}/{uuid.uuid4().hex}")
        self._dropped[label] = request  # until every worker has it
        await self._add(request)
        self.live[label] = self.requests[label] = self._dropped.pop(label)
        self._name_newest(label)

    async def drop(self, label: str) -> None:
        """Hide ``label`` from new requests, and free it as soon as no request uses it."""
        request = self.live.pop(label, None)
        if request is not None:
            self._dropped[label] = request
            self.requests.pop(label, None)  # vLLM's own route may have unloaded it
            self._name_newest(label)
        if not self._uses[label]:
            await self._free(label)

    def _name_newest(self, label: str) -> None:
        """Let the name of ``label`` be the newest version that is live."""
        name = label.rpartition("@")[0]
        self.requests.pop(name, None)
        newest = newest_label(name, self.live)
        if newest is not None:
            self.requests[name] = self.live[newest]

    async def _free(self, label: str) -> None:
        request = self._dropped.get(label)
        del self._uses[label]
        await self._engine.collective_rpc(DROP_LORA, args=(label, 0 if request is None else request.lora_int_id))
        if self._dropped.get(label) is request:  # only now: after a failure the next call frees it by its number
            self._dropped.pop(label, None)


def _is_ours(request: Any, *, missing: bool = False) -> bool:  # noqa: ANN401 - vLLM's LoRARequest
    return missing if request is None else request.lora_path.startswith(LORA_PATH)


def served_loras(engine: Any) -> ServedLoras | None:  # noqa: ANN401 - vLLM's
    """Return the adapters of an ``AsyncLLM``; ``None`` if it was made without LoRA."""
    config = getattr(engine, "vllm_config", None)
    if getattr(config, "lora_config", None) is None:
        return None
    if getattr(engine, _OWN, None) is None:
        setattr(engine, _OWN, ServedLoras(engine))
    served: ServedLoras = getattr(engine, _OWN)
    return served


def follow_models() -> None:
    """Let vLLM's HTTP server look adapters up in :attr:`ServedLoras.requests`. Idempotent."""
    try:
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels as Models
    except ImportError as error:
        _log.warning("weightsync: the server of this vLLM cannot find LoRA adapters by name: %s", error)
        return

    def init(made: Any, self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        made(self, engine_client, *args, **kwargs)
        loras = served_loras(engine_client)
        if loras is not None:
            loras.models |= {path.name for path in self.base_model_paths}
            loras.requests.update(self.lora_requests)
            self.lora_requests = loras.requests

    wrap_once(Models, "__init__", init)
