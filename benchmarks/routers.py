"""Rolling updates of replicas behind sglang-router, under load: requests that failed, and answers older than they may be.

``python -m benchmarks.routers [--replicas N] [--versions N] [--drain SECONDS] [--mode MODE] [--json]``. The router is a real
process (``pip install --no-deps sglang-router==0.3.2``); so are coordinator, rounds and middleware. Replicas are stand-ins that
need 40 ms for four tokens, each token the version that is in the weights at that moment. A pause aborts running requests, which
then fail, or waits for them, and requests that come in the pause wait until its end, as in vLLM. Every request names the version
that was published last as its minimum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import httpx
import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.trl_sync import free_port
from weightsync.config import ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.external import VersionedRequests
from weightsync.model import PauseMode
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

_TOKENS, _TOKEN_SECONDS = 4, 0.01
_SECONDS = 30.0
_ROUTER = """
import argparse
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()
"""
"""What ``python -m sglang_router.launch_router`` does, without the packages that only its debugging balancer needs."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, and what came of it."""

    replicas: int
    versions: int
    drain: float
    mode: PauseMode
    requests: int
    failed: int
    """Requests that were not answered with tokens."""
    below: int
    """Answers with a token of a version before the minimum that the request named."""
    mixed: int
    """Answers with tokens of several versions."""
    statuses: dict[str, int]
    slowest: float
    """Seconds of the slowest request."""
    update_seconds: tuple[float, ...]
    """Seconds of each rolling update."""


def wait_for(what: str, there: object, seconds: float = _SECONDS) -> None:
    """Wait until the function ``there`` returns something true. Raises ``TimeoutError``."""
    until, tick = time.monotonic() + seconds, threading.Event()
    while not there():  # type: ignore[operator]
        if time.monotonic() > until:
            raise TimeoutError(what)
        tick.wait(0.01)


class Replica(ModuleAdapter):
    """A stand-in for an engine with its HTTP server. Its only parameter is filled with the number of its version."""

    def __init__(self, port: int) -> None:
        layer = torch.nn.Linear(8, 8, bias=False)
        super().__init__(layer)
        self._weight = layer.weight
        self.url, self.port = f"http://127.0.0.1:{port}", port
        self._state = threading.Condition()
        self._paused, self._pauses, self._running = False, 0, 0
        self.engine: Engine | None = None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Abort running requests, or wait for them."""
        with self._state:
            self._paused = True
            if mode == "abort":
                self._pauses += 1
            elif not self._state.wait_for(lambda: not self._running, timeout):
                raise TimeoutError("requests run on")

    def resume(self) -> None:
        """Generate again."""
        self._paused = False

    def app(self) -> Starlette:
        """The server's application."""

        async def generate(request: Request) -> Response:
            while self._paused:  # noqa: ASYNC110 - stands for an engine's queue
                await asyncio.sleep(0.002)
            with self._state:
                self._running += 1
                pauses = self._pauses
            try:
                tokens = []
                for _ in range(_TOKENS):
                    if self._pauses != pauses:
                        return JSONResponse({"error": "aborted"}, 500)
                    tokens.append(int(self._weight[0, 0]))
                    await asyncio.sleep(_TOKEN_SECONDS)
                return JSONResponse({"text": "", "tokens": tokens})
            finally:
                with self._state:
                    self._running -= 1
                    self._state.notify_all()

        async def about(request: Request) -> Response:
            return JSONResponse({"model_path": "policy", "served_model_name": "policy", "dp_size": 1, "is_generation": True})

        app = Starlette(
            routes=[Route("/generate", generate, methods=["POST"])]
            + [Route(path, about) for path in ("/health", "/server_info", "/model_info")]
        )
        app.add_middleware(VersionedRequests, served=lambda: None if self.engine is None else self.engine.serving)
        return app

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve HTTP in a thread."""
        server = uvicorn.Server(uvicorn.Config(self.app(), "127.0.0.1", self.port, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            wait_for("the replica's server", lambda: server.started)
            yield
        finally:
            server.should_exit = True
            thread.join(_SECONDS)


@contextmanager
def sglang_router(port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real sglang-router without workers, on loopback. ``flags`` are its own."""
    command = [
        sys.executable, "-c", _ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--log-level", "error", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1", *flags,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for("sglang-router", lambda: _answers(f"http://127.0.0.1:{port}/workers"))
            yield process
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code < httpx.codes.INTERNAL_SERVER_ERROR
    except httpx.HTTPError:
        return False


class _Load:
    """Requests through the router, from several clients that wait for their answers."""

    def __init__(self, url: str, clients: int) -> None:
        self.least, self._url, self._clients = 1, url, clients
        self._end = threading.Event()
        self.statuses = Counter[str]()
        self.failed, self.below, self.mixed, self.slowest = 0, 0, 0, 0.0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(_SECONDS)

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=_SECONDS, trust_env=False) as http:
            await asyncio.gather(*(self._ask(http) for _ in range(self._clients)))

    async def _ask(self, http: httpx.AsyncClient) -> None:
        while not self._end.is_set():
            least, begun = self.least, time.monotonic()
            try:
                answer = await http.post(
                    self._url, json={"text": "a"}, headers={"tracestate": f"weightsync-min=run@{least}"}
                )  # fmt: skip
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1
                self.failed += 1
                continue
            self.statuses[str(answer.status_code)] += 1
            self.slowest = max(self.slowest, time.monotonic() - begun)
            tokens = answer.json().get("tokens") if answer.is_success else None
            self.failed += not tokens
            self.below += any(token < least for token in tokens or ())
            self.mixed += len(set(tokens or ())) > 1


