"""A relay: a process without a model that follows a store, and engines far from the trainer that read from it."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tests.integration.server.service_support import free_port
from tests.integration.server.test_service_lost import process as coordinator
from tests.processes import ChildProcess

import weightsync
from weightsync.cli.commands import EXIT_INTERRUPTED
from weightsync.cli.store import OpenedStore
from weightsync.config import ClientSettings, ServerSettings
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleAdapter
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync.store.catalog import manifest_path
from weightsync.store.signing import SigningKey, new_secret
from weightsync_relay.relay import Relay

pytestmark = pytest.mark.usefixtures("runtime")

SECONDS = 40.0
RUN = "run"
INTERVAL = 0.2


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).bfloat16()


def same(served: torch.nn.Module, trained: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, trained[name]) for name, tensor in served.state_dict().items())


class Home:
    """The region of the trainer: a coordinator, a trainer, and their store."""

    def __init__(self, where: str, owned: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where, self.model = where, model()
        with monkeypatch.context() as here:
            here.setenv("WEIGHTSYNC_STORE", where)
            self.server = owned.enter_context(BackgroundServer(ServerSettings.load(port=0, require=0, run=RUN, state_dir="off")))
            self.trainer = owned.enter_context(weightsync.Trainer(self.model, self.server.url, deltas=True))
        self.published: dict[int, tuple[weightsync.Version, dict[str, torch.Tensor]]] = {}

    @property
    def key(self) -> SigningKey:
        return self.server.coordinator.stored.key

    def publish(self) -> int:
        with torch.no_grad():
            self.model.get_parameter("0.weight")[3, :17] += 1
        result = self.trainer.publish(step=100 + len(self.published))
        assert self.trainer.wait_until_stored(SECONDS) == result.version
        number = result.version.number
        self.published[number] = result.version, {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return number


class Region:
    """A coordinator far away, with two engines."""

    def __init__(self, owned: ExitStack, url: str = "") -> None:
        if not url:
            settings = ServerSettings.load(port=0, require=0, run=RUN, state_dir="off", heartbeat=0.5)
            self.server = owned.enter_context(BackgroundServer(settings))
            url = self.server.url
        self.url = url
        self.served = [model(seed) for seed in (1, 2)]
        self.engines = [
            owned.enter_context(weightsync.Engine(ModuleAdapter(module), f"far-{index}", url))
            for index, module in enumerate(self.served)
        ]

    def serves(self, home: Home, number: int) -> None:
        """Wait until both engines serve this version of the trainer: its label, its digest, its bits."""
        version, trained = home.published[number]
        for engine, module in zip(self.engines, self.served, strict=True):
            engine.wait_for_version(number, timeout=SECONDS)
            assert engine.serving == version
            assert same(module, trained)

    def rounds(self) -> tuple[weightsync.RoundResult, ...]:
        return self.server.coordinator.status().rounds

    @property
    def client(self) -> Client:
        return Client(ClientSettings.load(coordinator=self.url))


class RelayProcess(ChildProcess):
    """``weightsync relay`` as a process; what it prints is its log."""

    def __init__(self, home: Home, region: Region | None, *options: str) -> None:
        arguments = ("--store", home.where, "--run", RUN, "--key", home.key.public_text, "--interval", INTERVAL, *options)
        place = {} if region is None else {"WEIGHTSYNC_COORDINATOR": region.url}
        environment = {"WEIGHTSYNC_PORT": "0", **place}
        # As the command does. `python -m` ends itself by SIGINT if an interrupt, also one that is caught, meets exec() of a string.
        program = ("-c", "from weightsync.cli.main import main; main()")
        super().__init__(*program, "relay", *arguments, stderr=subprocess.STDOUT, environment=environment)

    def says(self, pattern: str) -> re.Match[str]:
        """Wait for a line with this pattern."""
        while (match := re.search(pattern, self.printed)) is None:
            self.line(SECONDS)
        return match


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as owned:
        yield owned


@pytest.fixture
def home(tmp_path: Path, owned: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(str(tmp_path / "store"), owned, monkeypatch)


@pytest.fixture
def region(owned: ExitStack) -> Region:
    return Region(owned)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = Deadline(SECONDS)
    while not condition():
        threading.Event().wait(min(0.05, deadline.remaining(what)))


def alerts(region: Region) -> list[str]:
    with region.client as client:
        return [alert.text for alert in client.status().alerts]


def test_engines_far_away_serve_what_the_trainer_published(home: Home, region: Region) -> None:
    home.publish()
    with RelayProcess(home, region, "--deltas") as process:
        region.serves(home, 0)
        home.publish()
        region.serves(home, 1)
        until(lambda: region.rounds()[-1].step == 101, "the round of the second version to end")
        [*_, last] = region.rounds()
        assert {replica.base for replica in last.replicas} == {0}
        assert last.nbytes == 2 * 17 * 4  # the changed words and their places, to both
        process.send_signal(signal.SIGINT)
        assert process.exit_code(SECONDS) == 0 and "relay stopped" in process.printed
    assert alerts(region) == []
    region.serves(home, 1)


@pytest.mark.slow
@pytest.mark.rare
def test_a_relay_that_is_killed_has_a_successor(home: Home, region: Region, owned: ExitStack) -> None:
    home.publish()
    with RelayProcess(home, region) as process:
        region.serves(home, 0)
        process.kill()
    region.serves(home, 0)
    late = model(3)
    engine = owned.enter_context(weightsync.Engine(ModuleAdapter(late), "late", region.url))
    with RelayProcess(home, region):
        engine.wait_for_version(0, timeout=SECONDS)
        assert engine.serving == home.published[0][0] and same(late, home.published[0][1])
        until(lambda: len(region.rounds()) > 1, "the round of the same version")
        again = {replica.name: replica for replica in region.rounds()[1].replicas}
        assert again["late"].nbytes > 0  # the others serve it, and are not paused
        assert all(again[name].phases == {} and again[name].error is None for name in ("far-0", "far-1"))
        assert region.rounds()[1].ok and region.rounds()[1].version == region.rounds()[0].version
        home.publish()
        region.serves(home, 1)
        engine.wait_for_version(1, timeout=SECONDS)


@pytest.mark.rare
def test_bytes_that_were_changed_in_the_store_are_never_published(home: Home, region: Region, owned: ExitStack) -> None:
    home.publish()
    with RelayProcess(home, region) as process:
        region.serves(home, 0)
        process.send_signal(signal.SIGSTOP)
        home.publish()
        delta = next(Path(home.where).rglob("1.1.0-*.safetensors"))
        good = delta.read_bytes()
        delta.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        process.send_signal(signal.SIGCONT)
        process.says(
            r"ERROR store .*: no newer version comes: VerificationError: .*it was changed \(version run@1\)\. Next .* 0\.4 s"
        )
        until(lambda: any("relays no newer version: VerificationError" in text for text in alerts(region)), "the alert")
        assert region.server.coordinator.gauges().relay_failing
        late = model(3)  # gets the last good version
        with weightsync.Engine(ModuleAdapter(late), "late", region.url) as engine:
            engine.wait_for_version(0, timeout=SECONDS)
            assert same(late, home.published[0][1])
        region.serves(home, 0)
        assert [result.version.number for result in region.rounds() if not result.ok or result.version.number] == []
        delta.write_bytes(good)
        region.serves(home, 1)
        process.says("INFO store .*: versions come again")
        until(lambda: alerts(region) == [] and not region.server.coordinator.gauges().relay_failing, "the end of the alert")


@pytest.mark.rare
def test_a_manifest_that_another_key_signed_is_said_and_passed_over(home: Home, region: Region) -> None:
    home.publish()
    genuine = Path(home.where) / manifest_path(RUN, (1, 0))
    forged = Path(home.where) / manifest_path(RUN, (9, 9))
    forged.write_bytes(genuine.read_bytes())
    with RelayProcess(home, region) as process:
        region.serves(home, 0)
        process.says("ERROR store .*: no newer version comes: AuthenticationError: .* version 9 of epoch 9 of run run")
        until(lambda: any("relays no newer version: AuthenticationError" in text for text in alerts(region)), "the alert")
        home.publish()
        region.serves(home, 1)
    with RelayProcess(home, region, "--key", SigningKey(new_secret()).public_text, "--once") as process:
        assert process.exit_code(SECONDS) == 2 and "was not signed with this run's key" in process.printed


def test_a_coordinator_that_is_restarted_gets_the_version_again(home: Home, owned: ExitStack) -> None:
    home.publish()
    child, address = owned.enter_context(coordinator())
    region = Region(owned, address.url)
    with RelayProcess(home, region) as process:
        region.serves(home, 0)
        forged = Path(home.where) / manifest_path(RUN, (9, 9))  # the store fails, too
        forged.write_bytes(b"forged")
        process.says("no newer version comes: AuthenticationError")
        child.kill()
        owned.enter_context(coordinator(address.port))
        late = model(3)
        with weightsync.Engine(ModuleAdapter(late), "late", region.url) as engine:
            engine.wait_for_version(0, timeout=SECONDS)
            assert engine.serving == home.published[0][0] and same(late, home.published[0][1])
        forged.unlink()
        home.publish()
        region.serves(home, 1)


@pytest.mark.rare
def test_the_coordinator_may_be_in_the_process_of_the_relay(home: Home, owned: ExitStack, tmp_path: Path) -> None:
    home.publish()
    with RelayProcess(home, None) as process:
        url = process.says("coordinator of run run at (http://[0-9.:]+)")[1]
        port = url.rpartition(":")[2]
        region = Region(owned, url)
        region.serves(home, 0)
        process.send_signal(signal.SIGTERM)
        assert process.exit_code(SECONDS) == 0
        assert not list((tmp_path / "weightsync").glob(f"{port}.*"))
    region.serves(home, 0)


@pytest.mark.slow
def test_once(home: Home, region: Region) -> None:
    with RelayProcess(home, region, "--once") as process:
        assert process.exit_code(SECONDS) == 1 and "has no version of run run" in process.printed
    home.publish()
    home.publish()
    with RelayProcess(home, region, "--once") as process:
        assert process.exit_code(SECONDS) == 0
    region.serves(home, 1)
    assert [result.version.number for result in region.rounds()] == [1]
    with RelayProcess(home, None, "--once") as process:
        assert process.exit_code(SECONDS) == 2 and "--once leaves no coordinator behind" in process.printed


def test_once_that_is_interrupted_is_no_success(home: Home) -> None:
    home.publish()
    with RelayProcess(home, None, "--once", "--coordinator", f"http://127.0.0.1:{free_port()}") as process:
        process.says("reading version run@0")
        process.send_signal(signal.SIGTERM)
        assert process.exit_code(SECONDS) == EXIT_INTERRUPTED, process.printed


def test_a_wrong_key_is_an_error_at_once(home: Home, region: Region) -> None:
    home.publish()
    other = SigningKey(new_secret()).public_text
    with RelayProcess(home, region, "--key", other) as process:
        assert process.exit_code(SECONDS) not in (0, -signal.SIGKILL)
        assert "AuthenticationError" in process.printed or "not signed" in process.printed


@pytest.mark.rare
def test_a_store_that_goes_back_is_an_alert_and_changes_nothing(home: Home, region: Region) -> None:
    home.publish()
    home.publish()
    with RelayProcess(home, region) as process:
        region.serves(home, 1)
        (Path(home.where) / manifest_path(RUN, (1, 1))).unlink()
        process.says("no newer version comes: VersionError: the store went back: its newest version is older than run@1")
        until(lambda: any("the store went back" in text for text in alerts(region)), "an alert")
        home.publish()
        region.serves(home, 2)
        process.says("versions come again")


def test_a_claim_that_was_withdrawn_keeps_no_version_from_the_region(home: Home, region: Region, owned: ExitStack) -> None:
    """The relay had heard of a later version, from an engine alone, and waited for one that is later still."""
    home.publish()
    version, _ = home.published[0]
    with weightsync.Engine(ModuleAdapter(model(5)), "liar", region.url) as liar:
        liar._role.session.serving = weightsync.Version(RUN, 1000, version.manifest, "ab" * 8)
        liar._link.connect_again()
        until(lambda: region.server.coordinator.status().last == 1000, "the claim")
        relay = owned.enter_context(RelayProcess(home, region))
        relay.says("its newest version is run@0, which cannot be published here: .* the last one is 1000.*revoke liar/0")
    region.serves(home, 0)


class _Slow:
    """A store that takes a second for each read."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, *where: Any) -> Any:
        threading.Event().wait(1)
        return self._store.read(*where)


