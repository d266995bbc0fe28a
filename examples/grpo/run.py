"""Starts the processes, listens to the trainer, and ends everything, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import defaultdict

import msgspec
from rich.console import Console

from examples.demo.coordinator import CoordinatorSettings
from examples.demo.events import follow
from examples.demo.family import Child, Family
from examples.demo.leftovers import free, mapped_by
from examples.demo.reports import Listening, Ready
from examples.grpo.outcome import Outcome, Record
from examples.grpo.reports import Progress, Report, WarmedUp
from examples.grpo.settings import ReplicaSettings, Settings, TrainerSettings
from examples.grpo.view import View
from weightsync.config import Address, ClientSettings, Secret
from weightsync.coordinator.events import Event, Joined
from weightsync.errors import WeightSyncError
from weightsync.model import PauseMode
from weightsync.protocol.tokens import generate

__all__ = ["run"]

_REPLICAS = {"demo": "examples.grpo.replica", "vllm": "examples.grpo.vllm_replica"}
_POLITE_SECONDS = {"demo": 5.0, "vllm": 20.0}  # vLLM's processes free shared memory as they end
_QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_LOG_WIDTH = 160
_DECODER: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class _Run:
    def __init__(self, wish: Settings, console: Console, family: Family, token: Secret) -> None:
        self.wish, self.family, self.token = wish, family, token
        self.record, self.view = Record(wish), View(console, wish)
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._here: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._lead: Child | None = None

    def heard(self, report: Report) -> None:
        """A process said something."""
        match report:
            case Listening():
                self._url.set_result(report.url)
            case Ready():
                self._here[report.name].set()
            case WarmedUp():
                self.view.say(
                    f"supervised beginning: loss {report.loss:.3f} after {self.wish.warm_up} steps, {report.seconds:.1f} s"
                )
            case Progress():
                self.record.add(report)
                self.view.progress(report, self.record)

    def told(self, event: Event) -> None:
        """The coordinator said something: vLLM's server joins it, and says nothing to us."""
        if isinstance(event, Joined):
            self._here[event.member.rpartition("/")[0]].set()

    async def perform(self) -> None:
        """From the first process to the last step."""
        mode: PauseMode = "keep" if self.wish.mode == "async" else "wait"
        with self.view:
            wanted = CoordinatorSettings(parent=os.getpid(), pause_mode=mode)
            await self._start("coordinator", "examples.demo.coordinator", wanted)
            url = await self._url
            self.view.headline(f"coordinator at {url}; starting {self.wish.replicas} replicas ({self.wish.engine}) and the trainer")
            listening = asyncio.Event()
            following = asyncio.create_task(follow(ClientSettings.load(coordinator=url, token=self.token), self.told, listening))
            try:
                await listening.wait()
                urls = await self._start_replicas(url)
                trainers = await self._start_trainers(url, urls)
                await asyncio.gather(*(self._here[name].wait() for name in urls))
                await self._here["trainer-0"].wait()
                self.view.headline("every replica has joined: training")
                if self._lead is not None:
                    self._lead.say()
                await asyncio.gather(*(child.listener for child in trainers if child.listener is not None))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _start(self, name: str, module: str, argument: msgspec.Struct, files: list[int] | None = None) -> Child:
        return await self.family.start(name, module, argument, self.heard, files or [], _DECODER)

    async def _start_replicas(self, url: str) -> dict[str, str]:
        urls = {}
        for index in range(self.wish.replicas):
            name = f"replica-{index}"
            # Bound here, so that the trainer can be told the address, and nobody else can take the port.
            with socket.socket() as bound:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(("127.0.0.1", 0))
                wanted = ReplicaSettings(
                    parent=os.getpid(), name=name, index=index, listen_fd=bound.fileno(), coordinator=url,
                    directory=str(self.family.directory), settings=self.wish,
                )  # fmt: skip
                await self._start(name, _REPLICAS[self.wish.engine], wanted, [bound.fileno()])
                host, port = bound.getsockname()
            urls[name] = Address("http", host, port).url
        return urls

    async def _start_trainers(self, url: str, urls: dict[str, str]) -> list[Child]:
        children = []
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            for rank in range(self.wish.trainer_ranks):
                wanted = TrainerSettings(
                    parent=os.getpid(), rank=rank, port=listener.getsockname()[1],
                    listen_fd=listener.fileno() if rank == 0 else None, coordinator=url, urls=urls, settings=self.wish,
                )  # fmt: skip
                files = [listener.fileno()] if rank == 0 else []
                children.append(await self._start(f"trainer-{rank}", "examples.grpo.trainer", wanted, files))
        self._lead = children[0]
        return children


def _end_on_signals() -> None:
    """Cancel the current task at the first SIGINT or SIGTERM; later ones must not disturb the cleaning up."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    seen: list[int] = []

    def heard(number: int) -> None:
        if not seen and me is not None:
            me.cancel()
        seen.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard, number)


async def _perform(wish: Settings, console: Console) -> Outcome:
    began = time.perf_counter()
    _end_on_signals()
    token = generate()  # the run's own; settings meant for others do not reach it
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTSYNC_")}
    environment |= {**_QUIET, "WEIGHTSYNC_TOKEN": token.reveal()}
    error, left = None, set[str]()
    try:
        async with Family(environment, _POLITE_SECONDS[wish.engine]) as family:
            running = _Run(wish, console, family, token)
            try:
                async with asyncio.timeout(wish.timeout):
                    await family.guard(running.perform())
            except (WeightSyncError, TimeoutError) as failure:
                error = f"{type(failure).__name__}: {str(failure) or f'the run took more than {wish.timeout:g} s'}"
            finally:
                left = mapped_by(family.group)
    finally:
        free(left)
    return running.record.outcome(time.perf_counter() - began, error)


def run(wish: Settings, json: bool) -> int:
    """Run it and return the exit status: 0 if all steps were made within the staleness bound, 130 after Ctrl-C or SIGTERM.

    With ``json``, the last line of standard output is :class:`~examples.grpo.outcome.Outcome`, and everything for people goes to
    standard error.
    """
    console = Console(stderr=json)
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    try:
        outcome = asyncio.run(_perform(wish, console))
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("interrupted; everything was ended")
        return 130
    console.print(
        f"{outcome.mode}: reward {outcome.reward_first:.2f} -> {outcome.reward_last:.2f} in {outcome.steps} steps, "
        f"{outcome.seconds:.0f} s; staleness at most {outcome.max_staleness} of {outcome.staleness_bound}; "
        f"the trainer waited {outcome.trainer_idle_fraction:.0%}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if outcome.error is not None:
        console.print(f"not ok: {outcome.error}", style="red", highlight=False, markup=False, soft_wrap=True)
    if json:
        print(msgspec.json.encode(outcome).decode())
        sys.stdout.flush()
    return 0 if outcome.ok else 1
