"""A process of an SGLang that serves LoRA adapters: one rank of its scheduler, or SGLang's own tokenizer manager.

Run as ``python -m tests.integration.sglang.sglang_served ROLE DIRECTORY SOCKETS``. ROLE is the number of a rank, of how many in
``RANKS``, or ``tokenizer``. It answers each line of its input, as JSON ``[number, method, arguments]``, with ``[number, result]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch
from tests.integration.sglang.sglang_scheduler import (
    RunningScheduler,
    arguments_of_sglang,
    install_stubs,
    pin_no_memory,
    use_environment,
)

from weightsync import failpoints

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Rank:
    """One rank of the scheduler."""

    def __init__(self, running: RunningScheduler) -> None:
        self._running = running

    async def held(self) -> tuple[list[str], int]:
        """Return the names of the adapters that SGLang's own manager has, and how many there are in its pool."""
        manager = self._running.scheduler.tp_worker.model_runner.lora_manager
        names = sorted(reference.lora_name for reference in manager.lora_refs.copy().values())
        return names, len([uid for uid in manager.memory_pool.uid_to_buffer_id if uid in manager.lora_refs])

    async def lose_the_next(self) -> None:
        """Let this rank hold nothing of the next version, once it has been verified here."""
        loras = self._loras()

        def lose(name: str) -> None:
            if name == "engine.lora.staged":
                loras._staged.clear()
                failpoints.install(lambda name: None)

        failpoints.install(lose)

    async def wait_for_the_tokenizer(self, seconds: float) -> None:
        """Change the limit for an answer of SGLang's tokenizer."""
        sys.modules[type(self._loras()).__module__]._ANSWER_SECONDS = seconds  # type: ignore[attr-defined]

    def _loras(self) -> Any:
        handlers: dict[type, Any] = self._running.loop.handlers
        return next(handle.__self__ for kind, handle in handlers.items() if kind.__name__ == "LoraStep")


class Tokenizer:
    """SGLang's own tokenizer manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def generate(self, adapter: str | list[str | None] | None, tokens: int, prompt: list[int]) -> Any:
        """Return the tokens of a request, or of several, or its error."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        prompts: Any = [prompt] * len(adapter) if isinstance(adapter, list) else prompt
        request = GenerateReqInput(input_ids=prompts, sampling_params=sampling, lora_path=adapter)
        try:
            async for output in self._manager.generate_request(request):
                last = output
        except ValueError as error:
            return str(error)
        return [each["output_ids"] for each in last] if isinstance(last, list) else last["output_ids"]

    async def demand(self, adapter: str | None, version: str, prompt: list[int]) -> int:
        """Return the status of a request for ``adapter`` whose headers ask for ``version``, as SGLang's server would answer."""
        from weightsync.external import VersionedRequests

        async def app(scope: Any, receive: Any, send: Any) -> None:
            answer = await asyncio.create_task(self.generate(adapter, 1, prompt))
            await send({"type": "http.response.start", "status": 400 if isinstance(answer, str) else 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def send(message: Any) -> None:
            sent.append(message)

        sent, live = list[Any](), self._manager._weightsync_loras.live
        scope: Any = {"type": "http", "path": "/generate", "headers": [(b"x-weightsync-version", version.encode())]}
        await VersionedRequests(app, lambda: None, lambda: live)(scope, send, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])

    async def stand_still(self, seconds: float) -> None:
        """Block the event loop."""
        time.sleep(seconds)  # noqa: ASYNC251 - on purpose

    async def running(self) -> int:
        """Return how many requests were answered with a first token, and have not ended."""
        return sum(bool(state.output_ids) for state in self._manager.rid_to_state.values())

    async def load(self, name: str, folder: str) -> str:
        """Let SGLang load an adapter as its route does."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        loaded = await self._manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder))
        return "" if loaded.success else loaded.error_message

    async def unload(self, name: str) -> str:
        """Let SGLang unload one."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        unloaded = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
        return "" if unloaded.success else unloaded.error_message

    async def names(self) -> list[str]:
        """Return what SGLang lists in /v1/models."""
        return sorted(self._manager.lora_registry.get_all_adapters())


async def answer_lines(served: Any) -> None:
    """Until the input ends."""
    tasks = set[asyncio.Task[None]]()

    async def answer(number: int, method: str, arguments: list[Any]) -> None:
        result = await getattr(served, method)(*arguments)
        print(json.dumps([number, result]), flush=True)

    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.ensure_future(answer(*json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main(role: str, directory: str, sockets: str) -> None:
    install_stubs()
    use_environment()
    pin_no_memory()
    settings = {
        "tp_size": int(os.environ["RANKS"]), "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": TARGETS,
        "lora_backend": "torch_native", "max_loras_per_batch": 3,
    }  # fmt: skip
    if role != "tokenizer":
        own = json.loads(sockets)
        with RunningScheduler(directory, rank=int(role), sockets=own, clients=False, **settings) as running:
            print("ready", flush=True)
            asyncio.run(answer_lines(Rank(running)))
            running.wait_until_ended()
        return
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs

    arguments = arguments_of_sglang(directory, **settings)
    publish(arguments, role="tokenizer")

    async def serve() -> None:
        manager = TokenizerManager(arguments, PortArgs(**json.loads(sockets)))
        manager.auto_create_handle_loop()  # as SGLang's warm-up does
        print("ready", flush=True)
        await answer_lines(Tokenizer(manager))
        manager._dispatch_to_scheduler(ShutdownReq())
        await asyncio.sleep(0.5)
        os._exit(0)  # its tasks do not end

    asyncio.run(serve())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
