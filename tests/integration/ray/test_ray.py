"""weightsync on a real local Ray cluster: FSDP2 trainer actors, replica actors, deaths and restarts, and what Ray carries."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.ray import ray_actors
from tests.integration.ray.ray_actors import COLUMNS, MODEL_BYTES, ROWS, TIMEOUT, change, mark, model
from tests.integration.server.service_support import free_port

from weightsync.config import Address, ClientSettings
from weightsync.coordinator.status import ReplicaStatus
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    DeadlineExceeded,
    MembershipError,
    PeerLost,
    VersionError,
)
from weightsync.protocol.messages import RoundResult
from weightsync.protocol.tokens import generate
from weightsync.server.client import Client

ray = pytest.importorskip("ray", reason="Ray is not installed here")

from weightsync_ray import Manager, start_coordinator  # noqa: E402 - after the look for Ray
from weightsync_ray.coordinator_actor import cluster_settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
RESTART = 4 * TIMEOUT
"""Seconds in which Ray starts an actor again; five at a time on two busy cores more than 270."""
SMALL = 32 << 10
"""Bytes of the largest thing that Ray may carry for us; the model has 8 MiB."""

pytestmark = [
    pytest.mark.timeout(600),  # the cluster and its actors start in the first one
    pytest.mark.filterwarnings("ignore:.*:ResourceWarning:subprocess"),  # Ray leaves its services' handles to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


def _of_session(name: str) -> Iterator[str]:
    """Processes that write to the log files of a Ray session, as all of its do."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if any(name in os.readlink(file) for file in (process / "fd").iterdir()):
                yield process.name


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # pytest's own folders are too long for Ray's sockets
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",  # eight processes that import Ray, before it is known what they are for
    }
    try:
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=80 << 20,
            _temp_dir=str(folder),
        )
        yield folder
        until, pause = time.monotonic() + TIMEOUT, threading.Event()
        here = Path(ray._private.worker._global_node.get_session_dir_path()).name
        ray.shutdown()
        while (left := list(_of_session(here))) and time.monotonic() < until:
            pause.wait(0.1)
        assert not left, "Ray's processes are still there"
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ |= before
        shutil.rmtree(folder, ignore_errors=True)


def actor(kind: type, *arguments: object, **options: object) -> Any:
    return ray.remote(kind).options(**{"num_cpus": 1, **options}).remote(*arguments)


class World:
    """The actors that the tests share, and what the trainer's model is now."""

    def __init__(self, folder: Path) -> None:
        store = str(folder / "store")
        self.trainers = [actor(ray_actors.Trainer, rank, 2, store) for rank in range(2)]
        self.single = actor(ray_actors.Engine, max_restarts=2)
        self.halves = [actor(ray_actors.Engine, rank) for rank in range(2)]
        self.reference = model(5)
        self.number = 0

    def step(self) -> int:
        """Train; returns the next version's number."""
        self.number += 1
        ray.get([one.step.remote(self.number) for one in self.trainers], timeout=TIMEOUT)
        change(self.reference, self.number)
        return self.number

    def whole(self, result: RoundResult) -> tuple[str, list[str]]:
        return str(result.version), mark([self.reference.weight, self.reference.bias])

    def half(self, result: RoundResult, rank: int) -> tuple[str, list[str]]:
        rows = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        return str(result.version), mark([self.reference.weight[rows], self.reference.bias[rows]])

    def add_trainer(self, manager: Manager) -> None:
        manager.add_trainer(ray_actors.Group(self.trainers), lambda worker: worker.model)

    def add_single(self, manager: Manager) -> None:
        manager.add_replica("single", self.single, lambda worker: worker.adapter)

    def add_halves(self, manager: Manager) -> None:
        manager.add_replica("halves", self.halves, lambda worker: worker.adapter)

    @property
    def actors(self) -> list[Any]:
        return [*self.trainers, self.single, *self.halves]


@pytest.fixture(scope="module")
def world(cluster: Path) -> World:
    made = World(cluster)
    ray.get([one.pid.remote() for one in made.actors], timeout=RESTART)
    return made


@contextmanager
def managed(**options: Any) -> Iterator[Manager]:
    """A manager that leaves no thread behind."""
    before = set(threading.enumerate())
    with Manager(**options) as manager:
        yield manager
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("weightsync")]
    assert not left


def states(result: RoundResult) -> dict[str, tuple[str, int | None]]:
    return {one.name: (one.state, one.version) for one in result.replicas}


def pid(one: Any) -> int:
    asked = one.__ray_call__.options(max_task_retries=-1).remote(lambda _: os.getpid())
    return int(ray.get(asked, timeout=TIMEOUT))


def restart(one: Any) -> None:
    """Kill an actor that Ray restarts, and return when another process has taken its place."""
    before, pause = pid(one), threading.Event()
    ray.kill(one, no_restart=False)
    for _ in range(100):
        if pid(one) != before:
            return
        pause.wait(0.05)
    pytest.fail("the actor was not restarted")


