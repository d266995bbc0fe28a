"""The whole demo: start the processes, keep the traffic going, let version follow version, check every token, sum up.

``run(settings)`` is what ``python -m examples.demo`` calls. With another role than ``all`` it starts and watches only that part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from examples.demo.events import follow, status
from examples.demo.family import Family
from examples.demo.outcome import Kill, Outcome, Record, outcome_of
from examples.demo.reports import Adapted, Holding, Listening, Publication, Ready, Report, Saved, Step, Unpublished
from examples.demo.settings import KILLED, Settings
from examples.demo.supervisor import Supervisor
from examples.demo.tasks import probes, prompts
from examples.demo.traffic import Traffic, replica_names
from examples.demo.view import View, label, rounds_table
from examples.demo.vllm_prompts import with_examples
from weightsync.config import Address, ClientSettings, Secret, read_token, worker_environment
from weightsync.coordinator.events import Event, Joined, ReplicaEnded, RoundEnded, RoundStarted
from weightsync.errors import ConfigurationError, CoordinatorUnreachable, DeadlineExceeded, WeightSyncError
from weightsync.protocol.messages import ReplicaResult, RoundResult
from weightsync.protocol.tokens import generate, login_url

if TYPE_CHECKING:
    from examples.demo.checking import Findings

__all__ = ["run"]

_PROMPTS = 10
_POLITE_SECONDS = {"transformers": 5.0, "vllm": 20.0}  # vLLM's processes free shared memory as they end
_RECOVERY_SECONDS = 180.0
_LOG_WIDTH = 120  # where output is not a terminal, tables need not be narrow
_QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# glibc keeps many arenas, and serves ever larger blocks from them: short buffers between long-lived adapters leave holes.
_STEADY_MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


class _Demo:
    """One run. :meth:`perform` is the plot; the rest reacts to what the processes and the coordinator say."""

    def __init__(self, settings: Settings, console: Console, family: Family, token: Secret | None) -> None:
        self.settings, self.console, self.family = settings, console, family
        self.record = Record()
        self.supervisor = Supervisor(settings, family, self.heard_report)
        self._token = token
        self.findings: Findings | None = None
        self.replicas: dict[str, str] = {}
        """Addresses by name."""
        self.view = View(console, ())
        self._traffic: Traffic | None = None
        self._starts = 0
        """How often the coordinator was started."""
        self._coordinator_up = asyncio.Event()
        self._following = asyncio.Event()
        self._url = settings.coordinator or ""
        self._round = 0
        self._in_round = asyncio.Event()
        self._holding = asyncio.Event()
        self._ready: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._saved = asyncio.Queue[int]()
        self._results = asyncio.Queue[RoundResult | None]()
        """Of the trainer's publications, in order; ``None`` for one that failed."""
        self._adapted = asyncio.Queue[None]()
        """An entry for each version of an adapter that was published."""
        self._serving: dict[str, str | None] = {}
        """Digests of what replicas serve, as far as the coordinator said it."""
        self._served = asyncio.Event()

    # What is heard.

    def heard_report(self, report: Report) -> None:
        """A child said something."""
        match report:
            case Listening():
                self._url = report.url
                self._coordinator_up.set()
            case Ready():
                self._ready[report.name].set()
            case Holding():
                self._holding.set()
            case Step():
                self.record.losses.append(report.loss)
                self.view.loss(report.step, report.loss)
            case Saved():
                self._saved.put_nowait(report.version)
            case Publication():
                self._note(report.result)
            case Adapted():
                self._note_adapter(report)
            case Unpublished():
                self.view.say(f"version {report.number} failed, the trainer goes on: {report.error}")
                self.record.unpublished.append((self.supervisor.epoch, report.number))
                self._results.put_nowait(None)

    def heard_event(self, event: Event) -> None:
        """The coordinator said something."""
        self.view.show(event)
        match event:
            case RoundStarted():
                self._round = event.round
                self._in_round.set()
            case Joined():
                self._served.set()
            case ReplicaEnded():
                self._note_replica(event.result)
            case RoundEnded():
                self._in_round.clear()
                if event.result is not None and self.supervisor.lead is None:
                    self._note(event.result)
            case _:
                pass

    def _note(self, result: RoundResult) -> None:
        if result.version.order in self.record.results:  # later rounds of this version only re-seed
            return
        self.record.results[result.version.order] = result
        self._results.put_nowait(result)
        for replica in result.replicas:
            self._note_replica(replica)

    def _note_adapter(self, report: Adapted) -> None:
        version = report.result.version
        self.record.adapters.append(report)
        self.view.say(f"{version} serves in {len(report.result.replicas)} replicas after {1e3 * report.seconds:.0f} ms")
        if self._traffic is not None:
            self._traffic.adapter_published(version.run, version.number)
        self._adapted.put_nowait(None)

    def _note_replica(self, result: ReplicaResult) -> None:
        if result.state == "loaded":
            self._note_serving(result.name, result.digest)

    async def _note_status(self) -> None:
        """Note what replicas serve without an event: one that a new coordinator finds at its version needs no round."""
        for replica in (await status(self._client)).replicas:
            if replica.state == "loaded":
                self._note_serving(replica.name, replica.digest)

    def _note_serving(self, name: str, digest: str | None) -> None:
        if self._serving.get(name) != digest:
            self._served.set()
        self._serving[name] = digest
        self.record.served_digests.add((name, digest))
        if self._traffic is not None:
            self._traffic.seeded(name)

    # What is done.

    async def perform(self) -> None:
        """Everything that this role does, from the first process to the checked tokens."""
        settings = self.settings
        with self.view:
            if settings.coordinator is None:
                await self._start_coordinator()
            self.view.headline(f"coordinator at {self._url}; starting the others")
            if (
                self._token is not None and settings.token_file is None and self.console.is_terminal
            ):  # a file may have other readers
                self.view.say(f"its page: {login_url(Address.parse(self._url), self._token)}")
            if settings.role == "client":
                self.replicas = await replica_names(settings.replica_urls)
            client = self._client
            following = asyncio.create_task(self._follow(client))
            try:
                await _first(following, self._following.wait())
                await _first(following, self._play(client))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    @property
    def _client(self) -> ClientSettings:
        return ClientSettings.load(coordinator=self._url, token=self._token)

    async def _start_coordinator(self) -> None:
        await self.supervisor.start_coordinator()
        await self._coordinator_up.wait()

    async def _follow(self, client: ClientSettings) -> None:
        """Hear the coordinator's events, also of one that was started again."""
        while True:
            starts = self._starts
            try:
                await follow(client, self.heard_event, self._following)
            except CoordinatorUnreachable:
                if starts == self._starts:
                    raise
                await self._coordinator_up.wait()

    async def _play(self, client: ClientSettings) -> None:
        settings, supervisor = self.settings, self.supervisor
        if settings.role in ("all", "replica"):
            for index in range(settings.replicas):
                await supervisor.start_replica(index, self._url)
            self.replicas = dict(supervisor.replicas)
        if settings.role in ("all", "client"):
            asked, probed = prompts(settings.seed, _PROMPTS), probes(settings.seed)
            if settings.engine == "vllm":
                asked, probed = with_examples(asked, settings.seed), with_examples(probed, settings.seed)
            self._traffic = Traffic(self.replicas, asked, probed)
        if settings.role in ("all", "trainer"):
            await supervisor.start_trainers(self._url)
        await self._are_ready(name for name in self.family.children if name != "coordinator")
        if settings.role == "replica":
            for name, where in self.replicas.items():
                self.view.say(f"{name} serves at {where}; Ctrl-C ends it")
            await self.family.ended()
        elif settings.role == "trainer":
            await self._publish_all(None)
            await self.family.ended()
        elif self._traffic is not None:
            try:
                await self._serve_and_check(self._traffic, client)
            finally:
                await self._traffic.close()

    async def _are_ready(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self._ready[name].wait() for name in names))

    async def _serve_and_check(self, traffic: Traffic, client: ClientSettings) -> None:
        if self.settings.role == "all":
            self.record.refused_unseeded = await traffic.refused_unseeded()
        else:
            for found in (await status(client)).replicas:
                if found.routable:
                    traffic.seeded(found.name)
        self.view.headline("training, publishing, serving")
        importing = asyncio.create_task(asyncio.to_thread(import_module, "examples.demo.checking"))  # takes seconds
        await self._publish_all(traffic)
        if self.settings.kill_trainer:
            async with asyncio.timeout(_RECOVERY_SECONDS):
                await self._outlive_trainer(traffic)
        await traffic.stop()
        self.record.served, self.record.failures = traffic.served, dict(traffic.refused)
        self.record.interrupted = traffic.interrupted
        self.record.final = await status(client)
        self._go_on()  # the trainers may end
        await importing
        self.view.headline(f"checking {len(traffic.responses)} responses against {len(self.record.results)} checkpoints")
        self.findings = await self._check(traffic, self.supervisor.directory)

    def _note_memory(self) -> None:
        if sys.platform == "linux":
            processes = [self.family.children[name].process.pid for name in self.supervisor.replicas]
            pages = sum(int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in processes)
            self.record.resident.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)
            self.view.say(f"the replicas' processes hold {self.record.resident[-1]:,} MiB")

    async def _publish_all(self, traffic: Traffic | None) -> None:
        """Each version when its checkpoint is there and the last one's probes were answered."""
        victims = dict(enumerate(KILLED, start=2)) if self.settings.kill else {}
        for count in range(1, self.settings.versions + 1):
            result = await (self._kill(victims[count]) if count in victims else self._next_result())
            if traffic is not None:
                await traffic.probe(result.version.order)
                for _ in range(self.settings.adapters):
                    await self._adapted.get()
                await traffic.probe_adapters()
                if self.settings.adapters:
                    self._note_memory()
        if traffic is None:
            self._go_on()

    async def _next_result(self) -> RoundResult:
        """Let the trainer publish, and return the result of the next version whose round did not fail."""
        while True:
            if self.supervisor.lead is not None:
                await self._saved.get()
                self._go_on()
            result = await self._results.get()
            if result is not None:
                return result

    def _go_on(self) -> None:
        if self.supervisor.lead is not None:
            self.supervisor.lead.say()

    async def _outlive_trainer(self, traffic: Traffic) -> None:
        """End the trainer for good, start another replica, and wait until it serves the last version, which is in the store."""
        supervisor, result = self.supervisor, self.record.results[max(self.record.results)]
        await self.family.kill(*reversed(supervisor.trainers))
        supervisor.lead = None
        self.view.say(f"the trainer was killed for good; version {label(result.version.order)} is in {self.settings.store}")
        started = time.perf_counter()
        name = await supervisor.start_replica(self.settings.replicas, self._url)
        self.record.joined = name
        while self._serving.get(name) != result.version.digest:
            self._served.clear()
            await self._served.wait()
        self.view.say(
            f"{name} joined from the store: it serves version {label(result.version.order)} "
            f"{time.perf_counter() - started:.1f} s after its process was started"
        )
        traffic.add(name, supervisor.replicas[name])
        traffic.seeded(name)
        await traffic.probe(result.version.order)

    # What is killed.

    async def _kill(self, victim: str) -> RoundResult:
        """Kill ``victim`` in the middle of the next round, start it again, and wait until every replica serves what comes next."""
        try:
            async with asyncio.timeout(_RECOVERY_SECONDS):
                return await self._kill_and_recover(victim)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the demo had not recovered from the loss of the {victim} after {_RECOVERY_SECONDS:g} s"
            ) from None

    async def _kill_and_recover(self, victim: str) -> RoundResult:
        supervisor, last = self.supervisor, len(self.replicas) - 1
        holder = f"{self.settings.replica_prefix}-{last}"
        name = {"replica": holder, "trainer": supervisor.trainers[-1]}.get(victim, victim)
        number = await self._saved.get()
        self._holding.clear()
        self.family.children[holder].say()
        self._go_on()
        await self._holding.wait()
        await self._in_round.wait()
        kill = Kill(name, self.family.children[name].process.pid, self._round, label((supervisor.epoch, number)))
        self.record.kills.append(kill)
        started = time.perf_counter()
        self.view.say(
            f"killing {name} (process {kill.pid}) in the middle of round {kill.round}: "
            f"version {kill.version} is on its way to {holder}"
        )
        if victim == "replica":
            if self._traffic is not None:
                self._traffic.lost(name)
            self._serving.pop(name, None)
            self._ready[name].clear()
            await self.family.kill(name)
            await supervisor.start_replica(last, self._url)
            await self._are_ready([name])
        elif victim == "trainer":
            for rank in supervisor.trainers:
                self._ready[rank].clear()
            await self.family.kill(*reversed(supervisor.trainers))  # the others cannot go on without it
            self.family.children[holder].say()
            self._saved, self._results = asyncio.Queue(), asyncio.Queue()  # of the ranks that are gone
            await supervisor.start_trainers(self._url, resume=max(self.record.results))
            await self._are_ready(supervisor.trainers)
            self._results.put_nowait(None)  # nobody will tell the result of that round
        else:
            self._starts += 1
            self._coordinator_up.clear()
            self._following.clear()
            self._in_round.clear()  # its end will not be told
            await self.family.kill(name)
            self.family.children[holder].say()
            await self._start_coordinator()
            await self._following.wait()
            self._serving.clear()  # only what this coordinator says counts: a replica may not have connected to it yet
            await self._note_status()
        result = await self._results.get() or await self._next_result()
        while any(self._serving.get(replica) != result.version.digest for replica in self.replicas):
            await self._served.wait()
            self._served.clear()
            await self._note_status()
        kill.seconds = time.perf_counter() - started
        kill.back_at = label(result.version.order)
        self.view.say(f"{name} is back after {kill.seconds:.1f} s: all {len(self.replicas)} replicas serve version {kill.back_at}")
        return result

    async def _check(self, traffic: Traffic, directory: Path) -> Findings:
        stopped = threading.Event()

        def check() -> Findings:
            from examples.demo.checking import checker_for

            return checker_for(self.settings, directory, stopped.is_set).check(traffic.responses)

        try:
            return await asyncio.to_thread(check)
        finally:
            stopped.set()  # a thread cannot be cancelled, only asked

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
        if outcome.adapters is not None:
            found = outcome.adapters
            self.console.print(
                f"{found.versions} versions of {found.names} adapters were published in {found.longest_publish_ms:.0f} ms or less; "
                f"{found.answers} answers to requests that named one, {found.wrong_answers} of a wrong version",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        if self.settings.kill:
            self.console.print(
                f"{outcome.kills} processes killed in the middle of rounds, {outcome.recoveries} back after "
                f"{', '.join(f'{kill.seconds:.1f} s ({kill.process})' for kill in outcome.killed if kill.seconds is not None)}; "
                f"{outcome.requests_interrupted} requests were running in a process that was killed",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        for line in self.record.wrong:
            self.console.print(f"not ok: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
        if outcome.ok:
            self.console.print("[green]ok: every token came from the version on its label")
        return outcome


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
    token = None
    if settings.coordinator is None:
        token = read_token(str(settings.token_file), "--token-file ") if settings.token_file is not None else generate()
    own = token is not None
    environment = {name: value for name, value in worker_environment().items() if not (own and name.startswith("WEIGHTSYNC_"))}
    if token is not None:
        environment["WEIGHTSYNC_TOKEN"] = token.reveal()
    if settings.store is not None:
        environment["WEIGHTSYNC_STORE"] = settings.store
    async with Family({**environment, **_QUIET, **_STEADY_MEMORY}, _POLITE_SECONDS[settings.engine]) as family:
        demo = _Demo(settings, console, family, token)
        try:
            with demo.supervisor:
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
