"""The whole demo: start the processes, keep the traffic going, let version follow version, check every token, sum up.

``run(settings)`` is what ``python -m examples.demo`` calls. With another role than ``all`` it starts and watches only that part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from examples.demo.coordinator import CoordinatorSettings
from examples.demo.events import follow, status
from examples.demo.family import Child, Family
from examples.demo.outcome import Outcome, Record, outcome_of
from examples.demo.reports import Listening, Publication, Ready, Report, Saved, Step
from examples.demo.settings import ReplicaSettings, Settings, TrainerSettings
from examples.demo.tasks import probes, prompts
from examples.demo.traffic import Traffic, replica_names
from examples.demo.view import View, rounds_table
from examples.demo.vllm_prompts import with_examples
from weightsync.config import Address, ClientSettings, Secret
from weightsync.coordinator.events import Event, ReplicaEnded, RoundEnded
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.tokens import generate

if TYPE_CHECKING:
    from examples.demo.checking import Findings

__all__ = ["run"]

_PROMPTS = 10
_POLITE_SECONDS = {"transformers": 5.0, "vllm": 20.0}  # vLLM's processes free shared memory as they end
_REPLICAS = {"transformers": "examples.demo.replica", "vllm": "examples.demo.vllm_replica"}
_LOG_WIDTH = 120  # where output is not a terminal, tables need not be narrow
_QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class _Demo:
    """One run. :meth:`perform` is the plot; the rest reacts to what the processes and the coordinator say."""

    def __init__(self, settings: Settings, console: Console, family: Family, token: Secret | None) -> None:
        self.settings, self.console, self.family = settings, console, family
        self.record = Record()
        self._token = token
        self.findings: Findings | None = None
        self.replicas: dict[str, str] = {}
        """Addresses by name."""
        self.view = View(console, ())
        self._traffic: Traffic | None = None
        self._lead: Child | None = None
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ready: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._saved: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._published: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    # What is heard.

    def heard_report(self, report: Report) -> None:
        """A child said something."""
        match report:
            case Listening():
                self._url.set_result(report.url)
            case Ready():
                self._ready[report.name].set()
            case Step():
                self.record.losses.append(report.loss)
                self.view.loss(report.step, report.loss)
            case Saved():
                self._saved[report.version].set()
            case Publication():
                self._note(report.result)

    def heard_event(self, event: Event) -> None:
        """The coordinator said something."""
        self.view.show(event)
        if isinstance(event, ReplicaEnded) and event.result.state == "loaded" and self._traffic is not None:
            self._traffic.seeded(event.result.name)
        if isinstance(event, RoundEnded) and event.result is not None:
            self._note(event.result)

    def _note(self, result: RoundResult) -> None:
        number = result.version.number
        self.record.results.setdefault(number, result)  # later rounds of this number only re-seed
        self._published[number].set()

    # What is done.

    async def perform(self) -> None:
        """Everything that this role does, from the first process to the checked tokens."""
        settings = self.settings
        with self.view:
            url = settings.coordinator or await self._start_coordinator()
            self.view.headline(f"coordinator at {url}; starting the others")
            if settings.role == "client":
                self.replicas = await replica_names(settings.replica_urls)
            client = ClientSettings.load(coordinator=url, token=self._token)
            listening = asyncio.Event()
            following = asyncio.create_task(follow(client, self.heard_event, listening))
            try:
                await _first(following, listening.wait())
                await _first(following, self._play(url, client))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _play(self, url: str, client: ClientSettings) -> None:
        settings, directory = self.settings, self.settings.directory or self.family.directory
        if settings.role in ("all", "replica"):
            await self._start_replicas(url)
        if settings.role in ("all", "client"):
            asked, probed = prompts(settings.seed, _PROMPTS), probes(settings.seed)
            if settings.engine == "vllm":
                asked, probed = with_examples(asked, settings.seed), with_examples(probed, settings.seed)
            self._traffic = Traffic(self.replicas, asked, probed)
        if settings.role in ("all", "trainer"):
            await self._start_trainers(url, directory)
        await asyncio.gather(*(self._ready[name].wait() for name in self.family.children if name != "coordinator"))
        if settings.role == "replica":
            for name, where in self.replicas.items():
                self.view.say(f"{name} serves at {where}; Ctrl-C ends it")
            await self.family.ended()
        elif settings.role == "trainer":
            await self._publish_all(None)
            await self.family.ended()
        elif self._traffic is not None:
            try:
                await self._serve_and_check(self._traffic, client, directory)
            finally:
                await self._traffic.close()

    async def _serve_and_check(self, traffic: Traffic, client: ClientSettings, directory: Path) -> None:
        if self.settings.role == "all":
            self.record.refused_unseeded = await traffic.refused_unseeded()
        else:
            for found in (await status(client)).replicas:
                if found.routable:
                    traffic.seeded(found.name)
        self.view.headline("training, publishing, serving")
        importing = asyncio.create_task(asyncio.to_thread(import_module, "examples.demo.checking"))  # takes seconds
        await self._publish_all(traffic)
        await traffic.stop()
        self.record.served, self.record.failures = traffic.served, dict(traffic.refused)
        self.record.final = await status(client)
        self._go_on()  # the trainers may end
        await importing
        self.view.headline(f"checking {len(traffic.responses)} responses against {len(self.record.results)} checkpoints")
        self.findings = await self._check(traffic, directory)

    async def _publish_all(self, traffic: Traffic | None) -> None:
        """Each version when its checkpoint is there and the last one's probes were answered."""
        for version in range(1, self.settings.versions + 1):
            if self._lead is not None:
                await self._saved[version].wait()
                self._go_on()
            await self._published[version].wait()
            if traffic is not None:
                await traffic.probe(version)
        if traffic is None:
            self._go_on()

    def _go_on(self) -> None:
        if self._lead is not None:
            self._lead.say()

    async def _check(self, traffic: Traffic, directory: Path) -> Findings:
        stopped = threading.Event()

        def check() -> Findings:
            from examples.demo.checking import checker_for

            return checker_for(self.settings, directory, stopped.is_set).check(traffic.responses)

        try:
            return await asyncio.to_thread(check)
        finally:
            stopped.set()  # a thread cannot be cancelled, only asked

    # Processes.

    async def _start_coordinator(self) -> str:
        wish = CoordinatorSettings(parent=os.getpid(), pause_mode=self.settings.pause_mode)
        await self.family.start("coordinator", "examples.demo.coordinator", wish, self.heard_report)
        return await self._url

    async def _start_replicas(self, url: str) -> None:
        for index in range(self.settings.replicas):
            name = f"{self.settings.replica_prefix}-{index}"
            # Bound here, so that the address is known before the process is ready, and nobody else can take the port.
            with _listen(self.settings.host) as listener:
                wish = ReplicaSettings(
                    parent=os.getpid(), name=name, listen_fd=listener.fileno(), coordinator=url,
                    directory=str(self.family.directory), settings=self.settings.for_children(),
                )  # fmt: skip
                await self.family.start(name, _REPLICAS[self.settings.engine], wish, self.heard_report, [listener.fileno()])
                host, port = listener.getsockname()[:2]
            self.replicas[name] = Address("http", host, port).url

    async def _start_trainers(self, url: str, directory: Path) -> None:
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            port = listener.getsockname()[1]
            for rank in range(self.settings.trainer_ranks):
                files = [listener.fileno()] if rank == 0 else []
                wish = TrainerSettings(
                    parent=os.getpid(), rank=rank, world_size=self.settings.trainer_ranks, port=port,
                    listen_fd=listener.fileno() if rank == 0 else None, directory=str(directory), coordinator=url,
                    settings=self.settings.for_children(),
                )  # fmt: skip
                child = await self.family.start(f"trainer-{rank}", "examples.demo.trainer", wish, self.heard_report, files)
                if rank == 0:
                    self._lead = child

    def close_the_books(self, seconds: float) -> Outcome:
        """The tables for people, and the outcome."""
        outcome = outcome_of(self.settings, list(self.replicas), self.record, self.findings, seconds)
        results = [self.record.results[number] for number in sorted(self.record.results)]
        self.console.print(rounds_table(results, {} if self.findings is None else self.findings.probes))
        losses = self.record.losses
        if losses:
            self.console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps", highlight=False)
        spanning = sum(len(set(response.token_versions)) > 1 for response in (self._traffic.responses if self._traffic else ()))
        self.console.print(
            f"{outcome.requests_served} requests served, {outcome.responses_checked} responses checked "
            f"({spanning} made by two versions or more): "
            f"{outcome.torn_responses} torn, {outcome.mislabelled_responses} mislabelled; "
            f"{outcome.delivery} over {outcome.transport}; {seconds:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
        if self.findings is not None and self.findings.ties:
            worst = max(self.findings.ties, key=lambda tie: tie.gap)
            self.console.print(
                f"{len(self.findings.ties)} of the compared runs chose between tokens that rounding cannot tell apart: {worst}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        for line in self.record.wrong:
            self.console.print(f"not ok: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
        if outcome.ok:
            self.console.print("[green]ok: every token came from the version on its label")
        return outcome


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise ConfigurationError(f"replicas cannot listen on --host {host}: {error.strerror or error}") from None


async def _first(watch: asyncio.Task[None], work: Coroutine[Any, Any, object]) -> None:
    """Do ``work`` unless ``watch`` fails first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watch.result()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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


async def _perform(settings: Settings, console: Console) -> Outcome | None:
    started = time.perf_counter()
    _end_on_signals()
    # A coordinator of our own gets a token of its own, by the environment, and settings meant for others do not reach it.
    token = generate() if settings.coordinator is None else None
    environment = {name: value for name, value in os.environ.items() if token is None or not name.startswith("WEIGHTSYNC_")}
    if token is not None:
        environment["WEIGHTSYNC_TOKEN"] = token.reveal()
    async with Family({**environment, **_QUIET}, _POLITE_SECONDS[settings.engine]) as family:
        demo = _Demo(settings, console, family, token)
        try:
            async with asyncio.timeout(settings.timeout):
                await family.guard(demo.perform())
        except (WeightSyncError, TimeoutError) as error:
            if isinstance(error, ConfigurationError):
                raise
            demo.record.failure = f"{type(error).__name__}: {str(error) or f'the demo took more than {settings.timeout:g} s'}"
        if settings.role in ("replica", "trainer") and demo.record.failure is None:
            return None
        return demo.close_the_books(time.perf_counter() - started)


def run(settings: Settings) -> int:
    """Run the demo and return its exit status: 0 only if every token was right, 130 after Ctrl-C or SIGTERM.

    With ``json``, the last line of standard output is :class:`~examples.demo.outcome.Outcome`, and everything for people goes
    to standard error. Raises :class:`~weightsync.errors.ConfigurationError` for an address or directory that cannot be used.
    """
    console = Console(stderr=settings.json)
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    try:
        outcome = asyncio.run(_perform(settings, console))
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("interrupted; everything was ended")
        return 130
    if settings.json and outcome is not None:
        print(msgspec.json.encode(outcome).decode())
        sys.stdout.flush()
    return 0 if outcome is None or outcome.ok else 1