def when(manager: Manager, there: Callable[[dict[str, ReplicaStatus]], bool]) -> dict[str, ReplicaStatus]:
    """The replicas, as soon as they are so."""
    until, pause, found = time.monotonic() + RESTART, threading.Event(), dict[str, ReplicaStatus]()
    while time.monotonic() < until:
        with suppress(CoordinatorUnreachable):  # it is being restarted
            found = {one.name: one for one in manager.status().replicas}
            if there(found):
                return found
        pause.wait(0.05)
    pytest.fail(f"the replicas did not come to be so: {found}")


def test_shards_reach_every_replica_and_ray_carries_none_of_it(world: World) -> None:
    ray_actors.count_what_ray_carries(None)
    ray.get([one.__ray_call__.remote(ray_actors.count_what_ray_carries) for one in world.actors], timeout=TIMEOUT)
    places = ray.get([one.pid.remote() for one in world.actors], timeout=TIMEOUT)
    with managed() as manager:
        world.add_trainer(manager)
        world.add_single(manager)
        world.add_halves(manager)
        for asynchronous in (False, True):
            number = world.step()
            result = asyncio.run(manager.update_weights_async(number)) if asynchronous else manager.update_weights(number)
            assert (result.ok, result.version.number, result.nbytes) == (True, number, 2 * MODEL_BYTES)
            assert states(result) == {"single": ("loaded", number), "halves": ("loaded", number)}
            assert all(one.verified == "installed" for one in result.replicas)
            assert ray.get(world.single.mark.remote(), timeout=TIMEOUT) == world.whole(result)
            assert ray.get([one.mark.remote() for one in world.halves], timeout=TIMEOUT) == [
                world.half(result, 0),
                world.half(result, 1),
            ]
    assert ray.get([one.pid.remote() for one in world.actors], timeout=TIMEOUT) == places
    carried = [ray_actors.what_ray_carried(None)]
    carried += ray.get([one.__ray_call__.remote(ray_actors.what_ray_carried) for one in world.actors], timeout=TIMEOUT)
    assert all(carried), "nothing was counted"
    assert max(map(max, carried)) < SMALL
    # The count sees a tensor: a part of the model, sent as it must not be.
    ray.get(world.single.__ray_call__.remote(lambda worker: worker.model.weight.detach().numpy()), timeout=TIMEOUT)
    assert max(ray.get(world.single.__ray_call__.remote(ray_actors.what_ray_carried), timeout=TIMEOUT)) > 4 * ROWS * COLUMNS


@pytest.mark.rare
@pytest.mark.rare
def test_an_actor_killed_in_a_round_is_a_lost_replica_and_is_seeded_when_ray_restarts_it(world: World) -> None:
    with managed() as manager, ThreadPoolExecutor(1) as pool:
        world.add_trainer(manager)
        world.add_single(manager)
        world.add_halves(manager)
        before = ray.get(world.single.pid.remote(), timeout=TIMEOUT)
        ray.get(world.single.stall.remote(), timeout=TIMEOUT)
        number = world.step()
        asked = pool.submit(manager.update_weights, number, 60)
        assert ray.get(world.single.stalled.remote(), timeout=TIMEOUT)
        killed = time.monotonic()
        ray.kill(world.single, no_restart=False)
        result = asked.result(TIMEOUT)
        assert time.monotonic() - killed < TIMEOUT / 2, "the others waited for the dead one"
        found = states(result)
        assert found.pop("halves") == ("loaded", number)
        assert found["single"][0] in ("lost", "dirty")
        assert found["single"][1] is None
        # Nobody publishes: the restarted actor joins, and is brought to what is published.
        replicas = when(manager, lambda found: found["single"].state == "loaded")
        assert replicas["single"].version == number
        assert ray.get(world.single.mark.remote(), timeout=TIMEOUT) == world.whole(result)
        assert ray.get(world.single.pid.remote(), timeout=TIMEOUT) != before
        assert replicas["halves"].version == number


@pytest.mark.rare
@pytest.mark.rare
def test_a_coordinator_in_an_actor_survives_its_restart(world: World) -> None:
    port = free_port()
    operator = generate()
    coordinator = start_coordinator(port=port, run="held", max_restarts=1, operator_token=operator.reveal())
    with managed(coordinator=coordinator) as manager:
        world.add_trainer(manager)
        world.add_halves(manager)
        first = manager.update_weights(world.step())
        assert first.version.run == "held"
        restart(coordinator)
        when(manager, lambda found: "halves" in found and found["halves"].state == "loaded")
        second = manager.update_weights(world.step())
        assert (second.version.run, states(second)) == ("held", {"halves": ("loaded", world.number)})
        assert ray.get(world.halves[1].mark.remote(), timeout=TIMEOUT) == world.half(second, 1)
        with pytest.raises(VersionError, match=str(world.number)):
            manager.update_weights(world.number)
        with pytest.raises(VersionError, match=str(world.number)):
            asyncio.run(manager.update_weights_async(world.number))
        with pytest.raises(AuthenticationError), managed(coordinator=manager.coordinator, token="wrong"):
            pass
        where = ClientSettings(coordinator=Address.parse(manager.coordinator))
        with Client(where, operator) as client, pytest.raises(MembershipError, match="nothing to update"):
            client.start_round()
        access = ray.get(coordinator.access.remote(), timeout=TIMEOUT)
        assert operator.reveal() not in (access.token, *manager.environment.values()), "no worker gets it"
    ray.kill(coordinator)


