"""Routers are told which replicas serve: a real sglang-router under load, and servers that are dead, slow, restarted or wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from benchmarks.routers import Replica, run_case, sglang_router, wait_for
from benchmarks.trl_sync import free_port

from weightsync.config import Secret, ServerSettings
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.server.server import BackgroundServer
from weightsync.trainer.trainer import Trainer

with_router = pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed here")
DRAIN = 0.5


class Fake:
    """A router's HTTP interface, with a fault on demand. ``state`` is what it was told last."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and Authorization."""
        self.workers: dict[str, str] = {}
        self.answer: Callable[[], Awaitable[bytes] | bytes] | None = None
        self.port = free_port()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        self.asked.append((scope["method"], scope["path"], authorization))
        status, content = 200, b"{}"
        if self.answer is not None:
            answer = self.answer()
            content = answer if isinstance(answer, bytes) else await answer
        elif scope["path"] == "/hook":
            self.state = json.loads(body)
        elif scope["method"] == "POST":
            url = json.loads(body)["url"]
            self.workers[url] = f"id-of-{url}"
            status = 202
        elif scope["method"] == "DELETE":
            known = {f"/workers/{worker}": url for url, worker in self.workers.items()}
            status = 202 if self.workers.pop(known.get(scope["path"], ""), None) else 404
        else:
            listed = [{"id": worker, "url": url, "is_healthy": True} for url, worker in self.workers.items()]
            content = json.dumps({"workers": listed, "total": len(listed)}).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    @property
    def serving(self) -> dict[str, str | None]:
        """Version by replica, as the webhook was told."""
        return {} if self.state is None else {replica["name"]: replica["version"] for replica in self.state["replicas"]}

    @contextmanager
    def running(self) -> Iterator[Fake]:
        server = uvicorn.Server(uvicorn.Config(self, "127.0.0.1", self.port, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_for("the fake router", lambda: server.started)
            yield self
        finally:
            server.force_exit = server.should_exit = True
            thread.join(10)


class Fleet:
    """A coordinator, a trainer and two engines that say where they are."""

    def __init__(self, owned: ExitStack, monkeypatch: pytest.MonkeyPatch, *routers: str, **more: object) -> None:
        self._owned, self._monkeypatch = owned, monkeypatch
        wish = {"drain_seconds": DRAIN, "max_unavailable": 1, "heartbeat": 1.0, "run": "run", "state_dir": "off"} | more
        self.server = owned.enter_context(BackgroundServer(ServerSettings.load({}, port=0, routers=routers, **wish)))
        self.source = torch.nn.Linear(4, 4)
        self.trainer = owned.enter_context(Trainer(self.source, self.server.url, token=self.server.token))
        self.engines = [self.join(number) for number in (0, 1)]

    def join(self, number: int, name: str = "") -> Engine:
        self._monkeypatch.setenv("WEIGHTSYNC_REPLICA_URL", f"http://replica-{number}:8000/")
        name = name or f"replica-{number}"
        engine = Engine(ModuleAdapter(torch.nn.Linear(4, 4)), name, self.server.url, token=self.server.token)
        return self._owned.enter_context(engine)

    def publish(self, number: int) -> float:
        began = time.monotonic()
        result = self.trainer.publish(number, timeout=30.0)
        assert all(replica.error is None for replica in result.replicas), result
        return time.monotonic() - began


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_webhook_hears_who_serves_what_and_who_drains(owned: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = owned.enter_context(Fake().running())
    fleet = Fleet(owned, monkeypatch, f"webhook+http://127.0.0.1:{hook.port}/hook", router_token=Secret("of-the-router"))
    wait_for("both replicas, without a version", lambda: hook.serving == {"replica-0": None, "replica-1": None})
    fleet.publish(1)
    wait_for("both replicas", lambda: hook.serving == {"replica-0": "run@1", "replica-1": "run@1"})
    assert hook.state is not None
    assert hook.state["run"] == "run"
    assert [replica["url"] for replica in hook.state["replicas"]] == ["http://replica-0:8000", "http://replica-1:8000"]
    seen: list[dict[str, str | None]] = []
    publishing = threading.Thread(target=fleet.publish, args=[2])
    publishing.start()
    while publishing.is_alive():
        seen.append(hook.serving)
        publishing.join(0.005)
    steps = [step for step, before in zip(seen, [None, *seen], strict=False) if step != before]
    assert steps[0] == {"replica-0": "run@1", "replica-1": "run@1"}
    assert all(sum(version is not None for version in step.values()) >= 1 for step in steps)  # never all at once
    assert any(None in step.values() for step in steps)
    fleet.engines[0].close()
    wait_for("who left", lambda: hook.serving == {"replica-0": None, "replica-1": "run@2"})
    assert {authorization for _, _, authorization in hook.asked} == {"Bearer of-the-router"}


def test_the_end_of_the_coordinator_takes_no_replica_from_routers(owned: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = owned.enter_context(Fake().running())
    fleet = Fleet(owned, monkeypatch, f"webhook+http://127.0.0.1:{hook.port}/hook")
    fleet.publish(1)
    wait_for("both replicas", lambda: hook.serving == {"replica-0": "run@1", "replica-1": "run@1"})
    fleet.server.stop()
    assert hook.serving == {"replica-0": "run@1", "replica-1": "run@1"}


async def _hang() -> bytes:
    await asyncio.sleep(60)
    return b""


async def _long() -> bytes:
    return b" " * (17 << 20)


@pytest.mark.parametrize(
    "answer",
    [None, _hang, _long, lambda: b"no json", lambda: b'{"workers": 7}', lambda: b'{"workers": [{"id": "../../flush_cache"}]}'],
    ids=["dead", "slow", "endless", "nonsense", "wrong", "incomplete"],
)
def test_a_router_that_fails_delays_a_round_by_the_drain_at_most(
    owned: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    sick, well = Fake(), owned.enter_context(Fake().running())
    sick.answer = answer
    if answer is not None:
        owned.enter_context(sick.running())
    fleet = Fleet(owned, monkeypatch, f"sglang+http://127.0.0.1:{sick.port}", f"sglang+http://127.0.0.1:{well.port}")
    fleet.publish(1)
    wait_for("the other router", lambda: len(well.workers) == 2)
    # For each of two replicas in turn: its drain, and as long at most for the router that never settles.
    assert fleet.publish(2) < 2 * 2 * DRAIN + 2.0
    wait_for("the other router", lambda: len(well.workers) == 2)
    assert not any(path == "/flush_cache" for _, path, _ in sick.asked)
    told = [record.getMessage() for record in caplog.records if "does not know which replicas serve" in record.getMessage()]
    if answer is not _hang:
        assert any(str(sick.port) in line for line in told)
    assert not any(str(well.port) in line for line in told)
    headers = {"Authorization": f"Bearer {fleet.server.token}"}

    def shown(router: Fake, settled: int) -> bool:
        metrics = httpx.get(f"{fleet.server.url}/metrics", headers=headers, trust_env=False).text
        return f'weightsync_router_settled{{router="sglang+http://127.0.0.1:{router.port}"}} {settled}.0' in metrics

    wait_for("the other router to settle", lambda: shown(well, 1))  # it has, once its last answer was read
    assert shown(sick, 0)


def test_a_router_that_lost_its_state_gets_it_again_and_keeps_what_is_not_ours(
    owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = owned.enter_context(Fake().running())
    router.workers["http://another:8000"] = "another"
    fleet = Fleet(owned, monkeypatch, f"sglang+http://127.0.0.1:{router.port}")
    fleet.publish(1)
    all_three = {"http://another:8000", "http://replica-0:8000", "http://replica-1:8000"}
    wait_for("the workers", lambda: router.workers.keys() == all_three)
    router.workers.clear()  # it was restarted, and nobody says so
    wait_for("the workers again", lambda: router.workers.keys() == all_three - {"http://another:8000"}, 10.0)
    router.workers["http://another:8000"] = "another"
    fleet.engines[1].close()
    wait_for("its withdrawal", lambda: router.workers.keys() == {"http://another:8000", "http://replica-0:8000"})


def test_a_replica_that_comes_back_under_another_url_is_withdrawn_under_its_earlier_one(
    owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, hook = owned.enter_context(Fake().running()), owned.enter_context(Fake().running())
    fleet = Fleet(owned, monkeypatch, f"sglang+http://127.0.0.1:{router.port}", f"webhook+http://127.0.0.1:{hook.port}/hook")
    fleet.publish(1)
    wait_for("the workers", lambda: router.workers.keys() == {"http://replica-0:8000", "http://replica-1:8000"})
    router.answer = lambda: b"no json"  # so it hears of nothing in between
    fleet.engines[1].close()
    fleet.join(2, "replica-1")
    wait_for("the new URL", lambda: hook.serving.get("replica-1") == "run@1")
    router.answer = None
    wait_for("the new URL alone", lambda: router.workers.keys() == {"http://replica-0:8000", "http://replica-2:8000"}, 10.0)


@with_router
def test_a_rolling_update_behind_sglang_router_loses_no_request() -> None:
    case = run_case(replicas=4, versions=3, drain=DRAIN, mode="abort", clients=4)
    assert case.requests > 20
    assert (case.failed, case.below, case.mixed) == (0, 0, 0), case


@with_router
def test_sglang_router_passes_the_minimum_on_and_the_refusal_back() -> None:
    router = free_port()
    replica = Replica(free_port())
    with sglang_router(router), replica.serving():
        url = f"http://127.0.0.1:{router}"
        httpx.post(f"{url}/workers", json={"url": replica.url}, trust_env=False).raise_for_status()
        wait_for("the worker", lambda: httpx.get(f"{url}/workers", trust_env=False).json()["total"] == 1)
        replica.engine = type("Serving", (), {"serving": "run@7"})()
        asked = {
            header: httpx.post(f"{url}/generate", json={"text": "a"}, headers={header: value}, trust_env=False)
            for header, value in (("tracestate", "weightsync-min=run@8"), ("X-Weightsync-Min-Version", "run@8"))
        }
    assert asked["tracestate"].status_code == 409
    assert asked["tracestate"].headers["X-Weightsync-Version"] == "run@7"
    # The router drops headers that it does not know. A release that passes them on makes this line fail: then say so in the guide.
    assert asked["X-Weightsync-Min-Version"].status_code == 200


@pytest.mark.parametrize(
    "router",
    ["http://router:30000", "sglang+ftp://router", "sglang+http://user:secret@router", "webhook+http://x/?a=b", "x+http://y"],
)
def test_what_is_no_router_is_refused(router: str) -> None:
    with pytest.raises(ConfigurationError, match="is no router: write it as"):
        ServerSettings.load({"WEIGHTSYNC_ROUTERS": f"sglang+http://good:1, {router}"})


@pytest.mark.parametrize("url", ["replica:8000", "http://user@replica:8000", "http://replica:8000?a=b", "http://a b", "file:///x"])
def test_a_replica_says_a_url_that_routers_can_use(server: BackgroundServer, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WEIGHTSYNC_REPLICA_URL", url)
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_REPLICA_URL"):
        Engine(ModuleAdapter(torch.nn.Linear(4, 4)), "replica", server.url, token=server.token)
    monkeypatch.setattr("weightsync.engine.engine.replica_url", lambda: url)  # one that does not check
    with pytest.raises(ProtocolError, match="a URL that no router can use"):
        Engine(ModuleAdapter(torch.nn.Linear(4, 4)), "replica", server.url, token=server.token)