def test_a_relay_that_is_closed_while_it_reads_leaves_no_trainer(home: Home, region: Region) -> None:
    home.publish()
    opened = OpenedStore(home.where, RUN, home.key.public_text)
    slow = Relay(_Slow(opened.store), RUN, opened.public, region.url, token=region.server.token, interval=INTERVAL)  # type: ignore[arg-type]
    following = threading.Thread(target=slow.follow)
    following.start()
    threading.Event().wait(0.5)
    slow.close()
    following.join(SECONDS)
    assert not following.is_alive()
    until(lambda: region.server.coordinator.status().trainer == (), "leaving")  # the coordinator hears of it a moment later
    assert region.server.coordinator.status().last == -1


@pytest.mark.slow
@pytest.mark.rare
def test_a_store_that_is_behind_is_said_and_nothing_is_published(home: Home, region: Region) -> None:
    home.publish()
    home.publish()
    with RelayProcess(home, region, "--once") as process:
        assert process.exit_code(SECONDS) == 0
    region.serves(home, 1)
    (Path(home.where) / manifest_path(RUN, (1, 1))).unlink()
    with RelayProcess(home, region) as process:
        process.says("its newest version is run@0, which cannot be published here: .* the last one is 1")
    region.serves(home, 1)
    assert len(region.rounds()) == 1


@pytest.mark.rare
def test_the_store_may_be_s3(owned: ExitStack, monkeypatch: pytest.MonkeyPatch, region: Region) -> None:
    moto = pytest.importorskip("moto.server")
    served = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    owned.callback(served.stop)
    host, port = served.get_host_and_port()
    aws = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
    for name, value in (aws | {"ALLOW_HTTP": "true"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with urlopen(Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=SECONDS):
        pass
    home = Home("s3://bucket/a/prefix", owned, monkeypatch)
    home.publish()
    with RelayProcess(home, region, "--deltas"):
        region.serves(home, 0)
        home.publish()
        region.serves(home, 1)