def run_case(replicas: int, versions: int, drain: float, mode: PauseMode = "abort", clients: int = 8) -> Case:
    """Update ``replicas`` through ``versions``, one at a time, behind a router and under load."""
    router = free_port()
    settings = ServerSettings.load(
        {}, port=0, run="run", max_unavailable=1, drain_seconds=drain, pause_mode=mode, state_dir="off",
        routers=(f"sglang+http://127.0.0.1:{router}",),
    )  # fmt: skip
    seconds = []
    with ExitStack() as owned:
        owned.enter_context(sglang_router(router, "--disable-retries"))
        server = owned.enter_context(BackgroundServer(settings))
        for number in range(replicas):
            replica = Replica(free_port())
            owned.enter_context(replica.serving())
            os.environ["WEIGHTSYNC_REPLICA_URL"] = replica.url
            try:
                replica.engine = owned.enter_context(Engine(replica, f"replica-{number}", server.url, token=server.token))
            finally:
                del os.environ["WEIGHTSYNC_REPLICA_URL"]
        source = torch.nn.Linear(8, 8, bias=False)
        trainer = owned.enter_context(Trainer(source, server.url, token=server.token))

        def publish(version: int) -> float:
            torch.nn.init.constant_(source.weight, version)
            result = trainer.publish(version, timeout=_SECONDS)
            assert all(replica.error is None for replica in result.replicas), result
            return result.seconds

        publish(1)
        workers = f"http://127.0.0.1:{router}/workers"
        wait_for("the router's workers", lambda: httpx.get(workers, trust_env=False).json()["total"] == replicas)
        load = owned.enter_context(_Load(f"http://127.0.0.1:{router}/generate", clients))
        for version in range(2, versions + 1):
            seconds.append(publish(version))
            load.least = version
            threading.Event().wait(0.1)
        load.__exit__()
    return Case(
        replicas=replicas, versions=versions, drain=drain, mode=mode, requests=load.statuses.total(), failed=load.failed,
        below=load.below, mixed=load.mixed, statuses=dict(load.statuses), slowest=load.slowest, update_seconds=tuple(seconds),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--versions", type=int, default=11)
    parser.add_argument("--drain", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--mode", choices=("abort", "wait"), nargs="+", default=["abort", "wait"])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    for mode in chosen.mode:
        for drain in chosen.drain:
            case = run_case(chosen.replicas, chosen.versions, drain, mode)
            if chosen.json:
                print(json.dumps(msgspec.to_builtins(case)), flush=True)
                continue
            print(
                f"pause {mode}, drain {drain:g} s: {case.requests} requests, {case.failed} failed, {case.below} below the minimum, "
                f"{case.mixed} mixed; updates of {max(case.update_seconds):.2f} s, slowest request {case.slowest:.2f} s; "
                f"{case.statuses}", flush=True,
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
