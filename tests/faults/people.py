"""``python -m tests.faults.people``: real processes that do what people do with the library, at random moments.

A training program is interrupted by signals (Ctrl-C, a handler that raises) at any instruction, publishes again, publishes twice
asynchronously, gives its parameters other memory, and holds the interpreter lock. An engine's program uses its module in
``in_use()``, moves its parameters in it, and leaves them in use for longer than it should. Every parameter holds the number of the
training step, so each engine process sees in each use whether it has one step, and which label that step has.

Ends with one JSON line; the exit status is 0 only if every label meant one step, everywhere, and the last publication reached all
engines.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import weightsync
from weightsync.config import Secret, ServerSettings
from weightsync.errors import VersionError, WeightSyncError
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import Shard, ShardedState

__all__ = ["Oracle", "main", "run_people"]

_TOKEN = "of-real-people-0123456789abcdef0123456789"
_SHAPES = {"embed": (8, 8), "up": (64, 33), "norm": (7,)}
_START_SECONDS = 60.0
_LAST_SECONDS = 40.0
_STEP_SECONDS = 8.0  # of one publication
_HOLDS_BEFORE = 100  # uses of its module, an engine's process holds its interpreter lock once


@dataclass
class Oracle:
    """What the processes of one run saw."""

    seed: int = 0
    steps: int = 0
    published: int = 0
    interrupted: int = 0
    uses: int = 0
    moved: int = 0
    wrong: list[str] = field(default_factory=list)
    _means: dict[int, float] = field(default_factory=dict)

    def label(self, who: str, number: int, step: float) -> None:
        """``who`` saw ``step`` under this version number."""
        known = self._means.setdefault(number, step)
        if known != step:
            self.wrong.append(f"{who}: version {number} is step {step:g}, and was step {known:g} to somebody else")

    def take(self, who: str, said: dict[str, Any]) -> None:
        """Check what a process reports."""
        match said:
            case {"use": label, "values": values}:
                self.uses += 1
                if len(values) != 1 and label is not None:
                    self.wrong.append(f"{who} generates as {label} with weights of steps {values[:6]}: torn")
                elif label is not None:
                    self.label(who, label, values[0])
            case {"version": number, "step": step}:
                self.published += 1
                self.label(who, number, step)
            case {"wrong": text}:
                self.wrong.append(f"{who}: {text}")
            case {"steps": count, "interrupted": interrupted}:
                self.steps += count
                self.interrupted += interrupted
            case {"moved": count}:
                self.moved += count


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Module(torch.nn.Module):
    """Parameters that all hold one number."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in _SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def fill(self, value: float) -> None:
        """A training step."""
        for parameter in self.parameters():
            parameter.data.fill_(value)

    def move(self, draw: random.Random) -> None:
        """Give some parameters other memory: the old one is free afterwards, and may be anybody's."""
        for name in _SHAPES:
            how = draw.randrange(3)
            if how == 1:
                self.get_parameter(name).data = self.get_parameter(name).data.clone()
            elif how == 2:
                setattr(self, name, torch.nn.Parameter(self.get_parameter(name).data.clone(), requires_grad=False))

    def values(self) -> list[float]:
        """The numbers in it."""
        return sorted({float(value) for name in _SHAPES for value in set(self.get_parameter(name).flatten().tolist())})


class _Half(ShardedState):
    """One of two ranks' halves of every parameter: nothing is held twice, so nothing but the library notices a mixture."""

    def __init__(self, rank: int) -> None:
        self._manifest = weightsync.manifest_of({name: torch.empty(shape) for name, shape in _SHAPES.items()})
        self._rank = rank
        self._shards: list[Shard] = []
        self.move()

    def move(self) -> None:
        """Give the shards other memory."""
        before = {shard.name: shard.tensor for shard in self._shards}
        made = []
        for name, shape in _SHAPES.items():
            first, last = shape[0] * self._rank // 2, shape[0] * (self._rank + 1) // 2
            tensor = before[name].clone() if name in before else torch.zeros((last - first, *shape[1:]))
            made.append(weightsync.shard(name, tensor, shape, (first, *(0 for _ in shape[1:]))))
        self._shards = sorted(made, key=lambda one: list(self._manifest.index).index(one.name))

    def fill(self, value: float) -> None:
        """A training step."""
        for shard in self._shards:
            shard.tensor.fill_(value)

    def declare(self) -> tuple[Any, Sequence[Shard]]:
        return self._manifest, self._shards


class _Watchdog(RuntimeError):
    """What the signal handler raises."""