@pytest.mark.rare
def test_a_replica_leaves_and_comes_back_as_another(world: World) -> None:
    with managed() as manager:
        world.add_trainer(manager)
        world.add_halves(manager)
        manager.update_weights(world.step())
        manager.remove_replica("halves")
        with pytest.raises(MembershipError, match="halves"):
            manager.remove_replica("halves")
        assert not any(one.ranks for one in manager.status().replicas)
        manager.add_replica("others", world.halves, lambda worker: worker.adapter)
        assert when(manager, lambda found: found.get("others") is not None and found["others"].state == "loaded")

        async def cancelled() -> None:
            asked = asyncio.create_task(manager.update_weights_async(world.number + 1))
            await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

        asyncio.run(cancelled())
        assert manager.update_weights(world.number + 2).ok, "a call that was cancelled stands in the way"


@pytest.mark.rare
@pytest.mark.rare
def test_the_token_reaches_actors_by_a_file_and_no_log(world: World, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes ``env_vars`` into ``runtime_env_agent.log``, which everybody on the node can read: the token was there."""
    token = generate()
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", token.reveal())
    with managed() as manager:
        world.add_trainer(manager)
        assert repr(token) in repr(manager._settings)
        assert token.reveal() not in repr(manager._access)
        environment = manager.environment
        assert environment["WEIGHTSYNC_COORDINATOR"] == manager.coordinator
        assert token.reveal() not in str(environment)
        file = Path(environment["WEIGHTSYNC_TOKEN_FILE"])
        assert (file.read_text(), file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (token.reveal(), 0o600, 0o700)
        assert manager.environment == environment
        alone = actor(ray_actors.Alone, num_cpus=0, runtime_env={"env_vars": environment})
        assert ray.get(alone.status.remote(), timeout=TIMEOUT) == manager.status().run
        ray.kill(alone)
        read = [path for path in cluster.rglob("*") if path.is_file() and path.stat().st_size < 64 << 20]
        assert any(path.name == "runtime_env_agent.log" and str(file) in path.read_text() for path in read), "Ray logs them"
        assert not [path for path in read if token.reveal().encode() in path.read_bytes()]
    assert not file.parent.exists()


@pytest.mark.rare
def test_what_an_actor_raises_is_raised_here_and_nobody_stays_joined(world: World) -> None:
    with managed() as manager:
        with pytest.raises(ConfigurationError, match="add_trainer"):
            manager.update_weights(1)
        with pytest.raises(AttributeError, match="nothing"):
            manager.add_replica("half", world.halves, lambda worker: worker.adapter if worker.adapter.first else worker.nothing)
        assert not any(one.ranks for one in manager.status().replicas)
        with pytest.raises(ConfigurationError, match="not an engine adapter"):
            manager.add_replica("half", world.halves, lambda worker: worker.model)
        mine = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match=r"'mine' is a Linear of this process"):
            manager.add_replica("half", world.halves, lambda worker: ModuleAdapter(mine))
        for group in ([], "workers", [1, 2], None):
            with pytest.raises(ConfigurationError, match="not a worker group"):
                manager.add_replica("half", group, lambda worker: worker.adapter)
        world.halves[0].sleep.remote(1.0)
        with pytest.raises(DeadlineExceeded, match=r"replica 'half', rank 0.*busy"):
            manager.add_replica("half", world.halves[0], lambda worker: worker.adapter, timeout=0.1)


@pytest.mark.rare
@pytest.mark.rare
def test_a_dead_trainer_actor_is_named_at_once(world: World) -> None:
    with managed() as manager:
        world.add_trainer(manager)
        world.add_halves(manager)
        ray.kill(world.trainers[1])
        begun = time.monotonic()
        for _ in range(2):  # noticed by Ray in the call, or by the coordinator before it
            with pytest.raises(PeerLost, match=r"the trainer, rank 1"):
                manager.update_weights(world.number + 1, timeout=300)
        assert time.monotonic() - begun < TIMEOUT, "the other rank waited for the dead one"
        ray.kill(world.trainers[0])


def test_a_port_that_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a coordinator that Ray restarts listens elsewhere than its agents look."""
    monkeypatch.setenv("WEIGHTSYNC_PORT", "7111")
    assert [cluster_settings(port).port for port in (0, 7222)] == [7111, 7222]


def test_without_ray_the_error_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['ray'] = None\nimport weightsync_ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "pip install 'ray>=2.40'" in done.stderr
