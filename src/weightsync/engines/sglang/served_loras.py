"""Names of LoRA adapters in SGLang's tokenizer process, where requests arrive: which version each gets, and which are used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput, UnloadLoRAAdapterReqInput

from weightsync.errors import VersionError
from weightsync.external.versioned_requests import check_adapter
from weightsync.model.lora import newest_label, served_label


class TokenizerLoras:
    """Versions that rank 0's scheduler made known to ``manager``, SGLang's ``TokenizerManager``. All methods run on its event loop.

    SGLang's registry holds them under their labels and counts the requests that use them.
    """

    def __init__(self, manager: Any) -> None:  # noqa: ANN401 - SGLang's
        self._manager = manager
        self.live: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._resolving: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, request: LoadLoRAAdapterReqInput | UnloadLoRAAdapterReqInput) -> None:
        """Add or drop the version that ``request`` names. Requests take effect in their order."""
        work = self._add if isinstance(request, LoadLoRAAdapterReqInput) else self._drop
        task = asyncio.ensure_future(work(request.lora_name, str(request.lora_id)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, label: str, lora_id: str) -> None:
        refused = None
        async with self._turn:
            reference = LoRARef(
                lora_id=lora_id, lora_name=label, lora_path="weightsync", pinned=True
            )  # SGLang evicts no pinned one
            try:
                if self._is_sglangs(name := label.rpartition("@")[0]):
                    raise ValueError(f"SGLang has loaded another adapter as {name}")
                await self._manager.lora_registry.register(reference)
                self.live[label] = lora_id
            except ValueError as error:  # SGLang has another one of this name
                refused = str(error)
        self._answer(label, lora_id, success=refused is None, refused=refused)

    async def _drop(self, label: str, lora_id: str) -> None:
        async with self._turn:
            live = self.live.get(label) == lora_id
            if live:
                del self.live[label]
        self._answer(label, lora_id, success=True)
        if live:
            if self._resolving:  # these may have the label, and SGLang does not count them yet
                await asyncio.wait(set(self._resolving))
            with suppress(ValueError):  # another client has unloaded it
                await self._manager.lora_registry.unregister(label)
                await self._manager.lora_registry.wait_for_unload(lora_id)
            self._answer(label, lora_id, success=False)

    def _answer(self, label: str, lora_id: str, *, success: bool, refused: str | None = None) -> None:
        self._manager._dispatch_to_scheduler(
            LoRAUpdateOutput(success=success, error_message=refused, loaded_adapters={label: lora_id})
        )

    async def resolve(self, original: Callable[..., Awaitable[None]], request: Any) -> None:  # noqa: ANN401 - SGLang's
        """Let ``request`` name a version, and SGLang's ``original`` count it as a user of that.

        Raises:
            ValueError: There is no such adapter. SGLang answers with status 400.
        """
        path, resolving = request.lora_path, asyncio.get_running_loop().create_future()
        self._resolving.add(resolving)
        try:
            request.lora_path = [self._label(name) for name in path] if isinstance(path, list) else self._label(path)
            await original(self._manager, request)
        finally:
            self._resolving.discard(resolving)
            resolving.set_result(None)

    def _label(self, name: str | None) -> str | None:
        label = None
        if name and not (newest_label(name, self.live) is None and self._is_sglangs(name)):
            try:
                name = label = served_label(name, self.live)
            except VersionError as error:
                raise ValueError(str(error)) from None
            if getattr(self._manager.lora_registry.get_all_adapters().get(label), "lora_id", None) != self.live[label]:
                raise ValueError(f"another client of SGLang has unloaded {label}")  # and may have loaded other weights under it
        check_adapter(label)
        return name

    def _is_sglangs(self, name: str) -> bool:
        if not self._manager.enable_lora:
            return True  # SGLang's error says it
        return name in self._manager.lora_ref_cache or name in self._manager.lora_registry.get_all_adapters()