def _hold_lock(seconds: float) -> None:
    """Hold the interpreter lock: no other thread of this process moves."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


class _Interrupted:
    """Raises in the main thread at a random instruction of a block."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.count = 0
        self._inside = False
        signal.signal(signal.SIGALRM, self._alarm)
        signal.signal(signal.SIGINT, self._interrupt)

    def _alarm(self, *_: object) -> None:
        if self._inside:
            self.count += 1
            raise _Watchdog("this takes too long")

    def _interrupt(self, *_: object) -> None:
        if self._inside:
            self.count += 1
            raise KeyboardInterrupt

    @contextmanager
    def perhaps(self) -> Iterator[None]:
        """Run the block, in which a signal may come."""
        draw, timer = self._draw, None
        self._inside = True
        try:
            if draw.random() < 0.5:
                after = draw.choice((draw.expovariate(1 / 0.0005), draw.expovariate(1 / 0.005), draw.expovariate(1 / 0.05)))
                if draw.random() < 0.5:
                    signal.setitimer(signal.ITIMER_REAL, max(after, 1e-5))
                else:
                    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
                    timer.daemon = True
                    timer.start()
            yield
        finally:
            self._inside = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if timer is not None:
                timer.cancel()


def _train(seed: int, rank: int, ranks: int, engines: int, steps: int, held: float) -> None:
    draw = random.Random(f"trainer {seed} {rank}")  # what happens to this rank
    shared = random.Random(f"trainers {seed}")  # what all ranks do
    module, half = _Module(), _Half(rank)
    state: Any = module if ranks == 1 else half
    fill: Callable[[float], None] = half.fill if ranks > 1 else module.fill
    signals, holds = _Interrupted(draw), draw.randint(1, steps)
    asked: list[tuple[int, Future[Any]]] = []
    with weightsync.Trainer(state, rank=rank, world_size=ranks) as trainer:
        trainer.wait_for_replicas(1, timeout=_START_SECONDS)
        for step in range(1, steps + 1):
            fill(float(step))
            if draw.random() < 0.3:
                module.move(draw) if ranks == 1 else half.move()
            if step == holds:
                _hold_lock(held)
            asynchronous = shared.random() < 0.4
            number = step if ranks > 1 else None  # ranks whose calls fail one by one stay in step by their numbers
            _guarded(functools.partial(_publish, trainer, signals, step, number, asynchronous, asked), ranks > 1)
            fill(-float(step))  # the next step begins: no version holds this
        for step, future in asked:
            _guarded(functools.partial(_await, future, step), ranks > 1)
        fill(float(steps + 1))
        trainer.wait_for_replicas(engines, timeout=held + _START_SECONDS)  # one may have been given up while it held its lock
        _told(trainer.publish(steps + 1 if ranks > 1 else None, timeout=_LAST_SECONDS), steps + 1)
        _say(steps=steps, interrupted=signals.count)
        sys.stdin.read()  # until all have seen it


def _publish(
    trainer: Any, signals: _Interrupted, step: int, number: int | None, asynchronous: bool, asked: list[tuple[int, Future[Any]]]
) -> None:
    with signals.perhaps():
        if asynchronous:
            asked.append((step, trainer.publish_async(number, timeout=_STEP_SECONDS)))
        else:
            _told(trainer.publish(number, timeout=_STEP_SECONDS), step)


def _await(future: Future[Any], step: int) -> None:
    _told(future.result(_STEP_SECONDS + 5.0), step)


def _told(result: Any, step: int) -> None:
    _say(version=result.version.number, step=float(step))


def _guarded(call: Callable[[], object], numbered: bool = False) -> None:
    try:
        call()
    except (_Watchdog, KeyboardInterrupt):
        pass
    except (WeightSyncError, TimeoutError) as error:
        if isinstance(error, VersionError) and not numbered:
            _say(wrong=f"published without a number, and was told: {error}")


def _engine(seed: int, name: str, held: float) -> None:
    draw = random.Random(f"engine {seed} {name}")
    module = _Module()
    adapter = weightsync.ModuleAdapter(module)
    moved, holds = 0, draw.randint(1, _HOLDS_BEFORE)
    over = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=await_end, daemon=True).start()
    delivery: Any = draw.choice(("direct", "direct", "streamed"))
    with weightsync.Engine(adapter, name, delivery=delivery):
        _say(ready=True)
        while not over.is_set():
            with adapter.in_use(timeout=60.0) as version:
                label = None if version is None else version.number
                _say(use=label, values=module.values())
                time.sleep(draw.expovariate(1 / 0.003))
                if draw.random() < 0.3:
                    module.move(draw)
                    moved += 1
                holds -= 1
                if not holds:
                    _hold_lock(held)
                _say(use=label, values=module.values())
            time.sleep(draw.expovariate(1 / 0.002))
        _say(moved=moved)


class _Party:
    """A process, and what it reports."""

    def __init__(self, name: str, arguments: Sequence[object], environment: dict[str, str], oracle: Oracle) -> None:
        command = [sys.executable, "-m", "tests.faults.people", *map(str, arguments)]
        self.name = name
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._oracle = oracle
        self.done, self.ready = threading.Event(), threading.Event()
        self.last: dict[str, Any] = {}
        self._errors = ""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            said = json.loads(line)
            self._oracle.take(self.name, said)
            if "values" in said:
                self.last = said
            self.ready.set()
            if "steps" in said:
                self.done.set()
        self.done.set()

    def _read_errors(self) -> None:
        self._errors = (self.process.stderr.read() if self.process.stderr else "")[-2000:]

    def end(self, seconds: float) -> None:
        """Let it end; note what it says if it does not do so well."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._oracle.wrong.append(f"{self.name} did not end within {seconds:g} s")
            self.process.kill()
            code = self.process.wait()
        for thread in self._threads:
            thread.join(5.0)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if code:
            self._oracle.wrong.append(f"{self.name} ended with status {code}: {self._errors[-600:]}")


def run_people(seed: int, steps: int, held: float = 0.2, ranks: int = 1) -> Oracle:
    """One run of ``steps`` steps of ``ranks`` trainer ranks; each process holds its interpreter lock once for ``held`` seconds."""
    draw, oracle = random.Random(f"people {seed}"), Oracle(seed)
    engines = draw.choice((1, 2))
    settings = ServerSettings.load({}, port=0, token=Secret(_TOKEN), run="people", state_dir="off")
    with BackgroundServer(settings) as server, ExitStack() as owned:
        environment = dict(os.environ, WEIGHTSYNC_COORDINATOR=server.url, WEIGHTSYNC_TOKEN=_TOKEN, OMP_NUM_THREADS="1")
        names = [f"engine-{index}" for index in range(engines)]
        parties = [_Party(name, ("--engine", name, "--seed", seed, "--held", held), environment, oracle) for name in names]
        for rank in range(ranks):
            given = ("--trainer", rank, "--ranks", ranks, "--engines", engines, "--steps", steps, "--seed", seed, "--held", held)
            parties.append(_Party(f"trainer/{rank}", given, environment, oracle))
        for party in parties:
            owned.callback(party.process.kill)
        limit = 2 * _START_SECONDS + held + _LAST_SECONDS + steps * (_STEP_SECONDS + held)
        until = time.monotonic() + limit
        for party in parties[engines:]:
            if not party.done.wait(max(until - time.monotonic(), 0.0)):
                oracle.wrong.append(f"{party.name} did not come to its end within {limit:g} s")
        time.sleep(0.3)
        for party in parties[:engines]:
            if party.last.get("values") != [float(steps + 1)]:
                oracle.wrong.append(f"{party.name} is left with {party.last}: the last publication did not reach it")
        for party in reversed(parties):
            party.end(_STEP_SECONDS + 10.0)
    return oracle


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds, or be one of their processes."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.people", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first run's seed (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="training steps of a run (default: %(default)s)")
    parser.add_argument("--held", type=float, default=2.0, metavar="SECONDS", help="of the interpreter lock (default: %(default)s)")
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="trainer ranks (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.trainer is not None:
        _train(given.seed, given.trainer, given.ranks, given.engines, given.steps, given.held)
        return 0
    if given.engine is not None:
        _engine(given.seed, given.engine, given.held)
        return 0
    started, wrong, totals = time.monotonic(), 0, Oracle()
    for seed in range(given.first, given.first + given.seeds):
        oracle = run_people(seed, given.steps, given.held, given.ranks)
        print(
            f"seed {seed}: {oracle.published} published, {oracle.interrupted} interrupted, {oracle.uses} uses",
            file=sys.stderr,
            flush=True,
        )
        for line in oracle.wrong[:10]:
            print(f"seed {seed}: {line}", file=sys.stderr, flush=True)
        wrong += bool(oracle.wrong)
        for name in ("steps", "published", "interrupted", "uses", "moved"):
            setattr(totals, name, getattr(totals, name) + getattr(oracle, name))
    summary = {
        "runs": given.seeds, "wrong": wrong, "steps": totals.steps, "published": totals.published, "uses": totals.uses,
        "interrupted": totals.interrupted, "moved": totals.moved, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(json.dumps(summary))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
